// A heat map that is kept fresh: at most one request a second, ten times less often than a request takes, and none for
// what nobody sees.

import { getGrid } from "../api.js";
import { setText } from "../dom.js";
import { HeatMap } from "./heatmap.js";

/** @import { Mode } from "../types.js" */
/** @import { TrackOptions } from "../track.js" */

const SHORTEST_MS = 1000;
const SPARE = 10;

export class LivePanel {
  #serial = 0;
  #last = 0;
  #cost = 0;
  #timer = 0;
  #visible = true;
  #stale = false;

  /** @param {TrackOptions & {mode: Mode, onRow?: (name: string) => void}} chart */
  constructor(chart) {
    this.map = new HeatMap({ ...chart, tip: (row, column) => this.tip(row, column) });
  }

  watch() {
    /** @param {IntersectionObserverEntry[]} entries */
    const seen = ([entry]) => ((this.#visible = entry.isIntersecting), this.#plan());
    new IntersectionObserver(seen, { rootMargin: "200px" }).observe(this.map.root);
    document.addEventListener("visibilitychange", () => this.#plan());
  }

  /** There is newer data: load it when it is worth it. */
  touch() {
    this.#stale = true;
    this.#plan();
  }

  #plan() {
    if (!this.#stale || this.#timer || !this.#visible || document.hidden) return;
    const wait = Math.max(SHORTEST_MS, SPARE * this.#cost) - (performance.now() - this.#last);
    this.#timer = setTimeout(() => this.#fire(), Math.max(0, wait));
  }

  #fire() {
    this.#timer = 0;
    // Loaded meanwhile for another reason, out of sight since, or an error that the next step will try again.
    if (this.#stale && this.#visible && !document.hidden) this.load().catch(() => {});
  }

  /** Loads and shows the current choice; an answer that was overtaken by a newer choice is dropped. */
  async load() {
    const serial = ++this.#serial;
    const begin = performance.now();
    this.#stale = false;
    this.#last = begin;
    try {
      const grid = await getGrid(this.address());
      if (serial !== this.#serial) return;
      this.map.show(grid);
      this.shown();
    } finally {
      this.#cost = performance.now() - begin;
    }
  }

  reload() {
    this.load().catch((error) => setText(this.map.hint, error.message));
  }

  shown() {}

  /** Where the grid of the current choice is. */
  address() {
    return "";
  }

  /**
   * The tooltip's lines for a cell.
   * @param {number} _row
   * @param {number} _column
   * @returns {string[]}
   */
  tip(_row, _column) {
    return [];
  }
}
