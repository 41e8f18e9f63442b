// The nodes of graphs stand in the order in which they began, so that a subtree is a range.

/** @import { Judged, Skeleton } from "../types.js" */

export const KIND = { model: 0, microStep: 1, section: 2, module: 3, function: 4, collective: 5, parameter: 6, gradients: 7 };
export const VERDICT = { none: 0, pass: 1, unmatched: 2, warning: 3, error: 4, blamed: 5 };

/**
 * @param {Skeleton} graph
 * @param {number} node
 */
export function childrenOf(graph, node) {
  const found = [];
  const end = node + graph.sizes[node];
  for (let child = node + 1; child < end; child += graph.sizes[child]) found.push(child);
  return found;
}

const decoder = new TextDecoder();

/**
 * The key of a node's call; "" for a group.
 * @param {Skeleton} graph
 * @param {number} node
 */
export const keyOf = (graph, node) => decoder.decode(keyBytes(graph, node));

/**
 * @param {Skeleton} graph
 * @param {number} node
 */
export const keyBytes = ({ keys, key_ends: ends }, node) => keys.subarray(node ? ends[node - 1] : 0, ends[node]);

/**
 * What a node is in, outermost first.
 * @param {Skeleton} graph
 * @param {number} node
 */
export function ancestorsOf(graph, node) {
  const found = [];
  for (let at = graph.parents[node]; at >= 0; at = graph.parents[at]) found.push(at);
  return found.reverse();
}

/**
 * @param {Skeleton} graph
 * @param {number} node
 */
export const nameOf = (graph, node) => graph.texts[graph.names[node]];

/**
 * @param {Skeleton} graph
 * @param {number} node
 */
export const classOf = (graph, node) => (graph.kinds[node] === KIND.module ? graph.texts[graph.classes[node]] : "");

/**
 * The way to a node from its micro step on.
 * @param {Skeleton} graph
 * @param {number} node
 */
export const pathOf = (graph, node) =>
  [...ancestorsOf(graph, node), node].slice(1).map((at) => nameOf(graph, at)).join(" > ");

/**
 * The worst node within a node: the first of those with its verdict.
 * @param {Judged} graph
 * @param {number} node
 */
export function worstWithin(graph, node) {
  const end = node + graph.sizes[node];
  for (let at = node; at < end; at++) if (graph.verdicts[at] === graph.worst[node]) return at;
  return node;
}
