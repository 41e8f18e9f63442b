// The ranks of one step: which of them are judged alike at every node, and where each has a node of another.

import { KIND, nameOf, pathOf } from "./skeleton.js";

/** @import { Graph, RankGroup, StepSummary } from "./types.js" */

/**
 * Whether two graphs have the same nodes, if not the same edges. Equal columns stand at one place in the data, so this
 * compares numbers.
 * @param {Graph} one
 * @param {Graph} other
 */
export const isAlike = (one, other) =>
  one.structures.byteOffset === other.structures.byteOffset && one.names.byteOffset === other.names.byteOffset;

/** @type {WeakMap<Int32Array, Map<string, number>>} */
const known = new WeakMap();

/**
 * What a node is called in every rank: the key of its call, of a parameter with its name, of a group its path.
 * @param {Graph} graph
 * @param {number} node
 */
export function identityOf(graph, node) {
  const key = graph.keys[node];
  return key ? `${key} ${graph.kinds[node] === KIND.parameter ? nameOf(graph, node) : ""}` : pathOf(graph, node);
}

/**
 * The node of `other` that is the node of `graph`; -1: it has none.
 * @param {Graph} other
 * @param {Graph} graph
 * @param {number} node
 */
export function nodeIn(other, graph, node) {
  if (isAlike(other, graph)) return node;
  let places = known.get(other.sizes);
  if (!places) {
    places = new Map(Array.from({ length: other.count }, (_, at) => [identityOf(other, at), at]));
    known.set(other.sizes, places);
  }
  return places.get(identityOf(graph, node)) ?? -1;
}

/**
 * The ranks of the step of `graph`, those with equal verdicts together; in order of their first rank.
 * @param {Graph[]} graphs
 * @param {Graph} graph
 * @returns {RankGroup[]}
 */
export function groupsOf(graphs, graph) {
  /** @type {Map<string, RankGroup>} */
  const found = new Map();
  graphs.forEach((one, place) => {
    if (one.step !== graph.step) return;
    const key = [one.structures, one.verdicts, one.nonfinite].map((column) => column.byteOffset).join(" ");
    const group = found.get(key);
    if (group) group.places.push(place);
    else found.set(key, { graph: one, places: [place] });
  });
  return [...found.values()];
}

/**
 * The collectives of other ranks that the one at `node` met, as places in the list of graphs and nodes.
 * @param {Graph[]} graphs
 * @param {Graph} graph
 * @param {number} node
 * @returns {{place: number, node: number}[]}
 */
export function peersOf(graphs, graph, node) {
  const numbers = new Set(Array.from(graph.meeting_numbers).filter((_, at) => graph.meeting_nodes[at] === node));
  if (!numbers.size) return [];
  return graphs.flatMap((other, place) => {
    if (other === graph || other.step !== graph.step) return [];
    const nodes = new Set(Array.from(other.meeting_nodes).filter((_, at) => numbers.has(other.meeting_numbers[at])));
    return [...nodes].map((peer) => ({ place, node: peer }));
  });
}

/** @type {WeakMap<Float32Array, number>} */
const worstErrors = new WeakMap();

/**
 * The steps that there are, with the worst verdict and the largest relative error of each; NaN: none is known.
 * @param {Graph[]} graphs
 * @returns {StepSummary[]}
 */
export function stepsOf(graphs) {
  /** @type {Map<number | null, StepSummary>} */
  const found = new Map();
  graphs.forEach((graph, place) => {
    const summary = found.get(graph.step) ?? { step: graph.step, place, worst: 0, error: NaN };
    if (graph.worst[0] > summary.worst) [summary.worst, summary.place] = [graph.worst[0], place];
    let error = worstErrors.get(graph.errors);
    if (error === undefined) worstErrors.set(graph.errors, (error = graph.errors.reduce((most, one) => (one > most || Number.isNaN(most) ? one : most), NaN)));
    if (!(summary.error >= error)) summary.error = Number.isNaN(error) ? summary.error : error;
    found.set(graph.step, summary);
  });
  return [...found.values()];
}

/**
 * The ranks of a group in words: `0–40, 42–63`.
 * @param {Graph[]} graphs
 * @param {RankGroup} group
 */
export function ranksText(graphs, { places }) {
  const numbers = places.map((place) => graphs[place].rank);
  if (numbers.some((number) => number === null)) return places.map((place) => graphs[place].label).join(", ");
  const sorted = /** @type {number[]} */ (numbers).sort((a, b) => a - b);
  const runs = sorted.filter((number, at) => number !== sorted[at - 1] + 1);
  return runs.map((first) => {
    let last = first;
    while (sorted.includes(last + 1)) last++;
    return first === last ? `${first}` : `${first}–${last}`;
  }).join(", ");
}

/**
 * The worst verdict of some nodes of `graph` in each group.
 * @param {RankGroup[]} groups
 * @param {Graph} graph
 * @param {number[]} nodes
 */
export const cellsOf = (groups, graph, nodes) =>
  groups.map(({ graph: other }) => nodes.reduce((worst, node) => Math.max(worst, other.worst[nodeIn(other, graph, node)] ?? 0), 0));
