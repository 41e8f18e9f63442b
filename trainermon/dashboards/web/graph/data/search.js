// Finds nodes by words: a part of the name or path, `*` patterns, and `verdict:`, `class:`, `kind:`, `line:`.

import { classOf, KIND, pathOf, VERDICT } from "./skeleton.js";

/** @import { Graph } from "../types.js" */

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
