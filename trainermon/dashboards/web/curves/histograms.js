// The distribution of a picked row, where histograms of it were taken: which row it is of, and how fresh it is.

import { getHistograms, histogramAddress, histogramTableAddress } from "../api.js";
import { el, segmented, select, setText } from "../dom.js";
import { formatStep } from "../scales.js";
import { kindText } from "../words.js";
import { DensityChart } from "./density.js";
import { fileName, savePicture } from "./saving.js";

/** @import { Histograms, PickedRow } from "../types.js" */
/** @import { TrackOptions } from "../track.js" */

const HEIGHT = 280;
const SETTLED_MS = 150;
const FRESH_MS = 10_000;
const COLUMN_PIXELS = 2;

export class HistogramPanel {
  /** @type {PickedRow[]} */
  rows = [];
  /** @type {PickedRow | null} */
  chosen = null;
  #serial = 0;
  #timer = 0;
  #last = -Infinity;
  #asked = "";

  /** @param {Pick<TrackOptions, "parent" | "view"> & {after: HTMLElement}} place */
  constructor({ parent, view, after }) {
    this.view = view;
    this.after = after;
    this.chart = new DensityChart({ parent, view, title: "Distribution", height: HEIGHT, label: "Distribution of the elements of a row over steps" });
    this.chart.root.remove(); // it comes when there is something to show
    view.addEventListener("range", () => String(view.zoomed) !== this.#asked && this.#soon(SETTLED_MS));
  }

  /**
   * The rows that a reader has picked: the last of them is shown, or the one that was chosen before.
   * @param {PickedRow[]} rows
   */
  take(rows) {
    const isNew = rows.length > this.rows.length;
    this.rows = rows;
    const still = rows.find(({ kind, row }) => kind === this.chosen?.kind && row === this.chosen.row);
    this.#choose((isNew ? null : still) ?? rows[rows.length - 1] ?? null);
  }

  /** There are newer steps. */
  touch() {
    if (this.chosen && !document.hidden) this.#soon(Math.max(0, this.#last + FRESH_MS - performance.now()));
  }

  /** @param {PickedRow | null} picked */
  #choose(picked) {
    this.chosen = picked;
    this.#serial++;
    if (!picked) return this.chart.root.remove();
    this.#load();
  }

  /** @param {PickedRow} picked */
  #controls(picked) {
    const options = this.rows.map(({ kind, row }, place) => [String(place), `${row} (${kindText(kind)})`]);
    const place = String(this.rows.indexOf(picked));
    /** @param {string} text */
    const scale = (text) => ((this.chart.log = text === "log"), this.chart.redraw());
    const name = `${fileName(picked.row)}_histograms`;
    this.chart.controls.replaceChildren(
      ...(this.rows.length > 1 ? [select("Distribution of", options, place, (value) => this.#choose(this.rows[Number(value)]))] : []),
      segmented("Colours of the distribution", [["linear", "linear"], ["log", "log"]], this.chart.log ? "log" : "linear", scale),
      el("a", { href: histogramTableAddress(picked, this.view.zoomed), download: `${name}.csv`, title: "The counts of all bins on the steps shown, as a table" }, "csv"),
      el("button", { type: "button", title: "Save this chart as a picture", onclick: () => savePicture([this.chart], picked.row, `${name}.png`) }, "PNG"));
  }

  /** @param {number} wait */
  #soon(wait) {
    if (!this.chosen || this.#timer) return;
    this.#timer = setTimeout(() => ((this.#timer = 0), this.#load()), wait);
  }

  async #load() {
    const [serial, picked, range] = [++this.#serial, this.chosen, this.view.zoomed];
    if (!picked) return;
    this.#last = performance.now();
    this.#asked = String(range);
    const width = this.chart.root.isConnected ? this.chart.box.width : this.after.clientWidth;
    const points = Math.max(50, Math.round(width / COLUMN_PIXELS));
    const found = await getHistograms(histogramAddress(picked, range, points)).catch(() => null); // the lines' chart says why
    if (serial !== this.#serial) return;
    if (!found?.first.length && !this.chart.root.isConnected) return;
    if (!found?.first.length && !range) return this.chart.root.remove();
    if (!this.chart.root.isConnected) this.after.after(this.chart.root);
    this.#controls(picked);
    this.chart.show(found);
    setText(this.chart.hint, found?.first.length ? `${picked.row}, ${kindText(picked.kind)}: share of the elements by power of two, ${countText(found)}` : "no histogram on these steps");
  }
}

/** @param {Histograms} found */
function countText({ first, last }) {
  if (first.some((step, at) => step !== last[at])) return `histograms in ${formatStep(first.length)} columns, neighbours together`;
  return `${formatStep(first.length)} ${first.length === 1 ? "histogram" : "histograms"}`;
}
