// The rows that a reader has picked, as lines over the steps: which they are, what of them is shown, and how fresh it is.

import { allStated, keep, stated } from "../address.js";
import { curveAddress, getCurve, tableAddress } from "../api.js";
import { el, segmented, select, setText } from "../dom.js";
import { formatStep, STATISTICS } from "../scales.js";
import { theme } from "../theme.js";
import { kindText } from "../words.js";
import { CurveChart } from "./chart.js";
import { HistogramPanel } from "./histograms.js";
import { fileName, savePicture } from "./saving.js";

/** @import { CurveLine, PickedRow } from "../types.js" */
/** @import { TrackOptions } from "../track.js" */

const MOST_ROWS = 8;
const HEIGHT = 220;
const SETTLED_MS = 150;
const FRESH_MS = 10_000;
const SHOWN = ["rms", "absmax", "mean", "std", "min", "max", "norm", "zero_ratio", "nonfinite", "nans", "infs", "zeros", "sum", "sum_sq", "finite", "count"];
const LOGARITHMIC = ["rms", "absmax", "std", "norm", "sum_sq"];

/** @param {PickedRow} row */
const keyOf = ({ kind, row }) => `${kind}:${row}`;

export class CurvePanel {
  /** @type {PickedRow[]} */
  rows = [];
  statistic = "rms";
  byRank = false;
  #serial = 0;
  #timer = 0;
  #last = -Infinity;
  #asked = "";
  /** @type {{lines: CurveLine[], problem: string}[]} */
  #answers = [];

  /** @param {Pick<TrackOptions, "parent" | "view">} place */
  constructor({ parent, view }) {
    this.view = view;
    this.chart = new CurveChart({ parent, view, title: "Rows", height: HEIGHT, label: "Chosen rows over steps" });
    this.chips = el("ul", { cls: "chips", "aria-label": "Rows in this chart" });
    this.chart.header.after(this.chips);
    this.chart.root.hidden = true;
    this.histograms = new HistogramPanel({ parent, view, after: this.chart.root });
    // The range grows with every step of a running run; what was asked for is another one only after a zoom.
    view.addEventListener("range", () => String(view.zoomed) !== this.#asked && this.#soon(SETTLED_MS));
    this.follow();
  }

  /** Takes the choice from the address. */
  follow() {
    this.statistic = SHOWN.includes(stated("value") ?? "") ? String(stated("value")) : "rms";
    this.byRank = stated("ranks") === "each";
    this.chart.log = stated("scale") ? stated("scale") === "log" : LOGARITHMIC.includes(this.statistic);
    const rows = allStated("row").map((text) => ({ kind: text.slice(0, text.indexOf(":")), row: text.slice(text.indexOf(":") + 1) }));
    this.#take(rows.filter(({ kind, row }) => kind && row).slice(0, MOST_ROWS));
  }

  /**
   * Adds a row, or takes it out if it is there.
   * @param {PickedRow} picked
   */
  toggle(picked) {
    const others = this.rows.filter((row) => keyOf(row) !== keyOf(picked));
    this.#take(others.length < this.rows.length ? others : [...this.rows, picked].slice(-MOST_ROWS));
    this.#note();
    if (others.length === 0) this.chart.root.scrollIntoView({ block: "nearest" });
  }

  /** There are newer steps. */
  touch() {
    this.histograms.touch();
    if (this.rows.length && !document.hidden) this.#soon(Math.max(0, this.#last + FRESH_MS - performance.now()));
  }

  /** @param {PickedRow[]} rows */
  #take(rows) {
    this.rows = rows;
    this.chart.root.hidden = !rows.length;
    this.#answers = [];
    this.#controls();
    this.#chips();
    this.histograms.take(rows);
    if (!rows.length) return this.chart.show([]);
    this.chart.note = "Loading…";
    this.#load();
  }

  #note() {
    keep("row", this.rows.map(keyOf));
    keep("value", this.statistic === "rms" ? null : this.statistic);
    keep("ranks", this.byRank ? "each" : null);
    const usual = LOGARITHMIC.includes(this.statistic);
    keep("scale", this.chart.log === usual ? null : this.chart.log ? "log" : "linear");
  }

  /** @param {string} statistic */
  #choose(statistic) {
    this.statistic = statistic;
    this.chart.log = LOGARITHMIC.includes(statistic);
    this.#take(this.rows);
    this.#note();
  }

  #controls() {
    const statistics = SHOWN.map((name) => [name, STATISTICS[name] ?? name]);
    /** @param {string} text */
    const scale = (text) => ((this.chart.log = text === "log"), this.#note(), this.chart.redraw());
    /** @param {string} ranks */
    const ranks = (ranks) => ((this.byRank = ranks === "each"), this.#note(), this.#take(this.rows));
    const picture = () => savePicture([this.chart], document.title, `${fileName(this.rows.map(({ row }) => row).join("_"))}.png`);
    this.chart.controls.replaceChildren(
      select("Value of the rows", statistics, this.statistic, (value) => this.#choose(value)),
      segmented("Ranks of the rows", [["merged", "all ranks"], ["each", "each rank"]], this.byRank ? "each" : "merged", ranks),
      segmented("Rows scale", [["linear", "linear"], ["log", "log"]], this.chart.log ? "log" : "linear", scale),
      el("button", { type: "button", title: "Save this chart as a picture", onclick: picture }, "PNG"));
  }

  #chips() {
    const ranks = this.byRank && this.rows.length === 1 ? this.chart.lines.slice(0, theme.lines.length) : [];
    const legend = ranks.map(({ name, colour }) => {
      const swatch = el("i", { cls: "swatch", "aria-hidden": "true" });
      swatch.style.background = `var(--line-${colour + 1})`;
      return el("li", { cls: "chip legend" }, swatch, name);
    });
    this.chips.replaceChildren(...this.rows.map((picked, place) => {
      const swatch = el("i", { cls: "swatch", "aria-hidden": "true" });
      swatch.style.background = `var(--line-${(place % theme.lines.length) + 1})`;
      if (this.byRank && this.rows.length === 1) swatch.hidden = true;
      const problem = this.#answers[place]?.problem;
      return el("li", { cls: "chip" }, swatch, el("code", { title: picked.row }, picked.row), el("span", { cls: "hint" }, kindText(picked.kind)),
        problem ? el("span", { cls: "bad" }, problem) : el("a", { href: tableAddress(picked, this.byRank, this.view.zoomed), download: `${fileName(picked.row)}.csv`, title: "All moments of the steps shown, as a table" }, "csv"),
        el("button", { type: "button", cls: "link", "aria-label": `Take ${picked.row} out`, onclick: () => this.toggle(picked) }, "×"));
    }), ...legend);
  }

  /** @param {number} wait */
  #soon(wait) {
    if (!this.rows.length || this.#timer) return;
    this.#timer = setTimeout(() => ((this.#timer = 0), this.#load()), wait);
  }

  async #load() {
    const serial = ++this.#serial;
    this.#last = performance.now();
    const [rows, range] = [this.rows, this.view.zoomed];
    this.#asked = String(range);
    const points = Math.max(100, Math.round(this.chart.box.width));
    const answers = await Promise.all(rows.map(async (picked, place) => {
      try {
        const lines = await getCurve(curveAddress(picked, { statistic: this.statistic, byRank: this.byRank, range, points }));
        return { lines: lines.map((line, rank) => this.#named(line, { picked, colour: rows.length > 1 ? place : rank })), problem: "" };
      } catch (error) {
        return { lines: [], problem: error instanceof Error ? error.message : String(error) };
      }
    }));
    if (serial !== this.#serial) return;
    this.#answers = answers;
    const lines = answers.flatMap((answer) => answer.lines);
    this.chart.note = lines.length ? "" : "Nothing to show for these steps.";
    this.chart.show(lines);
    this.#chips();
    const stride = Math.max(1, ...lines.map((line) => line.stride));
    const cut = answers.find(({ lines: own }) => own.length && own[0].numLines > own.length)?.lines;
    const most = cut ? `, the first ${cut.length} of ${formatStep(cut[0].numLines)} ranks` : "";
    const thinned = stride > 1 ? `, lowest to highest of ${formatStep(Math.ceil(stride))} steps at each point` : "";
    setText(this.chart.hint, `${STATISTICS[this.statistic] ?? this.statistic} of the finite elements${thinned}${most}`);
  }

  /**
   * @param {CurveLine} line
   * @param {{picked: PickedRow, colour: number}} place
   */
  #named(line, { picked, colour }) {
    const rank = line.rank === null ? "" : `rank ${line.rank}`;
    const name = this.rows.length === 1 && rank ? rank : [picked.row, rank].filter(Boolean).join(", ");
    return { ...line, name, colour };
  }
}
