// One number of several runs, over one axis: steps, seconds since the start, or tokens.

import { el, segmented, setText } from "../dom.js";
import { axis, formatCount, formatMeasured, formatSeconds, formatStep, formatTicks, linearTicks, lowerBound } from "../scales.js";
import { theme } from "../theme.js";
import { Track } from "../track.js";
import { StepView } from "../view.js";
import { colourOf, dashOf, swatch } from "./palette.js";

/** @import { TrackOptions } from "../track.js" */
/** @import { Axis, Box } from "../types.js" */
/** @import { AxisName, OverlayLine } from "./types.js" */

const HEIGHT = 190;
const [TOP, BOTTOM] = [14, 24];
const [LABEL_WIDTH, LABEL_HEIGHT] = [18, 12];
const PLACES = 4000; // of seconds and tokens: so many the axis is divided into, as steps divide it by themselves

/** The axis that all charts of a comparison share: `place` counts units, which are steps, or small parts of the range. */
export class OverlayView extends StepView {
  unit = 1;
  /** @type {AxisName} */
  axisName = "step";

  /**
   * @param {AxisName} name
   * @param {number} first
   * @param {number} last
   */
  span(name, first, last) {
    this.axisName = name;
    this.unit = name === "step" ? 1 : Math.max(last / PLACES, 1e-9);
    this.extend(Math.floor(first / this.unit), Math.ceil(last / this.unit));
  }

  /** @param {number} value */
  format(value) {
    if (this.axisName === "time") return formatSeconds(value);
    return this.axisName === "tokens" ? formatCount(Math.round(value)) : formatStep(Math.round(value));
  }
}

/**
 * The exponential moving average with weight `smoothing` of what was before, corrected for its start. What is not finite
 * or not recorded stays as it is, and is left out of the average.
 * @param {(number | null)[]} values
 * @param {number} smoothing
 */
export function smoothed(values, smoothing) {
  let [sum, weight] = [0, 0];
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return value;
    sum = sum * smoothing + value * (1 - smoothing);
    weight = weight * smoothing + (1 - smoothing);
    return sum / weight;
  });
}

/** @typedef {Omit<TrackOptions, "height" | "view"> & {view: OverlayView, log: boolean, format?: (value: number | null) => string, onLog: (log: boolean) => void}} OverlayOptions */

export class OverlayChart extends Track {
  /** @type {OverlayLine[]} */
  lines = [];
  /** @type {(number | null)[][]} */
  drawn = [];
  /** @type {Axis | null} */
  axis = null;
  smoothing = 0;

  /** @param {OverlayOptions} options */
  constructor({ log, format = formatMeasured, onLog, ...track }) {
    super({ ...track, height: HEIGHT });
    this.overlayView = track.view;
    this.log = log;
    this.format = format;
    this.legend = el("div", { cls: "legend" });
    this.plot.before(this.legend);
    const choose = (/** @type {string} */ scale) => ((this.log = scale === "log"), onLog(this.log), this.redraw());
    this.controls.append(segmented(`${track.title} scale`, [["linear", "linear"], ["log", "log"]], log ? "log" : "linear", choose));
  }

  /**
   * @param {OverlayLine[]} lines
   * @param {number} smoothing
   */
  show(lines, smoothing) {
    this.lines = lines;
    this.smoothing = smoothing;
    this.drawn = lines.map(({ values }) => (smoothing ? smoothed(values, smoothing) : values));
    this.outputs = lines.map(() => el("output"));
    this.legend.replaceChildren(...lines.map((line, k) => el("span", {}, swatch(line.place), `${line.place + 1} ${line.name}`, this.outputs?.[k])));
    this.redraw();
    this.#tell();
  }

  /**
   * @param {number} value
   * @param {Box} box
   */
  across(value, box) {
    return this.x(value / this.overlayView.unit + 0.5, box);
  }

  /** @param {OverlayLine} line */
  #shown(line) {
    const [first, last] = this.view.range.map((place) => place * this.overlayView.unit);
    return [Math.max(0, lowerBound(line.x, first) - 1), Math.min(line.x.length - 1, lowerBound(line.x, last + this.overlayView.unit))];
  }

  #extent() {
    let [lo, hi] = [Infinity, -Infinity];
    this.lines.forEach((line, k) => {
      const [first, last] = this.#shown(line);
      for (let i = first; i <= last; i++) {
        const value = this.drawn[k][i];
        if (value === null || !Number.isFinite(value) || (this.log && value <= 0)) continue;
        [lo, hi] = [Math.min(lo, value), Math.max(hi, value)];
      }
    });
    if (lo > hi) return null;
    if (this.log) return [lo / Math.max((hi / lo) ** 0.06, 1.05), hi * Math.max((hi / lo) ** 0.06, 1.05)];
    // Averages of equal values differ in their last digits: no axis can be drawn of that.
    const isFlat = hi - lo <= 1e-9 * Math.max(Math.abs(lo), Math.abs(hi));
    const air = isFlat ? Math.abs(hi) * 0.1 || 1 : (hi - lo) * 0.08;
    return [lo - air, hi + air];
  }

  /** @param {number} value */
  y(value) {
    return this.height - BOTTOM - (this.axis?.at(value) ?? 0);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   */
  paint(context, box) {
    const range = this.#extent();
    this.axis = range && axis(range[0], range[1], this.height - TOP - BOTTOM, this.log);
    context.fillStyle = theme.plot;
    context.fillRect(box.left, 0, box.width, this.height - BOTTOM + 4);
    this.#paintAxes(context, box);
    if (!this.lines.some(({ values }) => values.some((value) => value !== null))) return this.paintNote(context, box, "Not recorded by these runs.");
    context.save();
    context.beginPath();
    context.rect(box.left, 0, box.width, this.height - BOTTOM + 4);
    context.clip();
    this.lines.forEach((line, k) => {
      if (this.smoothing) this.#paintLine(context, box, line, line.values, 0.25);
      this.#paintLine(context, box, line, this.drawn[k], 1);
      this.#paintNonfinite(context, box, line);
    });
    context.restore();
    this.#paintNumbers(context, box);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   */
  #paintAxes(context, box) {
    context.strokeStyle = theme.grid;
    context.fillStyle = theme.muted;
    context.lineWidth = 1;
    const { unit, axisName } = this.overlayView;
    const [first, last] = this.view.range.map((place) => place * unit);
    context.textAlign = "center";
    for (const tick of linearTicks(first, last, Math.max(3, Math.floor(box.width / 110)), axisName === "step" ? 1 : 0)) {
      const x = Math.round(this.across(tick, box)) + 0.5;
      line(context, x, 0, x, this.height - BOTTOM + 4);
      context.fillText(this.overlayView.format(tick), x, this.height - 9);
    }
    context.textAlign = "right";
    const ticks = this.axis?.ticks(Math.max(2, Math.floor(this.height / 28))) ?? [];
    const texts = formatTicks(ticks);
    for (const [k, tick] of ticks.entries()) {
      const y = Math.round(this.y(tick)) + 0.5;
      if (y < 5 || y > this.height - BOTTOM + 4) continue;
      line(context, box.left, y, box.right, y);
      context.fillText(texts[k], box.left - 8, y);
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {OverlayLine} line
   * @param {(number | null)[]} values
   * @param {number} opacity
   */
  #paintLine(context, box, line, values, opacity) {
    const [first, last] = this.#shown(line);
    context.strokeStyle = context.fillStyle = colourOf(line.place);
    context.globalAlpha = opacity;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.setLineDash(dashOf(line.place));
    context.beginPath();
    const isDrawn = (/** @type {number | null | undefined} */ value) => typeof value === "number" && Number.isFinite(value) && !(this.log && value <= 0);
    for (let i = first; i <= last; i++) {
      const value = values[i];
      if (value === null || !isDrawn(value)) continue;
      const [x, y] = [this.across(line.x[i], box), this.y(value)];
      const [before, after] = [i > first && isDrawn(values[i - 1]), i < last && isDrawn(values[i + 1])];
      if (!before && !after) context.fillRect(x - 1.5, y - 1.5, 3, 3);
      else if (before) context.lineTo(x, y);
      else context.moveTo(x, y);
    }
    context.stroke();
    context.setLineDash([]);
    context.globalAlpha = context.lineWidth = 1;
  }

  /**
   * Where a run's value is not finite: a bar in its colour at the upper edge, in a lane of its own, and a diamond with its
   * number where the bar begins.
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {OverlayLine} line
   */
  #paintNonfinite(context, box, line) {
    const [first, last] = this.#shown(line);
    const isBad = (/** @type {number | null} */ value) => value !== null && !Number.isFinite(value);
    const y = (this.lines.indexOf(line) % 4) * 9;
    context.textAlign = "left";
    for (let i = first; i <= last; i++) {
      if (!isBad(line.values[i])) continue;
      const begin = i;
      while (i < last && isBad(line.values[i + 1])) i++;
      const x = this.across(line.x[begin], box);
      context.fillStyle = colourOf(line.place);
      context.fillRect(x, y + 3, Math.max(1, this.across(line.x[i], box) - x), 3);
      context.fillStyle = theme.nonfinite;
      context.beginPath();
      for (const [dx, dy] of [[0, 0], [5, 5], [0, 10], [-5, 5]]) context.lineTo(x + dx, y + dy);
      context.fill();
      const text = `${line.place + 1} not finite`;
      context.fillStyle = theme.plot;
      context.fillRect(x + 6, y, context.measureText(text).width + 4, 10);
      context.fillStyle = theme.nonfinite;
      context.fillText(text, x + 8, y + 5);
    }
  }

  /**
   * The number of each run where its line ends, pushed apart where they would cover one another.
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   */
  #paintNumbers(context, box) {
    const ends = this.lines.flatMap((line, k) => {
      const [first, last] = this.#shown(line);
      for (let i = last; i >= first; i--) {
        const value = this.drawn[k][i];
        if (value !== null && Number.isFinite(value) && !(this.log && value <= 0)) return [{ line, x: Math.min(box.right, this.across(line.x[i], box)), y: this.y(value) }];
      }
      return [];
    }).sort((a, b) => a.y - b.y);
    context.textAlign = "left";
    /** @type {{x: number, y: number}[]} */
    const taken = [];
    for (const { line, x, y } of ends) {
      let free = y;
      for (const other of taken) if (Math.abs(other.x - x) < LABEL_WIDTH) free = Math.max(free, other.y + LABEL_HEIGHT);
      taken.push({ x, y: free });
      context.fillStyle = colourOf(line.place);
      context.fillText(String(line.place + 1), x + 4, Math.min(free, this.height - BOTTOM));
    }
  }

  /** @param {CanvasRenderingContext2D | null} context */
  paintCursor(context) {
    this.#tell();
    const box = this.box;
    if (!context || this.view.cursor === null || !this.axis) return;
    for (const [k, at] of this.#pointed().entries()) {
      const value = this.drawn[k][at] ?? null;
      if (value === null || !Number.isFinite(value) || (this.log && value <= 0)) continue;
      context.beginPath();
      context.arc(this.across(this.lines[k].x[at], box), this.y(value), 3.5, 0, 2 * Math.PI);
      context.fillStyle = colourOf(this.lines[k].place);
      context.fill();
    }
  }

  /** By line, the index of its point nearest to the crosshair; without a crosshair the last one. */
  #pointed() {
    const { cursor } = this.view;
    if (cursor === null) return this.lines.map(({ x }) => x.length - 1);
    const wanted = cursor * this.overlayView.unit;
    return this.lines.map(({ x }) => {
      const at = lowerBound(x, wanted);
      return at > 0 && (at === x.length || wanted - x[at - 1] < x[at] - wanted) ? at - 1 : at;
    });
  }

  #tell() {
    const { cursor } = this.view;
    setText(this.readout, cursor === null ? "" : `${this.overlayView.axisName === "step" ? "step " : ""}${this.overlayView.format(cursor * this.overlayView.unit)}`);
    this.#pointed().forEach((at, k) => {
      const output = this.outputs?.[k];
      if (output) setText(output, at < 0 ? "–" : this.format(this.drawn[k][at] ?? null));
    });
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {number} x0
 * @param {number} y0
 * @param {number} x1
 * @param {number} y1
 */
function line(context, x0, y0, x1, y1) {
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
}
