// Finds nodes by words: a part of the name or path, `*` patterns, and `verdict:`, `class:`, `kind:`, `line:`, `rank:` and more.

import { classOf, KIND, pathOf, VERDICT } from "./skeleton.js";

/** @import { Graph } from "../types.js" */

/**
 * Takes the ranks out of a query: `rank:3`, `rank:0-7`, `rank:1,9`, `rank:*`. Without such a word `isAsked` is null.
 * @param {string} query
 * @returns {{words: string, isAsked: ((rank: number | null) => boolean) | null}}
 */
export function ranksOf(query) {
  const all = query.trim().split(/\s+/).filter(Boolean);
  const named = all.filter((word) => word.startsWith("rank:")).flatMap((word) => word.slice("rank:".length).split(","));
  const words = all.filter((word) => !word.startsWith("rank:")).join(" ");
  const ends = named.map((part) => (part === "*" ? [0, Infinity] : part.split("-").map(Number)));
  const isAsked = (/** @type {number | null} */ rank) => rank !== null && ends.some(([from, to = from]) => rank >= from && rank <= to);
  return { words, isAsked: named.length ? isAsked : null };
}

/**
 * The nodes that all words of `query` hold for, in the order in which they began; at most `most`.
 * @param {Graph} graph
 * @param {string} query
 * @param {number} [most]
 */
export function findNodes(graph, query, most = 10_000) {
  const tests = query.trim().split(/\s+/).filter(Boolean).map((word) => testFor(graph, word.toLowerCase()));
  /** @type {number[]} */
  const found = [];
  if (!tests.length) return found;
  for (let node = 1; node < graph.count && found.length < most; node++) {
    if (graph.kinds[node] >= KIND.module && tests.every((test) => test(node))) found.push(node);
  }
  return found;
}

/**
 * @param {Graph} graph
 * @param {string} word
 * @returns {(node: number) => boolean}
 */
function testFor(graph, word) {
  const [name, value] = word.includes(":") ? [word.slice(0, word.indexOf(":")), word.slice(word.indexOf(":") + 1)] : ["", word];
  if (name === "verdict") return (node) => graph.verdicts[node] === VERDICT[/** @type {keyof typeof VERDICT} */ (value)];
  if (name === "kind") return (node) => graph.kinds[node] === KIND[/** @type {keyof typeof KIND} */ (value)];
  const size = /^norm([<>])(.+)$/.exec(word);
  if (size) return (node) => (size[1] === ">" ? graph.norms[node] > Number(size[2]) : graph.norms[node] < Number(size[2]));
  const matches = matcher(value);
  if (name === "dtype") return (node) => matches(graph.dtype_names[graph.dtypes[node] - 1] ?? "");
  if (name === "class") return (node) => matches(classOf(graph, node).toLowerCase());
  if (name === "line") {
    const hit = graph.line_texts.map((text) => text.toLowerCase().endsWith(value) && !/[\w-]/.test(text.at(-value.length - 1) ?? ""));
    return (node) => hit[graph.lines[node]] ?? false;
  }
  const known = graph.texts.map((text) => matches(text.toLowerCase()));
  return (node) => known[graph.names[node]] || (value.includes(" > ") && matches(pathOf(graph, node).toLowerCase()));
}

/** @param {string} word */
function matcher(word) {
  if (!word.includes("*")) return (/** @type {string} */ text) => text.includes(word);
  const pattern = new RegExp(`^${word.split("*").map((part) => part.replace(/[.+?^${}()|[\]\\]/g, "\\$&")).join(".*")}$`);
  return (/** @type {string} */ text) => pattern.test(text);
}
