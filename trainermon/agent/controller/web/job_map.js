// All ranks of a large job on one canvas: a square for each, node by node, in the colour of the worst that is to be said.

import { byId, el, fitCanvas } from "./dom.js";
import { describe, needsLook, toneOf } from "./job_state.js";
import { formatStep } from "./scales.js";
import { onTheme } from "./theme.js";
import { hideTip, showTip } from "./tip.js";

/** @import { JobRank, JobState } from "./types.js" */

const CELL = 7; // CSS pixels, with the gap
const GAP = 1;
/** @type {Record<string, string>} */
const COLOURS = { fine: "good", behind: "warning", info: "warning", warning: "warning", critical: "critical", fatal: "fatal", gone: "critical", unknown: "faint", ended: "faint" };

export class RankMap {
  /** @type {JobRank[]} */
  #ranks = [];
  #columns = 1;
  #painted = "";
  #canvas = el("canvas", { role: "img", tabindex: -1 });

  /** @param {(rank: JobRank) => void} onPick - hears of the rank that was clicked */
  constructor(onPick) {
    byId("map").append(this.#canvas);
    this.#canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.#canvas.addEventListener("pointerleave", hideTip);
    this.#canvas.addEventListener("click", (event) => {
      const rank = this.#at(event);
      if (rank) onPick(rank);
    });
    new ResizeObserver(() => this.#paint()).observe(byId("map"));
    onTheme(() => ((this.#painted = ""), this.#paint()));
  }

  /** @param {JobState} state */
  show(state) {
    this.#ranks = state.ranks;
    this.#paint();
  }

  #paint() {
    const width = byId("map").clientWidth;
    const tones = this.#ranks.map(toneOf);
    const painted = `${width} ${tones.join(" ")}`;
    if (!width || painted === this.#painted) return;
    this.#painted = painted;
    const perNode = Math.max(1, this.#ranks.findIndex(({ url }) => url !== this.#ranks[0]?.url)); // nodes are not torn apart
    const most = Math.max(1, Math.floor(width / CELL));
    this.#columns = most > perNode ? most - (most % perNode) : most;
    const height = Math.ceil(tones.length / this.#columns) * CELL;
    const context = fitCanvas(this.#canvas, width, height);
    this.#canvas.style.cssText = `width: ${width}px; height: ${height}px`;
    const style = getComputedStyle(document.documentElement);
    const colours = Object.fromEntries(Object.entries(COLOURS).map(([tone, name]) => [tone, style.getPropertyValue(`--${name}`)]));
    tones.forEach((tone, k) => {
      const [x, y] = [(k % this.#columns) * CELL, Math.floor(k / this.#columns) * CELL];
      context.fillStyle = colours[tone];
      if (tone === "gone") context.clearRect(x, y, CELL, CELL);
      context.fillRect(x, y, CELL - GAP, CELL - GAP);
      if (tone === "gone") context.clearRect(x + 1.5, y + 1.5, CELL - GAP - 3, CELL - GAP - 3);
    });
    const troubled = this.#ranks.filter(needsLook).length;
    this.#canvas.setAttribute("aria-label", `${formatStep(tones.length)} ranks, ${formatStep(troubled)} of them need a look`);
  }

  /** @param {MouseEvent} event */
  #at(event) {
    const [column, row] = [Math.floor(event.offsetX / CELL), Math.floor(event.offsetY / CELL)];
    return column < this.#columns ? this.#ranks[row * this.#columns + column] : undefined;
  }

  /** @param {PointerEvent} event */
  #point(event) {
    const rank = this.#at(event);
    this.#canvas.style.cursor = rank ? "pointer" : "";
    if (rank) showTip([`rank ${rank.rank}`, rank.node ?? "", describe(rank)], event.clientX, event.clientY);
    else hideTip();
  }
}
