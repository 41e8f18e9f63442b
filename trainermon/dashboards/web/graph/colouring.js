// What the fill of a box says: nothing beside its verdict, or a measure of what it gives, on a scale that is stated.

import { el } from "../dom.js";

/** @import { Box, Colouring, Graph } from "./types.js" */

export const MODES = ["verdict", "relative error", "norm", "growth output/input", "type", "bytes", "overflow"];
const VERDICTS = [
  { text: "", tone: "" },
  { text: "", tone: "" },
  { text: "+ − on one side only", tone: "info" },
  { text: "! differs or is not finite, because of what came before", tone: "warning" },
  { text: "× is wrong", tone: "critical" },
  { text: "▲ began here", tone: "fatal" },
];
const OVERFLOW = [
  { text: "medium: is given values that are not finite, and gives none", tone: "info" },
  { text: "high: is given such values and gives them, or grows a hundredfold", tone: "warning" },
  { text: "critical: gives them, and was given none", tone: "critical" },
];
const TONES = ["page", "panel", "plot", "ink", "muted", "faint", "grid", "edge", "accent", "accent-2", "good", "good-soft", "info", "info-soft", "warning", "critical", "fatal"];
const SMALLEST_ERROR = 1e-8;
const MOST_GROWTH = 16;
const STRENGTH = 0.5;
const STEPS = 5;

/**
 * @param {Graph} graph
 * @param {string} mode - one of MODES, or the name of an overlay
 * @param {Record<string, string>} palette
 * @returns {Colouring}
 */
export function colouringOf(graph, mode, palette) {
  const tint = (/** @type {string} */ tone, /** @type {number} */ share) => mixed(palette.panel, palette[tone], STRENGTH * share);
  if (mode === "type") return byType(graph, palette, tint);
  if (mode === "overflow") return byOverflow(graph, tint);
  if (mode === "growth output/input") {
    return scaled(graph.growths, (a, b) => (Math.abs(Math.log(a)) > Math.abs(Math.log(b)) ? a : b), [1 / MOST_GROWTH, MOST_GROWTH],
      (share) => tint(share < 0.5 ? "info" : "warning", Math.abs(2 * share - 1)), "norm of output over norm of input");
  }
  const columns = { "relative error": graph.errors, norm: graph.norms, bytes: graph.num_bytes };
  const column = overlayOf(graph, mode) ?? columns[/** @type {keyof typeof columns} */ (mode)];
  if (!column) return byVerdict(graph, palette);
  const ends = mode === "relative error" ? [SMALLEST_ERROR, 1] : endsOf(column);
  return scaled(column, Math.max, ends, (share) => tint("accent", share), mode === "bytes" ? "bytes of the output" : mode);
}

/**
 * No fill: what marks, edges and bars say, of the verdicts that there are.
 * @param {Graph} graph
 * @param {Record<string, string>} palette
 * @returns {Colouring}
 */
function byVerdict(graph, palette) {
  const known = new Set(graph.verdicts);
  const legend = VERDICTS.flatMap(({ text, tone }, at) => (text && known.has(at) ? [{ text, colour: palette[tone] }] : [])).reverse();
  return { fillOf: () => "", legend, text: "" };
}

/**
 * The numbers of an overlay by node, NaN where it has none.
 * @param {Graph} graph
 * @param {string} name
 */
function overlayOf({ overlays, overlay_values: values }, name) {
  const [place, size] = [overlays.indexOf(name), values.length / overlays.length];
  return place < 0 ? undefined : values.subarray(place * size, (place + 1) * size);
}

/**
 * A logarithmic scale; what lies beyond its ends has the colour of the end.
 * @param {Float32Array} column
 * @param {(a: number, b: number) => number} worse
 * @param {number[]} ends
 * @param {(share: number) => string} colour
 * @param {string} what
 * @returns {Colouring}
 */
function scaled(column, worse, [low, high], colour, what) {
  const shareOf = (/** @type {number} */ value) => Math.min(1, Math.max(0, Math.log(value / low) / Math.log(high / low)));
  const legend = Array.from({ length: STEPS }, (_, at) => {
    const value = low * (high / low) ** (at / (STEPS - 1));
    return { text: Number(value.toPrecision(2)).toString(), colour: colour(at / (STEPS - 1)) };
  });
  const fillOf = (/** @type {Box} */ box, /** @type {Int32Array} */ sizes) => {
    const value = worstIn(column, box, sizes, worse);
    return value > 0 ? colour(shareOf(value)) : "";
  };
  return { fillOf, legend, text: `${what}, logarithmic; the largest within a box` };
}

/**
 * @param {Float32Array} column
 * @param {Box} box
 * @param {Int32Array} sizes
 * @param {(a: number, b: number) => number} worse
 */
function worstIn(column, { nodes }, sizes, worse) {
  let found = NaN;
  for (const node of nodes) {
    for (let at = node; at < node + sizes[node]; at++) {
      if (column[at] > 0) found = found > 0 ? worse(found, column[at]) : column[at];
    }
  }
  return found;
}

/** @param {Float32Array} column */
function endsOf(column) {
  let [low, high] = [Infinity, 0];
  for (const value of column) {
    if (value > 0 && value < low) low = value;
    if (value > high && value < Infinity) high = value;
  }
  return low < high ? [low, high] : [Math.min(low, 1), Math.min(low, 1) * 10];
}

/**
 * @param {Graph} graph
 * @param {Record<string, string>} palette
 * @param {(tone: string, share: number) => string} tint
 * @returns {Colouring}
 */
function byType({ dtypes, dtype_names: names }, palette, tint) {
  const tones = ["accent", "warning", "accent-2", "good", "critical", "info", "fatal"];
  const colours = names.map((_, at) => (at < tones.length ? tint(tones[at], 1) : palette.grid));
  return {
    fillOf: (box) => colours[dtypes[box.node] - 1] ?? "",
    legend: names.map((text, at) => ({ text: text || "unknown", colour: colours[at] })).slice(0, tones.length),
    text: "type of the largest output",
  };
}

/**
 * The worst level within a box.
 * @param {Graph} graph
 * @param {(tone: string, share: number) => string} tint
 * @returns {Colouring}
 */
function byOverflow({ overflow }, tint) {
  const colours = ["", ...OVERFLOW.map(({ tone }) => tint(tone, 1))];
  return {
    fillOf: ({ nodes }, sizes) => colours[nodes.reduce((worst, node) => Math.max(worst, mostWithin(overflow, node, sizes[node])), 0)],
    legend: OVERFLOW.map(({ text }, at) => ({ text, colour: colours[at + 1] })), text: "the worst level within a box",
  };
}

/**
 * @param {Uint8Array} column
 * @param {number} node
 * @param {number} size
 */
const mostWithin = (column, node, size) => column.subarray(node, node + size).reduce((most, level) => Math.max(most, level), 0);

/**
 * @param {string} from - six digits
 * @param {string} to
 * @param {number} share
 */
function mixed(from, to, share) {
  const parts = (/** @type {string} */ text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  const ends = parts(to);
  return `#${parts(from).map((one, at) => Math.round(one + (ends[at] - one) * share).toString(16).padStart(2, "0")).join("")}`;
}

/**
 * @param {HTMLElement} element
 * @param {{colour: string, text: string}[]} legend
 * @param {string} text
 */
export function showLegend(element, legend, text) {
  const swatches = legend.map((one) => {
    const swatch = el("i", { cls: "swatch" });
    swatch.style.background = one.colour;
    return el("span", {}, swatch, one.text);
  });
  element.replaceChildren(...swatches, el("span", { cls: "dim" }, text));
  element.hidden = !text && !legend.length;
}

/**
 * The colours of the theme as it is now, by name, and its font.
 * @returns {Record<string, string>}
 */
export function paletteNow() {
  const style = getComputedStyle(document.documentElement);
  const colours = Object.fromEntries(TONES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  return { ...colours, font: style.getPropertyValue("--font").trim() };
}
