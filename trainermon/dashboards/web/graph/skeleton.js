// The data of graphs: columns over all nodes in the order in which they began, so that a subtree is a range.

/** @import { Column, Graph, GraphHeader } from "./types.js" */

export const KIND = { model: 0, microStep: 1, section: 2, module: 3, function: 4, collective: 5, parameter: 6, gradients: 7 };
export const VERDICT = { none: 0, pass: 1, unmatched: 2, warning: 3, error: 4, blamed: 5 };

/** @type {Record<Column["type"], (packed: ArrayBuffer, begin: number, count: number) => unknown>} */
const COLUMNS = {
  u8: (packed, begin, count) => new Uint8Array(packed, begin, count),
  i32: (packed, begin, count) => new Int32Array(packed, begin, count),
  f32: (packed, begin, count) => new Float32Array(packed, begin, count),
  json: (packed, begin, count) => JSON.parse(new TextDecoder().decode(new Uint8Array(packed, begin, count))),
};

/**
 * Unpacks the graphs of all ranks: four bytes of length, a JSON header, and the columns that it names. Ranks that are built
 * alike share the columns that say so.
 * @param {ArrayBuffer} packed
 * @returns {Graph[]}
 */
export function unpack(packed) {
  const length = new DataView(packed).getUint32(0, true);
  /** @type {GraphHeader} */
  const { skeletons, members, golden, first, served, notes, keeps_notes, code } = JSON.parse(new TextDecoder().decode(new Uint8Array(packed, 4, length)));
  const begin = 4 + length + ((8 - ((4 + length) % 8)) % 8);
  /** @param {Record<string, Column>} columns */
  const read = (columns) =>
    Object.fromEntries(Object.entries(columns).map(([name, { type, offset, count }]) => [name, COLUMNS[type](packed, begin + offset, count)]));
  const shared = skeletons.map(({ columns }) => ({ count: columns.sizes.count, ...read(columns) }));
  return members.map(({ columns, ...member }, place) => /** @type {Graph} */ ({ ...shared[member.skeleton], ...member, ...read(columns), golden, isFirst: place === first, served, notes, keeps_notes, code }));
}

/**
 * @param {Graph} graph
 * @param {number} node
 */
export function childrenOf(graph, node) {
  const found = [];
  const end = node + graph.sizes[node];
  for (let child = node + 1; child < end; child += graph.sizes[child]) found.push(child);
  return found;
}

/**
 * What a node is in, outermost first.
 * @param {Graph} graph
 * @param {number} node
 */
export function ancestorsOf(graph, node) {
  const found = [];
  for (let at = graph.parents[node]; at >= 0; at = graph.parents[at]) found.push(at);
  return found.reverse();
}

/**
 * @param {Graph} graph
 * @param {number} node
 */
export const nameOf = (graph, node) => graph.texts[graph.names[node]];

/**
 * @param {Graph} graph
 * @param {number} node
 */
export const classOf = (graph, node) => (graph.kinds[node] === KIND.module ? graph.texts[graph.classes[node]] : "");

/**
 * The way to a node from its micro step on.
 * @param {Graph} graph
 * @param {number} node
 */
export const pathOf = (graph, node) =>
  [...ancestorsOf(graph, node), node].slice(1).map((at) => nameOf(graph, at)).join(" > ");

/**
 * The worst node within a node: the first of those with its verdict.
 * @param {Graph} graph
 * @param {number} node
 */
export function worstWithin(graph, node) {
  const end = node + graph.sizes[node];
  for (let at = node; at < end; at++) if (graph.verdicts[at] === graph.worst[node]) return at;
  return node;
}
