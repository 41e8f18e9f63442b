// The two heat maps of a run with their choices: layers, and ranks.

import { keep, stated } from "./address.js";
import { RowSearch } from "./curves/search.js";
import { el, segmented, select, setText } from "./dom.js";
import { LivePanel } from "./heat/live.js";
import { formatSeconds, formatStep, formatValue, STATISTICS } from "./scales.js";
import { kindText, quantityText } from "./words.js";

/** @import { HeatMapOffer, Mode, PickedRow } from "./types.js" */

const COLUMNS = 2000;
const layerHeight = () => Math.round(Math.min(460, Math.max(240, innerHeight * 0.25)));

/** @import { TrackOptions } from "./track.js" */
/** @typedef {Pick<TrackOptions, "parent" | "view">} Place */

/**
 * How a quantity of the ranks is coloured, where not linearly.
 * @type {Record<string, Mode>}
 */
const RANK_MODES = { step_time: "peers", grad_norm: "log" };
const RANKS_HAVE = ["step_time", "loss", "grad_norm", "lag"];

export class LayerPanel extends LivePanel {
  offered = "";
  /** @type {HeatMapOffer[]} */
  heatmaps = [];
  kind = "";
  statistic = "";
  /** @type {string[]} */
  statistics = [];
  /** @type {boolean | null} */
  isSize = null;

  /** @param {Place & {onRow: (picked: PickedRow) => void}} place */
  constructor({ parent, view, onRow }) {
    /** @param {string} row */
    const pick = (row) => onRow({ kind: this.kind, row });
    super({ parent, view, title: "Layers", height: layerHeight(), label: "Heat map of layers over steps", mode: "log", onRow: pick });
    this.search = new RowSearch({ onPick: pick });
    this.follow();
    this.origin = el("button", { type: "button", cls: "origin", hidden: true });
    this.origin.addEventListener("click", () => this.map.firstNonfinite && view.focus(this.map.firstNonfinite.step));
    this.map.readout.replaceWith(this.origin);
    this.watch();
  }

  /**
   * `heatmaps` is what the run offers: [{kind, statistics}]. Keeps the choice when it is still on offer.
   * @param {HeatMapOffer[]} heatmaps
   */
  offer(heatmaps) {
    const key = JSON.stringify(heatmaps);
    if (key === this.offered || !heatmaps?.length) return;
    this.offered = key;
    this.heatmaps = heatmaps;
    const offered = heatmaps.map(({ kind }) => kind);
    this.kind = [this.kind, "grad_reduced", offered[0]].find((kind) => offered.includes(kind)) ?? "";
    this.#fit();
    this.#controls();
    this.touch();
  }

  /** Takes the choice from the address; what the run does not have is left out later. */
  follow() {
    this.kind = stated("kind") ?? this.kind;
    this.statistic = stated("statistic") ?? this.statistic;
    const colours = stated("colours");
    if (colours === "log" || colours === "linear" || colours === "change") this.map.mode = colours;
  }

  /** Shows what `follow` has taken. */
  refit() {
    if (!this.heatmaps.length) return;
    this.offered = "";
    this.offer(this.heatmaps);
  }

  #note() {
    keep("kind", this.kind === "grad_reduced" ? null : this.kind);
    keep("statistic", this.statistic === this.statistics[0] ? null : this.statistic);
    keep("colours", this.map.mode === (this.isSize ? "log" : "linear") ? null : this.map.mode);
  }

  #fit() {
    const statistics = this.heatmaps.find(({ kind }) => kind === this.kind)?.statistics ?? [];
    // Sizes differ by orders of magnitude; shares, entropies and times do not, may be negative, and are of many sorts.
    const isSize = statistics.includes("rms");
    if (!statistics.includes(this.statistic) || (!isSize && statistics !== this.statistics)) [this.statistic] = statistics;
    const isStated = this.isSize === null && stated("colours") !== null;
    if (this.isSize !== isSize && this.map.mode !== "change" && !isStated) this.map.mode = isSize ? "log" : "linear";
    this.statistics = statistics;
    this.isSize = isSize;
  }

  #controls() {
    const kinds = this.heatmaps.map(({ kind }) => [kind, kindText(kind)]);
    const statistics = this.statistics.map((name) => [name, STATISTICS[name] ?? name]);
    /** @type {[Mode, string][]} */
    const modes = [["log", "log"], ["linear", "linear"], ["change", "vs own median"]];
    /** @type {(name: "kind" | "statistic") => (value: string) => void} */
    const change = (name) => (value) => ((this[name] = value), this.#fit(), this.#note(), name === "kind" && this.#controls(), this.reload());
    this.map.controls.replaceChildren(
      select("Quantity", kinds, this.kind, change("kind")),
      select("Statistic", statistics, this.statistic, change("statistic")),
      segmented("Colours", modes, this.map.mode, (mode) => (this.map.setMode(/** @type {Mode} */ (mode)), this.#note())),
      this.search.root,
    );
  }

  address() {
    const query = new URLSearchParams({ kind: this.kind, statistic: this.statistic, columns: String(COLUMNS) });
    return `api/heatmap?${query}`;
  }

  load() {
    return this.kind ? super.load() : Promise.resolve();
  }

  shown() {
    const { rows, stride } = this.map.grid;
    const each = stride > 1 ? `, each column the largest of ${stride} steps` : "";
    const number = rows.length === 1 ? "1 row" : `${formatStep(rows.length)} rows`;
    const order = rows.length === 1 || this.kind.startsWith("comm") ? "" : ", the input on top";
    setText(this.map.hint, this.map.isBlank ? "" : `${number}${order}${each}`);
    this.map.hint.title = "Click a row for its line; or use the arrow keys and Enter";
    this.search.offer(rows);
    this.map.resize(rows.length < 12 ? Math.max(90, 20 + 26 * rows.length) : layerHeight());
    this.#showOrigin();
  }

  #showOrigin() {
    const first = this.map.firstNonfinite;
    this.origin.hidden = !first;
    if (!first) return;
    const { step, rows } = first;
    const which = rows.length === 1 ? rows[0] : `${rows.length} rows`;
    setText(this.origin, `◆ not finite from step ${formatStep(step)}: ${which}`);
    this.origin.title = rows.length === 1 ? rows[0] : `${rows[0]} to ${rows[rows.length - 1]}`;
  }

  /**
   * @param {number} row
   * @param {number} column
   */
  tip(row, column) {
    const name = `${kindText(this.kind)}, ${STATISTICS[this.statistic] ?? this.statistic}`;
    return [this.map.grid.rows[row], `step ${this.map.stepText(column)}`, `${name}: ${this.map.valueText(row, column)}`];
  }
}

export class RankPanel extends LivePanel {
  quantity = "step_time";
  numOffered = 0;

  /** @param {Place} place */
  constructor({ parent, view }) {
    super({ parent, view, title: "Ranks", height: 60, label: "Heat map of ranks over steps", mode: "peers" });
    this.quantity = RANKS_HAVE.find((name) => name === stated("quantity")) ?? this.quantity;
    this.map.mode = this.quantity === "step_time" ? "peers" : RANK_MODES[this.quantity] ?? "linear";
    this.offer();
    this.watch();
  }

  /**
   * `quantities` is what the run has.
   * @param {string[]} [quantities]
   */
  offer(quantities = RANKS_HAVE) {
    if (quantities.length === this.numOffered) return;
    this.numOffered = quantities.length;
    /** @param {string} quantity */
    const choose = (quantity) => {
      this.quantity = quantity;
      keep("quantity", quantity === "step_time" ? null : quantity);
      this.map.mode = RANK_MODES[quantity] ?? "linear";
      this.reload();
    };
    // What the address names may come only with the run's answer.
    const wanted = stated("quantity");
    if (wanted && wanted !== this.quantity && quantities.includes(wanted)) {
      this.quantity = wanted;
      this.map.mode = RANK_MODES[wanted] ?? "linear";
      this.touch();
    }
    const options = quantities.map((name) => [name, quantityText(name)]);
    this.map.controls.replaceChildren(select("Quantity of the ranks", options, this.quantity, choose));
  }

  address() {
    return `api/ranks?${new URLSearchParams({ quantity: this.quantity, columns: String(COLUMNS) })}`;
  }

  shown() {
    const { rows } = this.map.grid;
    // One rank has no peers: its own usual step time is the measure then.
    if (this.quantity === "step_time") this.map.setMode(rows.length > 1 ? "peers" : "change");
    this.map.resize(20 + Math.min(180, Math.max(36, rows.length * (rows.length > 4 ? 12 : 18))));
  }

  /** @param {number} column */
  #median(column) {
    const { values, columns, rows } = this.map.grid;
    const peers = rows.map((_, row) => values[row * columns + column]).filter(Number.isFinite).sort((a, b) => a - b);
    return peers.length % 2 ? peers[peers.length >> 1] : (peers[peers.length / 2 - 1] + peers[peers.length / 2]) / 2;
  }

  /**
   * @param {number} row
   * @param {number} column
   */
  tip(row, column) {
    const head = [this.map.grid.rows[row], `step ${this.map.stepText(column)}`];
    const value = this.map.grid.values[row * this.map.grid.columns + column];
    if (!Number.isFinite(value)) return [...head, this.map.valueText(row, column)];
    if (this.quantity === "lag") return [...head, `${formatSeconds(value)} behind the first rank`];
    if (this.quantity === "wait") return [...head, `waited ${formatSeconds(value)} for collectives`];
    if (this.quantity !== "step_time") return [...head, `${quantityText(this.quantity)}: ${formatValue(value)}`];
    if (this.map.grid.rows.length === 1) return [...head, `step time ${formatSeconds(value)}`];
    const median = this.#median(column);
    return [...head, `step time ${formatSeconds(value)}`, `${formatValue(value / median, 3)} × the median rank (${formatSeconds(median)})`];
  }
}
