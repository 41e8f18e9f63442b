// Several runs in one chart each of loss, norm, step time, tokens per second, and chosen series.

import { getJson, measured } from "../api.js";
import { byId, el, paced, segmented, setText } from "../dom.js";
import { formatSeconds } from "../scales.js";
import { Differences } from "./differences.js";
import { OverlayChart, OverlayView } from "./overlay.js";
import { swatch } from "./palette.js";
import { seriesSearch, titleOf } from "./series.js";

/** @import { AddressState, AxisName, CurvesAnswer, OverlayLine, RunCurves, RunEntry } from "./types.js" */

const RELOAD_MS = 250;
const AXES = [["step", "steps"], ["time", "time"], ["tokens", "tokens"]];
/** @type {Record<string, {title: string, hint: string, log?: boolean, format?: (value: number | null) => string}>} */
const NUMBERS = {
  loss: { title: "Loss", hint: "mean of ranks and micro steps" },
  grad_norm: { title: "Gradient norm", hint: "of the collected parameters, before clipping", log: true },
  step_time: { title: "Step time", hint: "of the slowest rank, in seconds", format: formatSeconds },
  tokens_per_second: { title: "Tokens per second", hint: "all ranks together" },
};

export class Comparison {
  /** @type {Map<string, OverlayChart>} */
  #charts = new Map();
  /** @type {RunEntry[]} */
  #runs = [];
  /** @type {RunCurves[]} */
  #curves = [];
  #asked = 0;
  #identity = "";

  /**
   * `state` is the page's, of which this changes axis, smoothing, series, scales and the zoomed part; `onChange` hears of
   * it, `onRemove` that a run is to be left out.
   * @param {AddressState} state
   * @param {{onChange: () => void, onRemove: (key: string) => void}} handlers
   */
  constructor(state, { onChange, onRemove }) {
    this.state = state;
    this.onChange = onChange;
    this.onRemove = onRemove;
    this.view = new OverlayView();
    this.view.held = false;
    this.differences = new Differences((step) => this.#showStep(step));
    const smoothing = /** @type {HTMLInputElement} */ (byId("smoothing"));
    smoothing.value = String(state.smoothing);
    smoothing.addEventListener("input", () => this.#set({ smoothing: Number(smoothing.value) }));
    byId("axis").append(segmented("Over", AXES, state.axis, (axis) => this.#choose(/** @type {AxisName} */ (axis))));
    byId("series").append(seriesSearch(() => this.#runs.map(({ key }) => key), (name) => this.#addSeries(name)));
    byId("zoom-reset").addEventListener("click", () => this.view.reset());
    this.view.addEventListener("range", () => this.#onRange());
  }

  get names() {
    return [...Object.keys(NUMBERS), ...this.state.series];
  }

  /**
   * Shows these runs, or that they have grown.
   * @param {RunEntry[]} runs
   */
  async show(runs) {
    this.#runs = runs;
    const identity = JSON.stringify(runs.map(({ key, name }) => [key, name]));
    if (identity !== this.#identity) {
      this.#identity = identity;
      byId("chosen").replaceChildren(...runs.map((run, place) => this.#chosen(run, place)));
    }
    await Promise.all([this.#load(), this.differences.load(runs, ["loss", "grad_norm", ...this.state.series])]);
  }

  /**
   * @param {RunEntry} run
   * @param {number} place
   */
  #chosen(run, place) {
    const remove = el("button", { type: "button", "aria-label": `Leave out ${run.name}`, title: "Leave out", onclick: () => this.onRemove(run.key) }, "✕");
    return el("li", {}, swatch(place), `${place + 1}`, el("a", { href: `run/${encodeURIComponent(run.key)}/`, title: run.path }, run.name), el("span", { cls: `pill ${run.state}` }, run.state), remove);
  }

  /** @param {Partial<AddressState>} change */
  #set(change) {
    Object.assign(this.state, change);
    this.onChange();
    this.#draw();
  }

  /** @param {AxisName} axis */
  #choose(axis) {
    this.view.zoomed = null;
    this.#set({ axis, span: null });
    void this.#load();
  }

  /** @param {string} name */
  #addSeries(name) {
    if (this.state.series.includes(name)) return;
    this.#set({ series: [...this.state.series, name] });
    void this.show(this.#runs);
  }

  /** @param {string} name */
  #removeSeries(name) {
    this.#charts.get(name)?.root.remove();
    this.#charts.delete(name);
    this.#set({ series: this.state.series.filter((other) => other !== name) });
  }

  async #load() {
    const mine = ++this.#asked;
    const { axis, span } = this.state;
    const words = new URLSearchParams({ runs: this.#runs.map(({ key }) => key).join(","), axis, columns: String(Math.max(200, byId("charts").clientWidth)) });
    for (const name of this.names) words.append("names", name);
    if (span) for (const [name, value] of [["first", span[0]], ["last", span[1]]]) words.set(String(name), String(value));
    if (!this.#runs.length) return this.#draw();
    const answer = /** @type {CurvesAnswer} */ (await getJson(`api/curves?${words}`));
    if (mine !== this.#asked) return;
    this.#curves = answer.runs;
    const ends = answer.runs.filter(({ x }) => x.length).flatMap(({ x }) => [x[0], x[x.length - 1]]);
    if (ends.length && !span) this.view.span(axis, Math.min(...ends), Math.max(...ends));
    this.#draw();
  }

  #draw() {
    setText(byId("smoothing-text"), this.state.smoothing ? this.state.smoothing.toFixed(2) : "off");
    for (const name of this.names) {
      const lines = this.#lines(name);
      const isTold = lines.some(({ values }) => values.some((value) => value !== null));
      if (!isTold && !this.#charts.has(name) && !this.state.series.includes(name) && name !== "loss") continue;
      this.#chart(name).show(lines, this.state.smoothing);
    }
  }

  /**
   * @param {string} name
   * @returns {OverlayLine[]}
   */
  #lines(name) {
    return this.#runs.flatMap((run, place) => {
      const curves = this.#curves.find(({ key }) => key === run.key);
      return curves ? [{ place, name: run.name, steps: curves.steps, x: curves.x, values: (curves.series[name] ?? []).map(measured) }] : [];
    });
  }

  /** @param {string} name */
  #chart(name) {
    const known = this.#charts.get(name);
    if (known) return known;
    const said = NUMBERS[name] ?? titleOf(name);
    const usual = Boolean(NUMBERS[name]?.log);
    const onLog = (/** @type {boolean} */ log) => {
      const others = this.state.log.filter((other) => other !== name);
      this.#set({ log: log === usual ? others : [...others, name] });
    };
    const chart = new OverlayChart({ parent: byId("charts"), view: this.view, title: said.title, hint: said.hint, label: `${said.title} of the compared runs`, log: this.state.log.includes(name) !== usual, format: NUMBERS[name]?.format, onLog });
    if (!NUMBERS[name]) chart.controls.append(el("button", { type: "button", title: "Remove this chart", onclick: () => this.#removeSeries(name) }, "✕"));
    this.#charts.set(name, chart);
    return chart;
  }

  /** @param {number} step */
  #showStep(step) {
    if (this.state.axis === "step") this.view.focus(step);
    else {
      const curves = this.#curves.find(({ steps }) => steps.length);
      const at = curves?.steps.findIndex((other) => other >= step) ?? -1;
      if (curves && at >= 0) this.view.focus(Math.round(curves.x[at] / this.view.unit));
    }
    byId("charts").scrollIntoView({ block: "nearest" });
  }

  #reload = paced(() => void this.#load().catch(() => {}), RELOAD_MS);

  #onRange() {
    const { zoomed, unit } = this.view;
    byId("zoom-reset").hidden = zoomed === null;
    const [from, to] = this.view.range.map((place) => this.view.format(place * unit));
    setText(byId("zoom-text"), zoomed ? `${from} to ${to}` : "drag across a chart to look closer");
    const span = zoomed && /** @type {[number, number]} */ (zoomed.map((place) => place * unit));
    if (JSON.stringify(span) === JSON.stringify(this.state.span)) return;
    this.state.span = span;
    this.onChange();
    this.#reload(); // with the detail that fits in now
  }
}
