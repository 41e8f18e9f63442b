// The one step axis that every chart shares: its full extent, the zoomed part, the crosshair and the brush. A chart
// listens to "range" and "cursor" and never knows another chart. "zoom": the reader has chosen other steps.

import { lowerBound } from "./scales.js";

/** @import { Track } from "./track.js" */

/** @import { Column } from "./types.js" */

export class StepView extends EventTarget {
  /** @type {[number, number]} */
  full = [0, 1];
  known = false;
  /** @type {[number, number] | null} */
  zoomed = null;
  /** @type {number | null} */
  cursor = null;
  /** @type {[number, number] | null} */
  brush = null;
  /** @type {Track | null} */
  origin = null;
  // Until the first answers are here nothing is drawn: an empty frame first, and a second one a moment later, would only
  // make the page ready later.
  held = true;

  release() {
    this.held = false;
    this.#tell("range");
  }

  /** First and last step shown. */
  get range() {
    return this.zoomed ?? this.full;
  }

  /**
   * @param {number} first
   * @param {number} last
   */
  extend(first, last) {
    if (this.known && first === this.full[0] && last === this.full[1]) return;
    this.known = true;
    this.full = [first, Math.max(last, first + 1)];
    this.#tell("range");
  }

  /**
   * Shows steps a…b (in any order); at least five, so that a slip of the mouse does not lose the reader.
   * @param {number} a
   * @param {number} b
   */
  zoom(a, b) {
    const centre = Math.round((a + b) / 2);
    const [lo, hi] = [Math.min(a, b, centre - 2), Math.max(a, b, centre + 2)];
    this.zoomed = [Math.max(this.full[0], Math.round(lo)), Math.min(this.full[1], Math.round(hi))];
    this.#tell("range");
    this.#tell("zoom");
  }

  /**
   * An eighth of the run around one step, at least 21 steps, for the links in tables; a run no longer than that whole.
   * @param {number} step
   */
  focus(step) {
    const length = this.full[1] - this.full[0] + 1;
    const around = Math.max(10, Math.ceil(length / 16));
    if (length > 2 * around + 1) this.zoom(step - around, step + around);
    else this.reset();
    this.point(step);
  }

  reset() {
    this.zoomed = null;
    this.#tell("range");
    this.#tell("zoom");
  }

  /**
   * `origin` is the chart under the pointer: only that one shows a tooltip.
   * @param {number | null} step
   * @param {Track | null} [origin]
   */
  point(step, origin = null) {
    this.cursor = step === null ? null : Math.min(this.range[1], Math.max(this.range[0], Math.round(step)));
    this.origin = origin;
    this.#tell("cursor");
  }

  /** @param {[number, number] | null} ends */
  select(ends) {
    this.brush = ends && [Math.min(...ends), Math.max(...ends)];
    this.#tell("cursor");
  }

  /** @param {string} type */
  #tell(type) {
    this.dispatchEvent(new Event(type));
  }
}

/** Values per step over all ranks, ascending by step; a repeated step (a resumed run) replaces the earlier one. */
export class Lines {
  /** @type {number[]} */
  steps = [];
  /** @type {Record<string, Column>} */
  series = {};

  /**
   * `series` maps names to columns; one without any value is left out.
   * @param {number[]} steps
   * @param {Record<string, Column>} series
   */
  load(steps, series) {
    this.steps = steps;
    this.series = Object.fromEntries(Object.entries(series).filter(([, column]) => column.some((value) => value !== null)));
  }

  /**
   * @param {number} step
   * @param {Record<string, number | null>} values
   */
  append(step, values) {
    const at = this.steps.length && step <= this.steps[this.steps.length - 1] ? lowerBound(this.steps, step) : this.steps.length;
    const fresh = this.steps[at] !== step;
    if (fresh) this.steps.splice(at, 0, step);
    for (const [name, value] of Object.entries(values)) {
      if (value !== null) this.series[name] ??= new Array(this.steps.length - Number(fresh)).fill(null);
      this.series[name]?.splice(at, fresh ? 0 : 1, value);
    }
  }

  /**
   * Index of the step nearest to `step`; -1 when there is none.
   * @param {number} step
   */
  nearest(step) {
    const at = lowerBound(this.steps, step);
    if (at === 0 || at === this.steps.length) return Math.min(at, this.steps.length - 1);
    return step - this.steps[at - 1] < this.steps[at] - step ? at - 1 : at;
  }

  /** @param {string} name */
  last(name) {
    const column = this.series[name] ?? [];
    for (let i = column.length - 1; i >= 0; i--) if (column[i] !== null) return column[i];
    return null;
  }
}
