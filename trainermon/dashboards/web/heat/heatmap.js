// Rows × steps as colours. Cells that contain a non-finite element are hatched, and where a row turns non-finite a mark
// of at least six pixels says so: one bad cell among 400 000 cannot get lost.

import { css } from "../colour.js";
import { el } from "../dom.js";
import { linearTicks, logTicks, formatStep, formatTick, formatTicks, formatValue } from "../scales.js";
import { encode, NONE, NONFINITE, onsets, rasterise } from "./raster.js";
import { blocksOf, fitText, paintLabels } from "./labels.js";
import { theme } from "../theme.js";
import { Track } from "../track.js";

/** @import { Block, Box, Cell, Grid, Mode } from "../types.js" */

const BOTTOM = 20;
const MARK = 6;
const MOST_MARKS = 4000;

/**
 * Until the first answer is there.
 * @type {Grid}
 */
const NO_GRID = { rows: [], firstStep: 0, stride: 1, columns: 0, values: new Float32Array() };

/** @import { TrackOptions } from "../track.js" */
/** @typedef {(row: number, column: number) => string[]} CellTip */

export class HeatMap extends Track {
  grid = NO_GRID;
  /** @type {Block[]} */
  blocks = [];
  encoded = encode(NO_GRID, "linear");
  /** @type {Cell[]} */
  onsets = [];
  /** The row that the arrow keys have reached; -1 for none. */
  keyRow = -1;

  /**
   * `tip(row, column)` returns the tooltip's lines for a cell of the current grid.
   * `onRow(name)` hears which row was clicked, or chosen with the arrow keys and Enter; without it rows are not chosen.
   * @param {TrackOptions & {mode: Mode, tip: CellTip, onRow?: (name: string) => void}} options
   */
  constructor({ mode, tip, onRow, ...track }) {
    super(track);
    this.mode = mode;
    this.tip = tip;
    this.onRow = onRow;
    // What the arrow keys have reached, for a screen reader: the canvas says nothing.
    this.spoken = el("span", { cls: "visually-hidden", role: "status" });
    this.root.append(this.spoken);
    if (onRow) this.plot.setAttribute("aria-label", `${track.label}. Arrow keys move crosshair and row, Enter shows the row as a line, plus and minus zoom, Escape resets.`);
  }

  /** @param {Grid} grid */
  show(grid) {
    if (grid.rows.length !== this.grid.rows.length) this.keyRow = -1;
    this.grid = grid;
    this.blocks = blocksOf(grid.rows);
    this.#encode();
  }

  /** @param {Mode} mode */
  setMode(mode) {
    this.mode = mode;
    if (this.isLoaded) this.#encode();
  }

  get isLoaded() {
    return this.grid !== NO_GRID;
  }

  #encode() {
    this.encoded = encode(this.grid, this.mode);
    this.onsets = onsets(this.encoded, this.grid.rows.length, this.grid.columns);
    this.redraw();
  }

  get #inner() {
    return this.height - BOTTOM;
  }

  /**
   * First step of a column.
   * @param {number} column
   */
  stepOf(column) {
    return this.grid.firstStep + column * this.grid.stride;
  }

  /** @param {number} step */
  columnOf(step) {
    const column = Math.floor((step - this.grid.firstStep) / this.grid.stride);
    return column >= 0 && column < this.grid.columns ? column : -1;
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   */
  paint(context, box) {
    const height = this.#inner;
    context.fillStyle = theme.plot;
    context.fillRect(box.left, 0, box.width, height);
    this.paintSteps(context, box, { height, labels: true });
    if (this.isBlank) return this.paintNote(context, box, this.isLoaded ? "No values yet." : "Loading…");
    this.#paintCells(context, box, height);
    this.#paintBlocks(context, box, height);
    this.#paintMarks(context, box, height);
    paintLabels(context, this.grid.rows, this.blocks, { right: box.left - 8, width: box.left - 12, height });
    this.#paintScale(context, box, height);
  }

  get isBlank() {
    return this.encoded.codes.every((code) => code === NONE);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {number} height
   */
  #paintCells(context, box, height) {
    const ratio = window.devicePixelRatio || 1;
    const { firstStep, stride, columns, rows } = this.grid;
    const [first, last] = this.view.range;
    const image = context.createImageData(Math.round(box.width * ratio), Math.round(height * ratio));
    rasterise(image, this.encoded, {
      rows: rows.length, columns, ...theme.pixels,
      from: (first - firstStep) / stride, to: (last + 1 - firstStep) / stride,
      table: this.encoded.diverging ? theme.maps.diverging : theme.maps.sequential,
    });
    context.putImageData(image, Math.round(box.left * ratio), 0);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {number} height
   */
  #paintBlocks(context, box, height) {
    const rowHeight = height / this.grid.rows.length;
    const borders = rowHeight >= 7 ? this.grid.rows.map((_, row) => row) : this.blocks.map(({ from }) => from);
    if (height / borders.length < 10) return;
    context.fillStyle = theme.panel;
    context.globalAlpha = 0.55;
    for (const row of borders.slice(1)) context.fillRect(box.left, Math.round(row * rowHeight), box.width, 1);
    context.globalAlpha = 1;
  }

  /**
   * Upright bars where rows turn non-finite; neighbouring rows that turn in the same column share one.
   * @param {Box} box
   * @param {number} height
   */
  #marks(box, height) {
    const rowHeight = height / this.grid.rows.length;
    /** @type {{column: number, from: number, to: number}[]} */
    const marks = [];
    for (const { row, column } of this.onsets) {
      const last = marks[marks.length - 1];
      if (last?.column === column && last.to === row) last.to = row + 1;
      else if (marks.length < MOST_MARKS) marks.push({ column, from: row, to: row + 1 });
    }
    return marks.map(({ column, from, to }) => {
      const step = this.stepOf(column);
      const middle = (this.x(step, box) + this.x(step + this.grid.stride, box)) / 2;
      const width = Math.max(MARK, Math.min(12, this.x(step + this.grid.stride, box) - this.x(step, box)));
      const tall = Math.max(MARK, (to - from) * rowHeight);
      const top = Math.min(height - tall, Math.max(0, ((from + to) / 2) * rowHeight - tall / 2));
      return { x: middle - width / 2, y: top, width, height: tall };
    }).filter(({ x, width }) => x + width > box.left && x < box.right);
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {number} height
   */
  #paintMarks(context, box, height) {
    const marks = this.#marks(box, height);
    context.save();
    context.beginPath();
    context.rect(box.left - MARK, 0, box.width + 2 * MARK, height);
    context.clip();
    context.fillStyle = theme.panel;
    for (const mark of marks) context.fillRect(mark.x - 1.5, mark.y - 1.5, mark.width + 3, mark.height + 3);
    context.fillStyle = theme.nonfinite;
    for (const mark of marks) context.fillRect(mark.x, mark.y, mark.width, mark.height);
    context.restore();
  }

  /**
   * @param {CanvasRenderingContext2D} context
   * @param {Box} box
   * @param {number} height
   */
  #paintScale(context, box, height) {
    const [left, gap] = box.outer < 560 ? [box.right + 4, 11] : [box.right + 12, 14];
    const tall = height - (this.onsets.length ? 30 : 8);
    const table = this.encoded.diverging ? theme.maps.diverging : theme.maps.sequential;
    for (let y = 0; y < tall; y++) {
      context.fillStyle = css(table[Math.round(255 * (1 - y / (tall - 1)))]);
      context.fillRect(left, 4 + y, 9, 1.5);
    }
    context.fillStyle = theme.muted;
    context.textAlign = "left";
    for (const [at, text] of this.#scaleLabels(tall)) {
      context.fillText(text, left + gap, Math.min(tall, Math.max(9, 4 + (1 - at) * tall)));
    }
    if (!this.onsets.length) return;
    context.fillStyle = theme.nonfinite;
    context.fillRect(left, height - 14, 9, 9);
    const text = ["NaN, Inf", "NaN"].find((candidate) => left + gap + context.measureText(candidate).width <= box.outer);
    context.fillText(text ?? "", left + gap, height - 9);
  }

  /**
   * @param {number} tall
   * @returns {[number, string][]}
   */
  #scaleLabels(tall) {
    const { lo, hi, scale } = this.encoded;
    /** @param {number} t */
    const place = (t) => (t - lo) / (hi - lo);
    if (tall < 20) return [];
    const count = Math.max(2, Math.floor(tall / 40));
    if (scale === "ratio") {
      const ratio = formatTick(Number((2 ** hi).toPrecision(3)));
      /** @type {[number, string][]} */
      const labels = [[1, `× ${ratio}`], [0.5, "× 1"], [0, `÷ ${ratio}`]];
      return labels.filter((_, k) => tall > 50 || k !== 1);
    }
    const ticks = scale === "linear" ? linearTicks(lo, hi, count) : logTicks(10 ** lo, 10 ** hi, count);
    const texts = formatTicks(ticks);
    return ticks.map((tick, k) => [place(scale === "linear" ? tick : Math.log10(tick)), texts[k]]);
  }

  /** Where it began: the first column with a non-finite cell, and the rows that turn in it; null if there is none. */
  get firstNonfinite() {
    if (!this.onsets.length) return null;
    const { column } = this.onsets[0];
    const rows = this.onsets.filter((cell) => cell.column === column).map(({ row }) => this.grid.rows[row]);
    return { step: this.stepOf(column), rows };
  }

  /** @param {number} y */
  #rowAt(y) {
    if (y >= this.#inner) return -1;
    return Math.min(this.grid.rows.length - 1, Math.floor((y / this.#inner) * this.grid.rows.length));
  }

  /**
   * @param {number} step
   * @param {number} y
   */
  describe(step, y) {
    const row = this.#rowAt(y);
    const column = this.columnOf(step);
    return row < 0 || column < 0 ? null : this.tip(row, column);
  }

  /**
   * @param {number} _x
   * @param {number} y
   */
  click(_x, y) {
    const row = this.#rowAt(y);
    if (row >= 0 && this.grid.rows.length) this.onRow?.(this.grid.rows[row]);
  }

  /** @param {KeyboardEvent} event */
  key({ key }) {
    const last = this.grid.rows.length - 1;
    const moves = /** @type {Record<string, number>} */ ({ ArrowUp: -1, ArrowDown: 1, PageUp: -20, PageDown: 20 });
    if (!this.onRow || last < 0 || (!(key in moves) && key !== "Enter")) return false;
    if (key === "Enter") this.onRow(this.grid.rows[Math.max(0, this.keyRow)]);
    else {
      this.keyRow = Math.min(last, Math.max(0, this.keyRow + moves[key]));
      this.view.point(this.view.cursor ?? this.view.range[1], this);
    }
    return true;
  }

  /**
   * @param {number} row
   * @param {number} column
   */
  isNonfinite(row, column) {
    return this.encoded.codes[row * this.grid.columns + column] === NONFINITE;
  }

  /**
   * "1,640", or "1,640–1,649" where a column stands for several steps.
   * @param {number} column
   */
  stepText(column) {
    const step = this.stepOf(column);
    return this.grid.stride > 1 ? `${formatStep(step)}–${formatStep(step + this.grid.stride - 1)}` : formatStep(step);
  }

  /**
   * @param {number} row
   * @param {number} column
   */
  valueText(row, column) {
    const value = this.grid.values[row * this.grid.columns + column];
    if (value === Infinity) return "contains NaN or Inf";
    return Number.isNaN(value) ? "no value" : formatValue(value);
  }

  /**
   * @param {CanvasRenderingContext2D | null} context
   * @param {Box} box
   */
  paintCursor(context, box) {
    const row = this.view.origin !== this ? -1 : this.pointer ? this.#rowAt(this.pointer.y) : this.keyRow;
    const told = row >= 0 && !this.pointer && this.view.cursor !== null ? this.tip(row, this.columnOf(this.view.cursor)).join(", ") : "";
    if (this.spoken.textContent !== told) this.spoken.textContent = told;
    if (!context || row < 0) return;
    const height = this.#inner / this.grid.rows.length;
    const y = (row + 0.5) * height;
    context.strokeStyle = theme.ink;
    context.strokeRect(box.left + 0.5, row * height + 0.5, box.width - 1, Math.max(2, height - 1));
    context.fillStyle = theme.panel;
    context.fillRect(0, Math.max(0, y - 9), box.left - 4, 18);
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    context.font = `600 11px ${theme.font}`;
    context.fillText(fitText(context, this.grid.rows[row], box.left - 12), box.left - 8, Math.max(9, y));
  }
}

