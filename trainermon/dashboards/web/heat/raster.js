// From cells to pixels, without a canvas: values to colour codes, and codes to the pixels of a window of the grid.
// Codes: -1 no data, 0…255 a place in the colour map, 256 contains a non-finite element.

/** @import { Cell, Encoded, Grid, Mode } from "../types.js" */

export const NONE = -1;
export const NONFINITE = 256;

/** @typedef {{from?: number, end?: number, stride?: number, most?: number}} Stretch */
/** @typedef {{first: Int32Array, end: Int32Array}} Spans */
/** @typedef {{rows: number, columns: number, from: number, to: number, table: Uint32Array, none: number, nonfinite: number, nonfinite2: number}} Picture */

const SAMPLE = 20000;
// So few are sorted by insertion, at most twice as many.
const FEW = 64;
// A diverging scale ends at one of these ratios: readable labels, and ordinary noise stays pale.
const RATIOS = [1.5, 2, 3, 5, 10, 30, 100, 1e3, 1e4, 1e6, 1e9, 1e12];

// Reused by every quantile: one small array per column of a heat map made the garbage collector stop the page for 100 ms.
const scratch = new Float32Array(2 * SAMPLE);

/**
 * Sorts the finite ones of about `most` evenly spaced values from…end into `scratch`; returns how many there are.
 * @param {ArrayLike<number>} values
 * @param {Stretch} [where]
 */
function sample(values, { from = 0, end = values.length, stride = 1, most = SAMPLE } = {}) {
  const every = stride * Math.max(1, Math.floor((end - from) / stride / most));
  let size = 0;
  for (let i = from; i < end; i += every) {
    const value = values[i];
    if (!Number.isFinite(value)) continue;
    let at = size++;
    if (most <= FEW) for (; at > 0 && scratch[at - 1] > value; at--) scratch[at] = scratch[at - 1];
    scratch[at] = value;
  }
  if (most > FEW) scratch.subarray(0, size).sort();
  return size;
}

/**
 * @param {ArrayLike<number>} values
 * @param {Stretch} where
 */
function median(values, where) {
  const size = sample(values, where);
  // The mean of the two in the middle: with two ranks, one is as much slower as the other is faster.
  return size ? (scratch[(size - 1) >> 1] + scratch[size >> 1]) / 2 : NaN;
}

/**
 * What each cell is compared with: the median of its row, or of its column (the other ranks at that step).
 * @param {Grid} grid
 * @param {Mode} mode
 */
function baselines({ rows, columns, values }, mode) {
  if (mode === "change") {
    return Float64Array.from(rows, (_, r) => median(values, { from: r * columns, end: (r + 1) * columns, most: 500 }));
  }
  const medians = new Float64Array(columns);
  for (let c = 0; c < columns; c++) medians[c] = median(values, { from: c, stride: columns, most: FEW });
  return medians;
}

/**
 * Each cell on the scale's own axis (logarithm, ratio, difference); NaN and +Infinity keep their meaning.
 * @param {Grid} grid
 * @param {Mode} mode
 * @param {boolean} negative
 */
function transformed(grid, mode, negative) {
  const { columns, values } = grid;
  const result = new Float32Array(values.length);
  const relative = mode === "change" || mode === "peers";
  const bases = relative ? baselines(grid, mode) : new Float64Array();
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (!relative) result[i] = mode === "linear" || negative || value === Infinity ? value : Math.log10(value);
    else if (value === Infinity) result[i] = Infinity;
    else {
      const base = bases[mode === "change" ? Math.floor(i / columns) : i % columns];
      result[i] = negative ? value - base : Math.log2(value / base);
    }
  }
  return result;
}

/**
 * @param {Float32Array} values
 * @param {boolean} diverging
 * @param {boolean} isRatio
 */
function domainOf(values, diverging, isRatio) {
  const size = sample(values);
  if (!size) return [0, 1];
  const [low, high] = [scratch[Math.round(0.005 * (size - 1))], scratch[Math.round(0.999 * (size - 1))]];
  if (!diverging) return high > low ? [low, high] : [low - 0.5, high + 0.5];
  const reach = Math.max(Math.abs(low), Math.abs(high));
  if (!isRatio) return [-reach || -1, reach || 1];
  const ratio = RATIOS.find((candidate) => Math.log2(candidate) >= reach * 0.999) ?? 2 ** reach;
  return [-Math.log2(ratio), Math.log2(ratio)];
}

/**
 * Codes of all cells. `mode`: "log", "linear", "change" (ratio to the row's median) or "peers" (ratio to the column's).
 * The scale covers 99 % of the cells; what lies outside has its end colour. Values of either sign are shown linearly.
 * @param {Grid} grid
 * @param {Mode} mode
 * @returns {Encoded}
 */
export function encode(grid, mode) {
  const negative = grid.values.some((value) => value < 0);
  const isRatio = (mode === "change" || mode === "peers") && !negative;
  const diverging = isRatio || negative;
  const scaled = transformed(grid, mode, negative);
  const [lo, hi] = domainOf(scaled, diverging, isRatio);
  const codes = new Int16Array(scaled.length);
  const factor = 255 / (hi - lo);
  for (let i = 0; i < scaled.length; i++) {
    const t = scaled[i];
    if (grid.values[i] === Infinity) codes[i] = NONFINITE;
    else if (t !== t) codes[i] = NONE;
    else codes[i] = Math.max(0, Math.min(255, Math.round((t - lo) * factor)));
  }
  const scale = isRatio ? "ratio" : negative || mode === "linear" ? "linear" : "log";
  return { codes, diverging, scale, lo, hi };
}

/**
 * The cells where a row turns non-finite, in the order of steps: [{row, column}].
 * @param {Pick<Encoded, "codes">} encoded
 * @param {number} rows
 * @param {number} columns
 */
export function onsets({ codes }, rows, columns) {
  /** @type {Cell[]} */
  const found = [];
  for (let row = 0; row < rows; row++) {
    for (let column = 0, i = row * columns; column < columns; column++, i++) {
      if (codes[i] === NONFINITE && (column === 0 || codes[i - 1] !== NONFINITE)) found.push({ row, column });
    }
  }
  return found.sort((a, b) => a.column - b.column || a.row - b.row);
}

/**
 * First and one-past-last cell that each of `pixels` pixels shows, for a window from…to of `cells` cells.
 * @param {number} from
 * @param {number} to
 * @param {number} cells
 * @param {number} pixels
 */
function spans(from, to, cells, pixels) {
  const first = new Int32Array(pixels);
  const end = new Int32Array(pixels);
  for (let p = 0; p < pixels; p++) {
    const a = from + ((to - from) * p) / pixels;
    const b = from + ((to - from) * (p + 1)) / pixels;
    first[p] = Math.max(0, Math.floor(a + 1e-9));
    end[p] = Math.min(cells, Math.max(Math.floor(a + 1e-9) + 1, Math.ceil(b - 1e-9)));
  }
  return { first, end };
}

/**
 * How much a code stands out; where several cells share a pixel the one that stands out most is seen.
 * @param {boolean} diverging
 */
function strengths(diverging) {
  const strength = new Int16Array(NONFINITE + 2);
  for (let code = NONE; code <= NONFINITE; code++) {
    strength[code + 1] = diverging && code >= 0 ? Math.abs(2 * code - 255) : code;
  }
  strength[NONFINITE + 1] = 1000;
  return strength;
}

/**
 * Fills `image` with all rows and the columns `from`…`to` (fractions allowed). Non-finite cells get two alternating
 * shades, a hatching that no colour of the scale can be mistaken for.
 * @param {ImageData} image
 * @param {Pick<Encoded, "codes" | "diverging">} encoded
 * @param {Picture} picture
 */
export function rasterise(image, { codes, diverging }, { rows, columns, from, to, table, none, nonfinite, nonfinite2 }) {
  const { width, height } = image;
  const pixels = new Uint32Array(image.data.buffer);
  const across = spans(from, to, columns, width);
  const down = spans(0, rows, rows, height);
  const strength = strengths(diverging);
  const line = new Int16Array(width);
  for (let y = 0; y < height; y++) {
    const same = y > 0 && down.first[y] === down.first[y - 1] && down.end[y] === down.end[y - 1];
    if (!same) {
      line.fill(NONE);
      for (let row = down.first[y]; row < down.end[y]; row++) pool(line, codes, row * columns, across, strength);
    }
    for (let x = 0, at = y * width; x < width; x++, at++) {
      const code = line[x];
      if (code === NONE) pixels[at] = none;
      else if (code === NONFINITE) pixels[at] = (x + y) % 6 < 3 ? nonfinite : nonfinite2;
      else pixels[at] = table[code];
    }
  }
}

/**
 * @param {Int16Array} line
 * @param {Int16Array} codes
 * @param {number} offset
 * @param {Spans} across
 * @param {Int16Array} strength
 */
function pool(line, codes, offset, { first, end }, strength) {
  for (let x = 0; x < line.length; x++) {
    let strongest = line[x];
    for (let column = first[x]; column < end[x]; column++) {
      const code = codes[offset + column];
      if (strength[code + 1] > strength[strongest + 1]) strongest = code;
    }
    line[x] = strongest;
  }
}
