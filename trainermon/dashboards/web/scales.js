// Numbers: axes with round ticks, and how values, steps and times are written.

/** @import { Axis, Column, Series } from "./types.js" */

const MANTISSAS = [1, 2, 5, 10];

/**
 * Round numbers (1, 2 or 5 × 10^k apart) that cover lo…hi with about `count` of them.
 * @param {number} lo
 * @param {number} hi
 * @param {number} count
 * @param {number} [smallest]
 */
export function linearTicks(lo, hi, count, smallest = 0) {
  const span = hi - lo;
  if (!(span > 0) || !Number.isFinite(span)) return [lo];
  const power = 10 ** Math.floor(Math.log10(span / count));
  const step = Math.max(smallest, power * (MANTISSAS.find((mantissa) => (span / count) <= mantissa * power * 1.0001) ?? 10));
  const ticks = [];
  for (let k = Math.ceil(lo / step - 1e-9); k * step <= hi + step * 1e-9; k++) ticks.push(k * step);
  return ticks;
}

/**
 * Powers of ten, thinned when there are many; with 2 and 5 between when there are few.
 * @param {number} lo
 * @param {number} hi
 * @param {number} count
 */
export function logTicks(lo, hi, count) {
  const [first, last] = [Math.floor(Math.log10(lo)), Math.ceil(Math.log10(hi))];
  const decades = Math.log10(hi) - Math.log10(lo);
  if (decades < 0.7) return linearTicks(lo, hi, count).filter((tick) => tick > 0);
  const mantissas = decades < count / 1.8 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / count));
  const ticks = [];
  for (let k = first; k <= last; k++) {
    if (k % every) continue;
    for (const mantissa of mantissas) ticks.push(mantissa * 10 ** k);
  }
  return ticks.filter((tick) => tick >= lo * 0.999 && tick <= hi * 1.001);
}

/**
 * A value axis over `pixels` that grows upwards: `at(value)` is the distance from the lower end.
 * @param {number} lo
 * @param {number} hi
 * @param {number} pixels
 * @param {boolean} log
 * @returns {Axis}
 */
export function axis(lo, hi, pixels, log) {
  if (log) {
    const [a, b] = [Math.log10(lo), Math.log10(hi)];
    const scale = pixels / (b - a || 1);
    return { at: (value) => (Math.log10(value) - a) * scale, ticks: (count) => logTicks(lo, hi, count) };
  }
  const scale = pixels / (hi - lo || 1);
  return { at: (value) => (value - lo) * scale, ticks: (count) => linearTicks(lo, hi, count) };
}

/**
 * Lower and upper end of a value axis with some air, for finite values only; null when there is none.
 * @param {Column} values
 * @param {number} first
 * @param {number} last
 * @param {boolean} log
 * @returns {[number, number] | null}
 */
export function extent(values, first, last, log) {
  let [lo, hi] = [Infinity, -Infinity];
  for (let i = first; i <= last; i++) {
    const value = values[i];
    if (value === null || !Number.isFinite(value) || (log && value <= 0)) continue;
    if (value < lo) lo = value;
    if (value > hi) hi = value;
  }
  if (lo > hi) return null;
  if (log) {
    const air = Math.max((hi / lo) ** 0.06, 1.05);
    return [lo / air, hi * air];
  }
  const air = (hi - lo) * 0.08 || Math.abs(hi) * 0.1 || 1;
  return [lo - air, hi + air];
}

/**
 * The smallest range that holds both; either may be null.
 * @param {[number, number] | null} one
 * @param {[number, number] | null} other
 * @returns {[number, number] | null}
 */
export const hull = (one, other) => (one && other ? [Math.min(one[0], other[0]), Math.max(one[1], other[1])] : one ?? other);

/**
 * First index whose element is not below `wanted`, in an ascending array.
 * @param {number[]} sorted
 * @param {number} wanted
 */
export function lowerBound(sorted, wanted) {
  let [lo, hi] = [0, sorted.length];
  while (lo < hi) {
    const middle = (lo + hi) >> 1;
    if (sorted[middle] < wanted) lo = middle + 1;
    else hi = middle;
  }
  return lo;
}

/**
 * @param {number | null | undefined} value
 * @param {number} [digits]
 */
export function formatValue(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return minus(value.toExponential(Math.max(0, digits - 2)));
  if (Number.isInteger(value)) return minus(grouped(value));
  return minus(size >= 1000 ? grouped(value.toFixed(1)) : value.toPrecision(digits));
}

/**
 * Shortest texts that are still exact for round ticks, all in one notation: powers of ten if one of them needs that.
 * @param {number[]} ticks
 */
export function formatTicks(ticks) {
  const largest = Math.max(0, ...ticks.map(Math.abs));
  const smallest = Math.min(...ticks.map(Math.abs).filter((size) => size > largest * 1e-9));
  // Of evenly spaced ticks the largest decides; of a logarithmic axis the smallest may be far below it.
  const isSmall = largest < 1e-3 || (smallest < 1e-3 && largest / smallest > 50);
  const isLarge = largest >= (largest / smallest > 50 ? 1e5 : 1e6);
  const isPower = isLarge || isSmall;
  return ticks.map((tick) => minus(isPower && tick !== 0 ? Number(tick.toPrecision(3)).toExponential() : grouped(Number(tick.toPrecision(6)))));
}

/** @param {number} value */
export const formatTick = (value) => formatTicks([value])[0];

/** @param {string} text */
const minus = (text) => text.replace(/^-/, "−");

/**
 * "12,345". Not toLocaleString: its first call loads the locale's tables, up to 80 ms of a page that is ready in 300.
 * @param {number | string} decimal
 */
const grouped = (decimal) => String(decimal).replace(/^-?\d+/, (integer) => integer.replace(/\B(?=(\d{3})+$)/g, ","));

/** @param {number | null | undefined} step */
export const formatStep = (step) => (step === null || step === undefined ? "–" : grouped(step));

/**
 * A value of a step, for which an infinity says only that something was not finite.
 * @param {number | null} value
 */
export const formatMeasured = (value) => (value === null || Number.isFinite(value) ? formatValue(value) : "not finite");

/**
 * [0, 1, 2, 5] is written 0–2, 5; of more than `most` such parts the first ones, and how many numbers are left out.
 * @param {number[]} numbers
 * @param {number} [most]
 */
export function formatSpans(numbers, most = Infinity) {
  /** @type {[number, number][]} */
  const runs = [];
  for (const value of [...new Set(numbers)].sort((a, b) => a - b)) {
    const last = runs[runs.length - 1];
    if (last && value === last[1] + 1) last[1] = value;
    else runs.push([value, value]);
  }
  const left = runs.slice(most).reduce((sum, [from, to]) => sum + to - from + 1, 0);
  const text = runs.slice(0, most).map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
  return left ? `${text} and ${formatStep(left)} more` : text;
}

/**
 * What the statistics of a series are called.
 * @type {Record<string, string>}
 */
export const STATISTICS = {
  rms: "RMS", absmax: "largest magnitude", norm: "norm", std: "standard deviation", mean: "mean", min: "minimum", max: "maximum", sum: "sum",
  sum_sq: "sum of squares", zero_ratio: "share of zeros", zeros: "zeros", nonfinite: "not finite", nans: "NaNs", infs: "Infs", finite: "finite", count: "elements",
};

/**
 * Whether the values of a series are seconds.
 * @param {Pick<Series, "name" | "slot">} series
 */
export const isTime = ({ name = "", slot = "" }) => name.endsWith("_seconds") || slot.endsWith("_seconds");

/**
 * A value of an alert with what it is of. A number of the step, such as the loss, has no other statistic than itself.
 * @param {number | null} value
 * @param {string | null} statistic
 * @param {Series} series
 */
export function formatStatistic(value, statistic, series) {
  if (statistic !== "nonfinite" && isTime(series)) return formatSeconds(value);
  const isNumber = series.kind === "step" || series.kind === "loss";
  if (!statistic || isNumber && statistic !== "nonfinite" || value === null || Number.isNaN(value)) return formatValue(value);
  return `${formatValue(value)} ${STATISTICS[statistic] ?? statistic}`;
}

/**
 * 2026-11-25 22:45, local time. Not toLocaleString, whose tables take longer to load than a page.
 * @param {number} seconds since 1970
 */
export function formatTime(seconds) {
  const date = new Date(seconds * 1000);
  const two = (/** @type {number} */ value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}`;
}

/** @param {number | null | undefined} seconds */
export function formatSeconds(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds < 0.001) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 1) return `${Number((seconds * 1e3).toPrecision(3))} ms`;
  if (seconds < 120) return `${seconds.toPrecision(3)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.floor(minutes / 1440)} d`;
}

const PREFIXES = ["", "k", "M", "G", "T", "P"];

/**
 * 30 123 456 → "30.1 M".
 * @param {number} count
 */
export function formatCount(count) {
  const power = Math.min(PREFIXES.length - 1, Math.max(0, Math.floor(Math.log10(Math.max(1, count)) / 3)));
  const scaled = count / 1000 ** power;
  return `${power ? scaled.toPrecision(3) : String(count)} ${PREFIXES[power]}`.trim();
}

/**
 * 680 → "680 B", 37 800 → "37.8 kB".
 * @param {number} count
 */
export const formatBytes = (count) => formatCount(count).replace(/^([\d.]+) ?(\D?)$/, "$1 $2B");
