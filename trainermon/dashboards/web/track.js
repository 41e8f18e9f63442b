// One chart on the shared step axis: frame, gutters, crosshair, zoom by drag, keys. What is drawn inside is up to the
// subclass: paint(context, box), and optionally paintCursor(context, box) (context null: nothing is pointed at) and describe(step, y, box) for the tooltip.

import { el, fitCanvas, perFrame } from "./dom.js";
import { formatStep, linearTicks } from "./scales.js";
import { onTheme, theme } from "./theme.js";
import { hideTip, showTip } from "./tip.js";

/** @import { Box } from "./types.js" */

const DRAG_PIXELS = 4;

/** @import { StepView } from "./view.js" */
/** @typedef {{parent: HTMLElement, view: StepView, title: string, hint?: string, height: number, label: string}} TrackOptions */

/**
 * Equal gutters line all charts up, so that one crosshair runs through the whole page.
 * @param {number} width
 */
function gutters(width) {
  if (width < 560) return { left: 78, right: 47 };
  return width < 1100 ? { left: 132, right: 66 } : { left: 168, right: 84 };
}

export class Track {
  /**
   * Where the pointer is, in CSS pixels of the plot.
   * @type {{x: number, y: number} | null}
   */
  pointer = null;
  /**
   * The step on which a drag began.
   * @type {number | null}
   */
  dragFrom = null;
  dragStart = 0;
  paintedWidth = -1;

  /**
   * `label` is what a screen reader says; `height` is in CSS pixels.
   * @param {TrackOptions} options
   */
  constructor({ parent, view, title, hint = "", height, label }) {
    this.view = view;
    this.height = height;
    this.title = el("h2", {}, title);
    this.plainHint = hint;
    this.hint = el("span", { cls: "hint" }, hint);
    this.readout = el("output", { cls: "readout" });
    this.controls = el("div", { cls: "controls" });
    this.base = el("canvas", { "aria-hidden": "true" });
    this.overlay = el("canvas", { "aria-hidden": "true" });
    const keys = `${label}. Arrow keys move the crosshair, plus and minus zoom, Escape resets.`;
    this.plot = el("div", { cls: "plot", tabindex: "0", role: "group", "aria-label": keys }, this.base, this.overlay);
    this.header = el("header", {}, this.title, this.hint, this.readout, this.controls);
    this.root = el("section", { cls: "track" }, this.header, this.plot);
    parent.append(this.root);
    this.redraw = perFrame(() => this.#paintAll());
    this.redrawCursor = perFrame(() => this.#paintOverlay());
    this.#listen();
  }

  /** Plot area in CSS pixels. */
  get box() {
    const width = this.plot.clientWidth;
    const { left, right } = gutters(width);
    return { left, top: 0, width: Math.max(1, width - left - right), height: this.height, right: width - right, outer: width };
  }

  /**
   * Horizontal place of a step's left edge; step + 1 is its right edge, step + 0.5 its middle.
   * @param {number} step
   * @param {Box} box
   */
  x(step, box) {
    const [first, last] = this.view.range;
    return box.left + ((step - first) / (last - first + 1)) * box.width;
  }

  /**
   * @param {number} x
   * @param {Box} box
   */
  stepAt(x, box) {
    const [first, last] = this.view.range;
    return Math.floor(first + ((x - box.left) / box.width) * (last - first + 1));
  }

  /** @param {number} height */
  resize(height) {
    this.height = height;
    this.plot.style.height = `${height}px`;
    this.redraw();
  }

  #listen() {
    this.plot.style.height = `${this.height}px`;
    new ResizeObserver(() => this.plot.clientWidth !== this.paintedWidth && this.redraw()).observe(this.plot);
    onTheme(this.redraw);
    this.view.addEventListener("range", this.redraw);
    this.view.addEventListener("cursor", this.redrawCursor);
    this.plot.addEventListener("pointermove", (event) => this.#move(event));
    this.plot.addEventListener("pointerleave", () => this.#leave());
    this.plot.addEventListener("pointerdown", (event) => this.#press(event));
    this.plot.addEventListener("pointerup", (event) => this.#release(event));
    this.plot.addEventListener("pointercancel", () => this.#cancel());
    this.plot.addEventListener("dblclick", () => this.view.reset());
    this.plot.addEventListener("keydown", (event) => this.#key(event));
    this.plot.addEventListener("blur", () => this.#leave());
  }

  /** @param {MouseEvent} event */
  #locate(event) {
    const frame = this.plot.getBoundingClientRect();
    return { x: event.clientX - frame.left, y: event.clientY - frame.top, box: this.box };
  }

  /** @param {PointerEvent} event */
  #move(event) {
    const { x, y, box } = this.#locate(event);
    if (this.dragFrom !== null) this.view.select([this.dragFrom, this.stepAt(x, box)]);
    if (x < box.left || x > box.right) return void (this.dragFrom === null && this.#leave());
    this.pointer = { x, y };
    this.view.point(this.stepAt(x, box), this);
    this.#tip(event.clientX, event.clientY);
  }

  /**
   * @param {number} clientX
   * @param {number} clientY
   */
  #tip(clientX, clientY) {
    const lines = this.pointer && this.view.cursor !== null && this.describe(this.view.cursor, this.pointer.y, this.box, this.pointer.x);
    if (lines) showTip(lines, clientX, clientY);
    else hideTip();
  }

  #leave() {
    this.pointer = null;
    hideTip();
    this.view.point(null);
  }

  /** @param {PointerEvent} event */
  #press(event) {
    const { x, box } = this.#locate(event);
    if (event.button !== 0 || x < box.left || x > box.right) return;
    this.dragStart = x;
    this.dragFrom = this.stepAt(x, box);
    this.plot.setPointerCapture(event.pointerId);
  }

  /** @param {PointerEvent} event */
  #release(event) {
    if (this.dragFrom === null) return;
    const { x, y, box } = this.#locate(event);
    const [from, to] = [this.dragFrom, this.stepAt(Math.min(box.right - 1, Math.max(box.left, x)), box)];
    const moved = Math.abs(x - this.dragStart) > DRAG_PIXELS;
    this.#cancel();
    if (moved) this.view.zoom(from, to);
    else this.click(x, y, box);
  }

  #cancel() {
    this.dragFrom = null;
    this.view.select(null);
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const [first, last] = this.view.range;
    const span = last - first;
    const cursor = this.view.cursor ?? last;
    /** @type {Record<string, () => void>} */
    const actions = {
      ArrowLeft: () => this.view.point(cursor - (event.shiftKey ? Math.ceil(span / 20) : 1), this),
      ArrowRight: () => this.view.point(cursor + (event.shiftKey ? Math.ceil(span / 20) : 1), this),
      Home: () => this.view.point(first, this),
      End: () => this.view.point(last, this),
      "+": () => this.view.zoom(cursor - span / 4, cursor + span / 4),
      "-": () => this.view.zoom(first - span / 2, last + span / 2),
      Escape: () => this.view.reset(),
    };
    if (this.key(event)) return event.preventDefault();
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  #paintAll() {
    if (this.view.held) return;
    const box = this.box;
    this.paintedWidth = box.outer;
    const context = fitCanvas(this.base, box.outer, this.height);
    context.font = `11px ${theme.font}`;
    context.textBaseline = "middle";
    this.paint(context, box);
    this.#paintOverlay();
  }

  #paintOverlay() {
    // Most of the time there is nothing to show, and a second canvas of this size is not free.
    const { brush, cursor } = this.view;
    this.overlay.hidden = cursor === null && brush === null;
    if (this.overlay.hidden) return this.paintCursor(null, this.box);
    const box = this.box;
    const context = fitCanvas(this.overlay, box.outer, this.height);
    context.font = `11px ${theme.font}`;
    context.textBaseline = "middle";
    if (brush) {
      const [a, b] = brush;
      const [from, to] = [Math.max(box.left, this.x(a, box)), Math.min(box.right, this.x(b + 1, box))];
      context.globalAlpha = 0.16;
      context.fillStyle = theme.accent;
      context.fillRect(from, 0, to - from, this.height);
      context.globalAlpha = 1;
    }
    if (cursor !== null) {
      const x = Math.round(this.x(cursor + 0.5, box)) + 0.5;
      context.strokeStyle = theme.ink;
      context.globalAlpha = 0.55;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, this.height);
      context.stroke();
      context.globalAlpha = 1;
    }
    this.paintCursor(context, box);
  }

  /**
   * Draws the chart.
   * @abstract
   * @param {CanvasRenderingContext2D} _context
   * @param {Box} _box
   */
  paint(_context, _box) {
    throw new Error("a chart draws itself");
  }

  /**
   * Draws what is pointed at; without a context nothing is.
   * @param {CanvasRenderingContext2D | null} _context
   * @param {Box} _box
   */
  paintCursor(_context, _box) {}

  /**
   * The lines of the tooltip; null for none.
   * @param {number} _step
   * @param {number} _y
   * @param {Box} _box
   * @param {number} _x
   * @returns {string[] | null}
   */
  describe(_step, _y, _box, _x) {
    return null;
  }

  /**
   * @param {number} _x
   * @param {number} _y
   * @param {Box} _box
   */
  click(_x, _y, _box) {}

  /**
   * Keys that only this chart knows; returns whether this was one.
   * @param {KeyboardEvent} _event
   */
  key(_event) {
    return false;
  }

  /**
   * A few words in the middle of a chart that has nothing to show.
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {string} text
   */
  paintNote(context, box, text) {
    context.fillStyle = theme.muted;
    context.textAlign = "center";
    context.fillText(text, box.left + box.width / 2, this.height / 2);
  }

  /**
   * Round steps along the axis, about 90 pixels apart, never between two steps.
   * @param {Box} box
   */
  stepTicks(box) {
    const [first, last] = this.view.range;
    if (!this.view.known) return [];
    return linearTicks(first, last, Math.max(4, Math.floor(box.width / 90)), 1);
  }

  /**
   * Vertical grid lines; with `labels`, the step numbers below `y`.
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {{height: number, labels?: boolean}} look
   */
  paintSteps(context, box, { height, labels = false }) {
    context.strokeStyle = theme.grid;
    context.fillStyle = theme.muted;
    context.textAlign = "center";
    context.lineWidth = 1;
    for (const step of this.stepTicks(box)) {
      const x = Math.round(this.x(step + 0.5, box)) + 0.5;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height);
      context.stroke();
      if (labels) context.fillText(formatStep(step), x, height + 10);
    }
  }
}
