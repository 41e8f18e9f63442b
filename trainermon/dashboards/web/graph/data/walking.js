// Where keys lead from a node: beside it, to another micro step, along its values.

import { ancestorsOf, childrenOf, KIND } from "./skeleton.js";

/** @import { Graph } from "../types.js" */

/**
 * What stands beside a node, `step` further; undefined: nothing.
 * @param {Graph} graph
 * @param {number} node
 * @param {number} step
 */
export function beside(graph, node, step) {
  const parent = graph.parents[node];
  if (parent < 0) return undefined;
  const siblings = childrenOf(graph, parent);
  return siblings[siblings.indexOf(node) + step];
}

/**
 * The same place in another micro step, or that micro step where it is built otherwise.
 * @param {Graph} graph
 * @param {number} node
 * @param {number} step
 */
export function inMicroStep(graph, node, step) {
  const own = [...ancestorsOf(graph, node), node].find((at) => graph.kinds[at] === KIND.microStep);
  const all = childrenOf(graph, 0);
  const next = own === undefined ? all[0] : all[all.indexOf(own) + step];
  if (next === undefined || own === undefined) return next;
  return graph.structures[own] === graph.structures[next] ? next + node - own : next;
}

/**
 * A node that gives this one a value (the last that does), or takes one of it (the first).
 * @param {Graph} graph
 * @param {number} node
 * @param {"producers" | "consumers"} which
 */
export function along(graph, node, which) {
  const end = node + graph.sizes[node];
  const near = which === "producers" ? graph.consumers : graph.producers;
  const isWithin = (/** @type {number} */ at) => at >= node && at < end;
  const found = Array.from(graph[which].filter((at, edge) => isWithin(near[edge]) && !isWithin(at)));
  return found.length ? found.reduce((a, b) => (which === "producers" ? Math.max(a, b) : Math.min(a, b))) : undefined;
}
