// Several rows over the steps as lines. Where steps share a point, its lowest and highest value are drawn; elements that
// were not finite are marks at the upper edge, never gaps.

import { axis, formatStep, formatTicks, formatValue } from "../scales.js";
import { theme } from "../theme.js";
import { Track } from "../track.js";
import { averaged, look, usual } from "./smooth.js";

/** @import { Axis, Box, CurveLine } from "../types.js" */
/** @import { TrackOptions } from "../track.js" */

const TOP = 14;
const BOTTOM = 6;
const FAINT = 0.3;
const NEAR = 14;

export class CurveChart extends Track {
  /** @type {CurveLine[]} */
  lines = [];
  log = false;
  note = "";
  /** @type {Axis | null} */
  axis = null;

  /** @param {TrackOptions} options */
  constructor(options) {
    super(options);
    look.addEventListener("change", this.redraw);
  }

  /** @param {CurveLine[]} lines */
  show(lines) {
    this.lines = lines;
    this.redraw();
  }

  /**
   * The middle of a point; those of a thinned line stand for several steps.
   * @param {CurveLine} line
   * @param {number} at
   * @param {Box} box
   */
  #x(line, at, box) {
    return this.x(line.steps[at] + line.stride / 2, box);
  }

  /** @param {number} value */
  #y(value) {
    return this.height - BOTTOM - (this.axis?.at(value) ?? 0);
  }

  /** @param {number} value */
  #isDrawn(value) {
    return Number.isFinite(value) && (!this.log || value > 0);
  }

  #range() {
    const [first, last] = this.view.range;
    /** @type {number[]} */
    const values = [];
    for (const line of this.lines) {
      for (let k = 0; k < line.steps.length; k++) {
        if (line.steps[k] + line.stride <= first || line.steps[k] > last) continue;
        for (const value of [line.low[k], line.high[k]]) if (this.#isDrawn(value)) values.push(value);
      }
    }
    if (!values.length) return null;
    let [lo, hi] = [Infinity, -Infinity];
    for (const value of values) [lo, hi] = [Math.min(lo, value), Math.max(hi, value)];
    const inside = look.clips ? usual(values) : null;
    [lo, hi] = inside ?? [lo, hi];
    if (this.log) return [lo / 1.05, hi * 1.05];
    const air = (hi - lo) * 0.06 || Math.abs(hi) * 0.1 || 1;
    return [lo - air, hi + air];
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   */
  paint(context, box) {
    context.fillStyle = theme.plot;
    context.fillRect(box.left, 0, box.width, this.height);
    this.paintSteps(context, box, { height: this.height });
    const range = this.#range();
    this.axis = range && axis(range[0], range[1], this.height - TOP - BOTTOM, this.log);
    if (this.note || !this.lines.length) return this.paintNote(context, box, this.note);
    if (this.axis) this.#paintAxis(context, box, this.axis);
    context.save();
    context.beginPath();
    context.rect(box.left, 0, box.width, this.height);
    context.clip();
    for (const line of this.lines) this.#paintLine(context, box, line);
    for (const line of this.lines) this.#paintEdges(context, box, line);
    context.restore();
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {Axis} axis
   */
  #paintAxis(context, box, axis) {
    context.textAlign = "right";
    context.strokeStyle = theme.grid;
    context.fillStyle = theme.muted;
    const ticks = axis.ticks(Math.max(2, Math.floor(this.height / 30)));
    const texts = formatTicks(ticks);
    ticks.forEach((tick, k) => {
      const y = Math.round(this.#y(tick)) + 0.5;
      if (y < 5 || y > this.height - 3) return;
      context.beginPath();
      context.moveTo(box.left, y);
      context.lineTo(box.right, y);
      context.stroke();
      context.fillText(texts[k], box.left - 8, y);
    });
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {CurveLine} line
   */
  #paintLine(context, box, line) {
    context.strokeStyle = context.fillStyle = theme.lines[line.colour % theme.lines.length];
    context.lineJoin = "round";
    context.lineWidth = 1.25;
    context.globalAlpha = look.smoothing ? FAINT : 1;
    this.#stroke(context, box, line, line.low, line.high);
    context.globalAlpha = 1;
    if (look.smoothing) {
      context.lineWidth = 1.75;
      const calm = Float64Array.from(averaged(line.mean, look.smoothing), (value) => value ?? NaN);
      this.#stroke(context, box, line, calm, calm);
    }
    context.lineWidth = 1;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {CurveLine} line
   * @param {Float64Array} low
   * @param {Float64Array} high
   */
  #stroke(context, box, line, low, high) {
    context.beginPath();
    let pen = false;
    for (let k = 0; k < line.steps.length; k++) {
      if (!this.#isDrawn(high[k])) {
        pen = false;
        continue;
      }
      const x = this.#x(line, k, box);
      const bottom = this.#isDrawn(low[k]) ? low[k] : high[k];
      // A value between two that cannot be drawn has no segment: it is a dot.
      if (!pen && !this.#isDrawn(high[k + 1] ?? NaN)) context.rect(x - 1.5, this.#y(high[k]) - 1.5, 3, 3);
      if (pen) context.lineTo(x, this.#y(bottom));
      else context.moveTo(x, this.#y(bottom));
      if (bottom !== high[k]) context.lineTo(x, this.#y(high[k]));
      pen = true;
    }
    context.stroke();
  }

  /**
   * What was not finite, and what a clipped axis leaves out.
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {CurveLine} line
   */
  #paintEdges(context, box, line) {
    const wide = Math.max(2, this.x(line.stride, box) - this.x(0, box));
    for (let k = 0; k < line.steps.length; k++) {
      const x = this.#x(line, k, box);
      if (line.nonfinite[k]) {
        context.fillStyle = theme.nonfinite;
        context.fillRect(x - wide / 2, 0, wide, 4);
        if (!line.nonfinite[k - 1]) {
          context.beginPath();
          for (const [dx, y] of [[0, 0], [5, 6], [0, 12], [-5, 6]]) context.lineTo(x + dx, y);
          context.fill();
        }
      }
      context.fillStyle = theme.lines[line.colour % theme.lines.length];
      if (look.clips && this.#isDrawn(line.high[k]) && this.#y(line.high[k]) < 0) context.fillRect(x - 1, 5, 2, 5);
      if (look.clips && this.#isDrawn(line.low[k]) && this.#y(line.low[k]) > this.height) context.fillRect(x - 1, this.height - 5, 2, 5);
    }
  }

  /**
   * @param {CurveLine} line
   * @param {number} step
   */
  #nearest(line, step) {
    let [lo, hi] = [0, line.steps.length];
    while (lo < hi) {
      const middle = (lo + hi) >> 1;
      if (line.steps[middle] + line.stride <= step) lo = middle + 1;
      else hi = middle;
    }
    const before = lo - 1;
    const isNearer = lo >= line.steps.length || (before >= 0 && step - line.steps[before] < line.steps[lo] - step);
    return isNearer ? before : lo;
  }

  /**
   * What a line says at a step: "0.0123", "0.01 to 0.02", with what was not finite.
   * @param {CurveLine} line
   * @param {number} step
   */
  valueText(line, step) {
    const at = this.#nearest(line, step);
    if (at < 0) return "–";
    const [low, high] = [line.low[at], line.high[at]];
    const value = low === high ? formatValue(high) : `${formatValue(low)} to ${formatValue(high)}`;
    const bad = line.nonfinite[at] ? `${formatStep(line.nonfinite[at])} not finite` : "";
    return [Number.isFinite(high) ? value : bad ? "" : "no value", bad].filter(Boolean).join(", ");
  }

  /**
   * The lines near the pointer, or all where there are few.
   * @param {number} step
   * @param {number} y
   */
  describe(step, y) {
    if (!this.lines.length) return null;
    const shown = this.lines.filter((line) => {
      const at = this.#nearest(line, step);
      return at >= 0 && this.#isDrawn(line.high[at]) && Math.abs(this.#y(line.high[at]) - y) < NEAR;
    });
    const told = this.lines.length <= 8 ? this.lines : shown.slice(0, 8);
    const [{ stride }] = this.lines;
    const last = Math.min(Math.ceil(step + stride) - 1, this.view.range[1]);
    const head = stride > 1 ? `about steps ${formatStep(step)}–${formatStep(last)}` : `step ${formatStep(step)}`;
    return told.length ? [head, ...told.map((line) => `${line.name}: ${this.valueText(line, step)}`)] : [head];
  }

  /**
   * @param {CanvasRenderingContext2D | null} context
   * @param {Box} box
   */
  paintCursor(context, box) {
    const { cursor } = this.view;
    const text = context && cursor !== null && this.lines.length === 1 ? `${this.valueText(this.lines[0], cursor)} at step ${formatStep(cursor)}` : "";
    if (this.readout.textContent !== text) this.readout.textContent = text;
    if (!context || cursor === null || !this.axis) return;
    for (const line of this.lines.slice(0, 16)) {
      const at = this.#nearest(line, cursor);
      if (at < 0 || !this.#isDrawn(line.high[at])) continue;
      context.fillStyle = theme.lines[line.colour % theme.lines.length];
      context.beginPath();
      context.arc(this.#x(line, at, box), this.#y(line.high[at]), 3, 0, 2 * Math.PI);
      context.fill();
    }
  }
}
