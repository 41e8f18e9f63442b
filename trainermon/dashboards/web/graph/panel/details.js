// The tensors of nodes: those that are in the page, and those that its server knows.

import { keyOf, KIND } from "../data/skeleton.js";

/** @import { Graph, NodeDetail } from "../types.js" */

/** @type {WeakMap<Graph, Map<number, NodeDetail>>} */
const fetched = new WeakMap();

/**
 * The node whose call has the tensors of a node: of a parameter the call that holds it.
 * @param {Graph} graph
 * @param {number} node
 */
const callOf = (graph, node) => (graph.kinds[node] === KIND.parameter ? graph.parents[node] : node);

/**
 * What is known of a node now; undefined: nothing, or not yet.
 * @param {Graph} graph
 * @param {number} node
 * @returns {NodeDetail | undefined}
 */
export function detailOf(graph, node) {
  const call = callOf(graph, node);
  return graph.details[String(call)] ?? fetched.get(graph)?.get(call);
}

/**
 * Whether the server has to be asked for the details of a node.
 * @param {Graph} graph
 * @param {number} node
 */
export const canAsk = (graph, node) => graph.served && graph.kinds[node] >= KIND.module && Boolean(keyOf(graph, node)) && !detailOf(graph, node);

/**
 * Asks for the details of a node; rejects with the server's words.
 * @param {Graph} graph
 * @param {number} node
 */
export async function askFor(graph, node) {
  const call = callOf(graph, node);
  const reply = await fetch(`details/${graph.first_detail + call}`);
  const found = await reply.json().catch(() => null);
  if (!reply.ok) throw new Error(found?.detail ?? `the server answered ${reply.status}`);
  const known = fetched.get(graph) ?? new Map();
  fetched.set(graph, known.set(call, found));
}
