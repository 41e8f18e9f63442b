// How the elements of one row are distributed, over the steps: columns of steps, a line for each sign and power of two,
// the share of the elements as colour. Beside it, in the gutter, the distribution at one step as bars. Below, what the
// colours mean, and the step of the bars.

import { css } from "../colour.js";
import { formatStep, formatTicks, formatValue } from "../scales.js";
import { theme } from "../theme.js";
import { Track } from "../track.js";

/** @import { Box, Histograms } from "../types.js" */

const BINS = 128;
const ZERO = 63;
const NOT_FINITE = 127;
const TOP = 8;
const BOTTOM = 22;
const RAMP = 120;
const LEAST_SHARE = 1e-6;
const TICK_PIXELS = 16;

/** @param {number} share */
const percent = (share) => (share >= 0.001 || share === 0 ? `${Number((100 * share).toPrecision(3))} %` : `${formatValue(100 * share, 3)} %`);

export class DensityChart extends Track {
  /** @type {Histograms | null} */
  data = null;
  log = false;
  /** The bins that are drawn, from the lowest line upwards. @type {number[]} */
  bins = [];

  /** @param {Histograms | null} data */
  show(data) {
    this.data = data;
    this.bins = data ? occupied(data) : [];
    this.redraw();
  }

  /**
   * Where a histogram begins and ends: it stands until the next, but no longer than the one before it did. One that
   * others were added to stands as long as the last of them.
   * @param {Histograms} data
   * @param {number} at
   */
  #span({ first, last }, at) {
    const usual = at > 0 ? first[at] - last[at - 1] : (first[1] ?? last[0] + 1) - last[0];
    return [first[at], Math.min(first[at + 1] ?? Infinity, last[at] + Math.max(1, usual))];
  }

  /** Height of the chart without what stands below it. */
  get #inner() {
    return this.height - BOTTOM;
  }

  /** Height of a line of the chart. */
  get #tall() {
    return (this.#inner - TOP) / Math.max(1, this.bins.length);
  }

  /** @param {number} line */
  #y(line) {
    return this.#inner - (line + 1) * this.#tall;
  }

  /** @param {number} step */
  #at(step) {
    if (!this.data) return -1;
    const { first } = this.data;
    let at = first.length - 1;
    while (at >= 0 && first[at] > step) at--;
    return at;
  }

  /**
   * The share of a step's elements that are in a bin.
   * @param {number} at
   * @param {number} bin
   */
  #share(at, bin) {
    return this.data ? this.data.counts[at * BINS + bin] / (this.data.totals[at] || 1) : 0;
  }

  /** @param {number} share */
  #strength(share) {
    const largest = this.data?.largest || 1;
    return this.log ? 1 - Math.log(share / largest) / Math.log(LEAST_SHARE / largest) : share / largest;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   */
  paint(context, box) {
    context.fillStyle = theme.plot;
    context.fillRect(box.left, 0, box.width, this.#inner);
    const { data } = this;
    if (!data?.first.length) return;
    context.save();
    context.beginPath();
    context.rect(box.left, 0, box.width, this.#inner);
    context.clip();
    for (let at = 0; at < data.first.length; at++) this.#paintColumn(context, box, at);
    context.restore();
    this.#paintAxis(context, box);
    this.#paintLegend(context, box);
    this.#paintBars(context, box, this.#at(this.view.range[1]));
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {number} at
   */
  #paintColumn(context, box, at) {
    if (!this.data) return;
    const [from, to] = this.#span(this.data, at);
    const [left, right] = [this.x(from, box), this.x(to, box)];
    if (right < box.left || left > box.right) return;
    const wide = Math.max(1, right - left);
    const colours = theme.maps.sequential;
    this.bins.forEach((bin, line) => {
      const share = this.#share(at, bin);
      if (!share) return;
      // Zero may be more than all that the scale covers.
      const strength = Math.min(1, Math.max(0, this.#strength(share)));
      context.fillStyle = css(colours[Math.round(strength * (colours.length - 1))]);
      const y = this.#y(line);
      context.fillRect(left, y, wide + 0.3, Math.ceil(y + this.#tall) - y);
    });
    if (!this.data.counts[at * BINS + NOT_FINITE]) return;
    context.fillStyle = theme.nonfinite;
    context.fillRect(left, 0, Math.max(3, wide), TOP - 2);
  }

  /**
   * The bounds of the bins that are powers of two next to round powers of ten, and zero.
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   */
  #paintAxis(context, box) {
    context.textAlign = "right";
    const ticks = this.#ticks();
    const texts = formatTicks(ticks.map(({ value }) => value));
    ticks.forEach(({ y }, k) => {
      context.fillStyle = theme.muted;
      context.fillText(texts[k], box.left - 8, y);
      context.fillRect(box.left - 4, Math.round(y), 4, 1);
    });
  }

  /** @returns {{value: number, y: number}[]} */
  #ticks() {
    const { data } = this;
    if (!data) return [];
    /** @type {{value: number, y: number}[]} */
    const found = [];
    const zero = this.bins.indexOf(ZERO);
    if (zero >= 0) found.push({ value: 0, y: this.#y(zero) + this.#tall / 2 });
    for (let power = 4; power >= -13; power--) {
      for (const sign of [1, -1]) {
        const value = sign * 10 ** power;
        const line = this.bins.findIndex((bin) => (sign > 0 ? data.low[bin] <= value && value < data.high[bin] : data.low[bin] < value && value <= data.high[bin]));
        if (line < 0 || !Number.isFinite(data.low[this.bins[line]]) || !Number.isFinite(data.high[this.bins[line]])) continue;
        const [near, far] = [data.low[this.bins[line]], data.high[this.bins[line]]].map((bound) => Math.log2(Math.abs(bound)));
        const y = this.#y(line) + this.#tall * (1 - (Math.log2(Math.abs(value)) - near) / (far - near));
        if (y > 6 && y < this.#inner - 4 && found.every((other) => Math.abs(other.y - y) >= TICK_PIXELS)) found.push({ value, y });
      }
    }
    return found;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   */
  #paintLegend(context, box) {
    if (!this.data) return;
    const [y, least, most] = [this.#inner + 7, this.log ? LEAST_SHARE : 0, this.data.largest || 1];
    const isOver = this.data.first.some((_, at) => this.#share(at, ZERO) > most);
    const colours = theme.maps.sequential;
    const [name, ramp] = box.width > 3 * RAMP ? ["share of the elements", RAMP] : ["share", RAMP / 2];
    let x = box.left;
    /** @param {string} text */
    const write = (text) => (context.fillText(text, x, y + 5), (x += context.measureText(text).width + 8));
    context.textAlign = "left";
    context.fillStyle = theme.muted;
    write(name);
    write(percent(least));
    for (let k = 0; k < ramp; k++) {
      context.fillStyle = css(colours[Math.round((k / (ramp - 1)) * (colours.length - 1))]);
      context.fillRect(x + k, y, 1.5, 9);
    }
    x += ramp + 8;
    context.fillStyle = theme.muted;
    write(`${percent(most)}${isOver ? " or more" : ""}`);
  }

  /**
   * One step's distribution as bars in the gutter, and which step it is.
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {number} at
   */
  #paintBars(context, box, at) {
    if (at < 0 || !this.data) return;
    const room = box.outer - box.right - 8;
    const largest = Math.max(0, ...this.bins.map((bin) => (bin === ZERO ? 0 : this.#share(at, bin)))) || 1;
    context.fillStyle = theme.panel;
    context.fillRect(box.right + 1, 0, room + 8, this.height);
    const texts = [this.#stepText(at), this.#stepText(at).replace(/^\D+/, "")];
    context.fillStyle = theme.muted;
    context.textAlign = "left";
    context.fillText(texts.find((text) => context.measureText(text).width <= room + 4) ?? "", box.right + 4, this.#inner + 12);
    context.fillStyle = theme.accent;
    this.bins.forEach((bin, line) => {
      const share = this.#share(at, bin);
      if (share) context.fillRect(box.right + 4, this.#y(line) + 0.5, Math.max(1, room * Math.min(1, share / largest)), Math.max(1, this.#tall - 1));
    });
  }

  /**
   * What is under the pointer: the bin, how many elements of the step are in it, and what is not finite.
   * @param {number} step
   * @param {number} y
   */
  describe(step, y) {
    const at = this.#at(step);
    const { data } = this;
    if (at < 0 || !data || y > this.#inner) return null;
    const bin = this.bins[Math.min(this.bins.length - 1, Math.max(0, Math.floor((this.#inner - y) / this.#tall)))];
    const count = data.counts[at * BINS + bin];
    const bad = data.counts[at * BINS + NOT_FINITE];
    return [
      this.#stepText(at),
      `${this.binText(bin)}: ${formatStep(count)} of ${formatStep(data.totals[at])} elements, ${percent(this.#share(at, bin))}`,
      bad ? `${formatStep(bad)} not finite` : "",
    ];
  }

  /** @param {number} bin */
  binText(bin) {
    if (bin === ZERO || !this.data) return "zero";
    const [low, high] = [this.data.low[bin], this.data.high[bin]];
    if (low === -Infinity) return `up to ${formatValue(high)}`;
    if (high === Infinity) return `from ${formatValue(low)}`;
    return `${formatValue(low)} to ${formatValue(high)}`;
  }

  /** @param {number} at */
  #stepText(at) {
    const [first, last] = [this.data?.first[at] ?? 0, this.data?.last[at] ?? 0];
    return first === last ? `step ${formatStep(first)}` : `steps ${formatStep(first)}–${formatStep(last)}`;
  }

  /**
   * @param {CanvasRenderingContext2D | null} context
   * @param {Box} box
   */
  paintCursor(context, box) {
    const at = this.#at(this.view.cursor ?? this.view.range[1]);
    const told = at < 0 ? "" : `bars: ${this.#stepText(at)}, ${percent(this.#share(at, ZERO))} zero`;
    if (this.readout.textContent !== told) this.readout.textContent = told;
    if (context && at >= 0) this.#paintBars(context, box, at);
  }
}

/**
 * The bins between the largest and the smallest elements of either sign, and zero: those next to zero that nothing is
 * in would only push the others together.
 * @param {Histograms} data
 */
function occupied({ first, counts }) {
  const sums = new Float64Array(BINS);
  for (let at = 0; at < first.length; at++) for (let bin = 0; bin < BINS; bin++) sums[bin] += counts[at * BINS + bin];
  /**
   * @param {number} from
   * @param {number} to
   */
  const filled = (from, to) => {
    const bins = Array.from({ length: to - from }, (_, k) => from + k);
    const [low, high] = [bins.find((bin) => sums[bin]), bins.reverse().find((bin) => sums[bin])];
    return low === undefined || high === undefined ? [] : Array.from({ length: high - low + 1 }, (_, k) => low + k);
  };
  return [...filled(0, ZERO), ZERO, ...filled(ZERO + 1, NOT_FINITE)];
}
