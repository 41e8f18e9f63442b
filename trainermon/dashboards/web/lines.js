// A value over steps. A step whose value is not finite is never a gap: it is a mark at the upper edge.

import { averaged, look, usual } from "./curves/smooth.js";
import { el, segmented, setText } from "./dom.js";
import { axis, extent, formatMeasured, formatStep, formatTicks, hull, lowerBound } from "./scales.js";
import { theme } from "./theme.js";
import { Track } from "./track.js";

/** @import { Alert, Axis, Box, Column } from "./types.js" */

const TOP = 12;
const BOTTOM = 6;
const FAINT = 0.3;
/** @import { ColourName } from "./theme.js" */
/** @import { TrackOptions } from "./track.js" */
/** @import { Lines } from "./view.js" */
/** @typedef {{name: string, colour: ColourName, text: string}} SecondLine */
/** @typedef {{name: string, lines: Lines, colour: ColourName, log: boolean, alerts: () => Alert[], beside?: SecondLine | null, format?: (value: number | null) => string}} LineChoice */
/** @typedef {Omit<TrackOptions, "height"> & LineChoice} LineOptions */

// More points than this per pixel column are drawn as the column's lowest and highest value: same picture, bounded cost.
const POINTS_PER_PIXEL = 4;

/** Tall windows get taller charts; a window of 1060 pixels still shows the first alerts below them. */
const lineHeight = () => Math.round(Math.min(150, Math.max(88, innerHeight * 0.09)));

export class LineChart extends Track {
  /**
   * The axis of the values; null while there is no finite one.
   * @type {Axis | null}
   */
  axis = null;

  /**
   * `name` is the column of `lines`; `colour` a name of theme.js; `alerts` returns the alerts to mark. `beside` is a
   * second column that is drawn dashed over the first where there is one.
   * @param {LineOptions} options
   */
  constructor({ name, lines, colour, log, alerts, beside = null, format = formatMeasured, ...track }) {
    super({ ...track, height: lineHeight() });
    this.name = name;
    this.lines = lines;
    this.colour = colour;
    this.alerts = alerts;
    this.beside = beside;
    this.format = format;
    this.log = log;
    this.scale = el("span");
    this.controls.append(this.scale);
    look.addEventListener("change", this.redraw);
    this.setLog(log);
  }

  /** @param {boolean} log */
  setLog(log) {
    this.log = log;
    const scales = [["linear", "linear"], ["log", "log"]];
    /** @param {string} scale */
    const choose = (scale) => ((this.log = scale === "log"), this.redraw());
    this.scale.replaceChildren(segmented(`${this.title.textContent} scale`, scales, log ? "log" : "linear", choose));
    this.redraw();
  }

  get #second() {
    return (this.beside && this.lines.series[this.beside.name]) ?? [];
  }

  /** Indices of the first and last shown step, one more on either side so that the line runs out of the frame. */
  #shown() {
    const [first, last] = this.view.range;
    const { steps } = this.lines;
    return [Math.max(0, lowerBound(steps, first) - 1), Math.min(steps.length - 1, lowerBound(steps, last + 1))];
  }

  /**
   * @param {Column} values
   * @param {number} first
   * @param {number} last
   */
  #extent(values, first, last) {
    if (!look.clips) return extent(values, first, last, this.log);
    const inside = usual(values.slice(first, last + 1).filter((value) => !this.log || (value ?? 0) > 0));
    return inside && extent(inside, 0, 1, this.log);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   */
  paint(context, box) {
    const values = this.lines.series[this.name] ?? [];
    const [first, last] = this.#shown();
    const inner = { ...box, height: this.height - TOP - BOTTOM };
    const range = hull(this.#extent(values, first, last), this.#extent(this.#second, first, last));
    context.fillStyle = theme.plot;
    context.fillRect(box.left, 0, box.width, this.height);
    this.paintSteps(context, box, { height: this.height });
    this.#paintAlerts(context, box);
    this.axis = range && axis(range[0], range[1], inner.height, this.log);
    if (!values.length) return this.paintNote(context, box, !this.lines.steps.length ? "No steps yet." : this.name === "loss" ? "Not recorded: call monitor.record(loss=loss) in each step." : "Not recorded.");
    if (this.axis) this.#paintValues(context, box, this.axis);
    context.save();
    context.beginPath();
    context.rect(box.left, 0, box.width, this.height);
    context.clip();
    context.globalAlpha = look.smoothing ? FAINT : 1;
    if (this.axis) this.#paintLine(context, box, values, first, last);
    if (this.axis && this.#second.length) this.#paintSecond(context, box, first, last);
    context.globalAlpha = 1;
    if (this.axis && look.smoothing) this.#paintLine(context, box, averaged(values.slice(0, last + 1), look.smoothing), first, last);
    if (this.axis && look.clips) this.#paintClipped(context, box, values, first, last);
    this.#paintNonfinite(context, box, values, first, last);
    context.restore();
  }

  /** @param {number} value */
  y(value) {
    return this.height - BOTTOM - (this.axis?.at(value) ?? 0);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {Axis} axis
   */
  #paintValues(context, box, axis) {
    context.textAlign = "right";
    context.strokeStyle = theme.grid;
    context.fillStyle = theme.muted;
    const ticks = axis.ticks(Math.max(2, Math.floor(this.height / 22)));
    const texts = formatTicks(ticks);
    for (const [k, tick] of ticks.entries()) {
      const y = Math.round(this.y(tick)) + 0.5;
      if (y < 5 || y > this.height - 3) continue;
      context.beginPath();
      context.moveTo(box.left, y);
      context.lineTo(box.right, y);
      context.stroke();
      context.fillText(texts[k], box.left - 8, y);
    }
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   */
  #paintAlerts(context, box) {
    for (const alert of this.alerts()) {
      const x = Math.round(this.x(alert.first_step + 0.5, box)) + 0.5;
      if (x < box.left || x > box.right) continue;
      context.strokeStyle = theme.severity[alert.severity] ?? theme.muted;
      context.setLineDash([2, 3]);
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, this.height);
      context.stroke();
      context.setLineDash([]);
    }
  }

  /**
   * The points to draw, as [x, y] pairs broken by null where there is no finite value.
   * @param {Box} box
   * @param {Column} values
   * @param {number} first
   * @param {number} last
   */
  #points(box, values, first, last) {
    const { steps } = this.lines;
    const dense = last - first > POINTS_PER_PIXEL * box.width;
    /** @type {([number, number] | null)[]} */
    const points = [];
    /** @type {{x: number, low: number, high: number} | null} */
    let column = null;
    const flush = () => {
      if (!column) return;
      points.push([column.x, column.low]);
      if (column.high !== column.low) points.push([column.x, column.high]);
      column = null;
    };
    for (let i = first; i <= last; i++) {
      const value = values[i];
      if (value === null || !Number.isFinite(value) || (this.log && value <= 0)) {
        flush();
        points.push(null);
        continue;
      }
      const [x, y] = [this.x(steps[i] + 0.5, box), this.y(value)];
      if (!dense) points.push([x, y]);
      else if (column && Math.floor(x) === column.x) {
        column.low = Math.min(column.low, y);
        column.high = Math.max(column.high, y);
      } else {
        flush();
        column = { x: Math.floor(x), low: y, high: y };
      }
    }
    flush();
    return points;
  }

  /**
   * What an axis without outliers leaves out is marked at its edge.
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {Column} values
   * @param {number} first
   * @param {number} last
   */
  #paintClipped(context, box, values, first, last) {
    context.fillStyle = theme[this.colour];
    for (let i = first; i <= last; i++) {
      const value = values[i];
      if (value === null || !Number.isFinite(value) || (this.log && value <= 0)) continue;
      const y = this.y(value);
      if (y < 0 || y > this.height) context.fillRect(this.x(this.lines.steps[i] + 0.5, box) - 1, y < 0 ? 5 : this.height - 5, 2, 5);
    }
  }

  /**
   * Dashed, so that two lines that coincide, as they should, are both seen.
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {number} first
   * @param {number} last
   */
  #paintSecond(context, box, first, last) {
    if (!this.beside) return;
    setText(this.hint, `${this.plainHint}; ${this.beside.text}`);
    context.setLineDash([5, 5]);
    this.#paintLine(context, box, this.#second, first, last, this.beside.colour);
    context.setLineDash([]);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {Column} values
   * @param {number} first
   * @param {number} last
   * @param {ColourName} [colour]
   */
  #paintLine(context, box, values, first, last, colour = this.colour) {
    const points = this.#points(box, values, first, last);
    context.strokeStyle = theme[colour];
    context.fillStyle = theme[colour];
    context.lineWidth = 1.25;
    context.lineJoin = "round";
    context.beginPath();
    let pen = false;
    points.forEach((point, k) => {
      // A value between two that are not finite has no segment: it is a dot.
      if (point && !pen && !points[k + 1]) context.rect(point[0] - 1.5, point[1] - 1.5, 3, 3);
      else if (point && pen) context.lineTo(...point);
      else if (point) context.moveTo(...point);
      pen = point !== null;
    });
    context.stroke();
    context.lineWidth = 1;
  }

  /**
   * A bar along the upper edge over every run of non-finite steps, with a diamond where it begins.
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {Column} values
   * @param {number} first
   * @param {number} last
   */
  #paintNonfinite(context, box, values, first, last) {
    const { steps } = this.lines;
    context.fillStyle = theme.nonfinite;
    context.textAlign = "left";
    let labelled = -Infinity;
    for (let i = first; i <= last; i++) {
      if (values[i] === null || Number.isFinite(values[i])) continue;
      const begin = i;
      while (i < last && values[i + 1] !== null && !Number.isFinite(values[i + 1])) i++;
      const x = this.x(steps[begin] + 0.5, box);
      context.fillRect(x, 0, Math.max(1, this.x(steps[i] + 1, box) - x), 4);
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x + 5, 6);
      context.lineTo(x, 12);
      context.lineTo(x - 5, 6);
      context.fill();
      if (x - labelled < 90 || x < box.left) continue;
      labelled = x;
      const room = Math.max(x - box.left, box.right - x) - 12;
      const texts = [`not finite from step ${formatStep(steps[begin])}`, "not finite"];
      const text = texts.find((candidate) => context.measureText(candidate).width <= room) ?? "";
      const width = context.measureText(text).width;
      context.fillText(text, x + 9 + width > box.right ? x - 9 - width : x + 9, 11);
    }
  }

  /**
   * @param {CanvasRenderingContext2D | null} context
   * @param {Box} box
   */
  paintCursor(context, box) {
    const values = this.lines.series[this.name] ?? [];
    const { cursor } = this.view;
    const at = context && cursor !== null ? this.lines.nearest(cursor) : -1;
    if (!context || at < 0 || !values.length) return this.#say("");
    const second = this.#second[at] ?? null;
    const both = second === null ? "" : ` (${this.format(second)})`;
    this.#say(`${this.format(values[at])}${both} at step ${formatStep(this.lines.steps[at])}`);
    const value = values[at];
    if (value === null || !Number.isFinite(value) || !this.axis || (this.log && value <= 0)) return;
    context.beginPath();
    context.arc(this.x(this.lines.steps[at] + 0.5, box), this.y(value), 3.5, 0, 2 * Math.PI);
    context.fillStyle = theme[this.colour];
    context.fill();
    context.strokeStyle = theme.panel;
    context.lineWidth = 1.5;
    context.stroke();
    context.lineWidth = 1;
  }

  /** @param {string} text */
  #say(text) {
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }
}
