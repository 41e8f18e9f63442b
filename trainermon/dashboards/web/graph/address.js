// The address of a view: all that one sees, so that a link shows another person the same.

/** @import { Range } from "./types.js" */

/**
 * @typedef {object} Address
 * @property {string} [of] - step and rank
 * @property {number} [node]
 * @property {number[]} [open] - unfolded beyond what is at first
 * @property {number[]} [shut] - folded of that
 * @property {number[]} [apart]
 * @property {number[]} [at] - what of the plane is in the middle, and the zoom
 * @property {string} [colour]
 * @property {number} [direction]
 * @property {boolean} [two] - both sides beside each other
 * @property {string} [search]
 * @property {Range} [map] - the part of the step
 * @property {string} [tab] - of the panel
 */

const SEPARATOR = ".";
const SPACE = "_";

/**
 * @param {Address} address
 * @returns {string} what stands behind `#`
 */
export function asFragment({ of, node, open = [], shut = [], apart = [], at, colour, direction, two, search, map, tab }) {
  const words = {
    of, node: String(node ?? 0), open: asText(open), shut: asText(shut), apart: asText(apart), at: at?.join(SPACE),
    colour, side: direction ? String(direction) : "", two: two ? "1" : "", search, map: map?.join(SPACE), tab,
  };
  const said = Object.entries(words).filter(([, word]) => word);
  return new URLSearchParams(/** @type {string[][]} */ (said)).toString();
}

/**
 * @param {string} fragment - with or without `#`
 * @returns {Address}
 */
export function readFragment(fragment) {
  const words = new URLSearchParams(fragment.replace(/^#/, ""));
  const textOf = (/** @type {string} */ name) => words.get(name) ?? undefined;
  const numbers = (/** @type {string} */ name, /** @type {number} */ count) => {
    const found = (words.get(name) ?? "").split(SPACE).map(Number);
    return found.length === count && found.every(Number.isFinite) ? found : undefined;
  };
  const [from, to] = numbers("map", 2) ?? [];
  return {
    of: textOf("of"), node: words.has("node") ? Number(words.get("node")) || 0 : undefined, open: asNumbers(words.get("open")), shut: asNumbers(words.get("shut")), apart: asNumbers(words.get("apart")),
    at: numbers("at", 3), colour: textOf("colour"), direction: Number(words.get("side")) || 0, two: words.has("two"), search: textOf("search"),
    map: from >= 0 && from < to && to <= 1 ? [from, to] : undefined, tab: textOf("tab"),
  };
}

/**
 * Numbers in order, each by how far it is behind the one before, in base 36.
 * @param {number[]} numbers
 */
const asText = (numbers) => [...numbers].sort((a, b) => a - b).map((number, at, all) => (number - (at ? all[at - 1] : 0)).toString(36)).join(SEPARATOR);

/** @param {string | null} text */
function asNumbers(text) {
  let sum = 0;
  return (text ?? "").split(SEPARATOR).map((one) => (sum += parseInt(one, 36))).filter((number) => number >= 0);
}
