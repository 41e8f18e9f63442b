// The ranks of one step: which of them are judged alike at every node, and where each has a node of another.

import { childrenOf, keyBytes, keyOf, KIND, nameOf, pathOf } from "./skeleton.js";

/** @import { Graph, GraphHeader, Judged, Member, RankGroup, Skeleton, StepSummary } from "../types.js" */

const MOST_LETTERS = 9;

/**
 * Whether two graphs have the same nodes, if not the same edges. Equal columns are one.
 * @param {Skeleton} one
 * @param {Skeleton} other
 */
export const isAlike = (one, other) => one.structures === other.structures && one.names === other.names;

/**
 * What a node is called in every rank: the key of its call, of a parameter with its name, of a group its path.
 * @param {Skeleton} graph
 * @param {number} node
 */
export function identityOf(graph, node) {
  const key = keyOf(graph, node);
  return key ? `${key} ${graph.kinds[node] === KIND.parameter ? nameOf(graph, node) : ""}` : pathOf(graph, node);
}

/**
 * The node of `other` that is the node of `graph`; -1: it has none.
 * @param {Skeleton} other
 * @param {Skeleton} graph
 * @param {number} node
 * @returns {number}
 */
export function nodeIn(other, graph, node) {
  if (isAlike(other, graph) || node === 0) return node;
  const key = keyBytes(graph, node);
  if (key.length && graph.kinds[node] !== KIND.parameter) return nodeOfKey(other, key);
  const parent = nodeIn(other, graph, graph.parents[node]);
  if (parent < 0) return -1;
  const [name, kind] = [nameOf(graph, node), graph.kinds[node]];
  return childrenOf(other, parent).find((child) => other.kinds[child] === kind && nameOf(other, child) === name) ?? -1;
}

/** @type {WeakMap<Uint8Array, Int32Array>} */
const tables = new WeakMap();

/**
 * The node whose call has a key; -1: none.
 * @param {Skeleton} graph
 * @param {Uint8Array} key
 */
function nodeOfKey(graph, key) {
  let table = tables.get(graph.keys);
  if (!table) tables.set(graph.keys, (table = tableOf(graph)));
  for (let at = hashOf(key) & (table.length - 1); table[at] >= 0; at = (at + 1) & (table.length - 1)) {
    const found = keyBytes(graph, table[at]);
    if (found.length === key.length && found.every((byte, place) => byte === key[place])) return table[at];
  }
  return -1;
}

/**
 * A hash table with open addressing: nodes at the hash of their keys, and -1. A string for each key would cost ten times as much.
 * @param {Skeleton} graph
 */
function tableOf(graph) {
  const table = new Int32Array(2 ** Math.ceil(Math.log2(2 * graph.count + 2))).fill(-1);
  for (let node = 0; node < graph.count; node++) {
    const key = keyBytes(graph, node);
    if (!key.length || graph.kinds[node] === KIND.parameter) continue;
    let at = hashOf(key) & (table.length - 1);
    while (table[at] >= 0) at = (at + 1) & (table.length - 1);
    table[at] = node;
  }
  return table;
}

/**
 * FNV-1a, 32 bits.
 * @param {Uint8Array} bytes
 */
function hashOf(bytes) {
  let hash = 0x811c9dc5;
  for (const byte of bytes) hash = Math.imul(hash ^ byte, 0x01000193);
  return (hash ^ (hash >>> 15)) >>> 0;
}

/**
 * The ranks of a step, those with equal verdicts together; in order of their first rank.
 * @param {GraphHeader["skeletons"]} skeletons
 * @param {Member[]} members
 * @param {number | null} step
 * @returns {RankGroup[]}
 */
export function groupsOf(skeletons, members, step) {
  /** @type {Map<string, RankGroup>} */
  const found = new Map();
  members.forEach((member, place) => {
    if (member.step !== step) return;
    const { structures } = skeletons[member.skeleton].columns;
    const key = [structures, member.verdicts.verdicts, member.verdicts.nonfinite].map(({ piece }) => piece).join(" ");
    const group = found.get(key);
    if (group) group.places.push(place);
    else found.set(key, { member, places: [place] });
  });
  return [...found.values()];
}

/**
 * The collectives of other ranks that the one at `node` met, as places in the list of ranks and nodes.
 * @param {(Judged | undefined)[]} ranks - those that are known, at their places
 * @param {Judged} graph
 * @param {number} node
 * @returns {{place: number, node: number}[]}
 */
export function peersOf(ranks, graph, node) {
  const numbers = new Set(graph.meeting_numbers.filter((_, at) => graph.meeting_nodes[at] === node));
  if (!numbers.size) return [];
  return ranks.flatMap((other, place) => {
    if (!other || other.member === graph.member || other.step !== graph.step) return [];
    const nodes = new Set(other.meeting_nodes.filter((_, at) => numbers.has(other.meeting_numbers[at])));
    return [...nodes].map((peer) => ({ place, node: peer }));
  });
}

/** @param {Member["worst_error"]} error */
const asNumber = (error) => (error === null ? NaN : error === "Inf" ? Infinity : Number(error));

/**
 * The steps that there are, with the worst verdict and the largest relative error of each; NaN: none is known.
 * @param {Member[]} members
 * @returns {StepSummary[]}
 */
export function stepsOf(members) {
  /** @type {Map<number | null, StepSummary>} */
  const found = new Map();
  members.forEach(({ step, worst_verdict: worst, worst_error }, place) => {
    const summary = found.get(step) ?? { step, place, worst: 0, error: NaN };
    if (worst > summary.worst) [summary.worst, summary.place] = [worst, place];
    const error = asNumber(worst_error);
    if (!(summary.error >= error)) summary.error = Number.isNaN(error) ? summary.error : error;
    found.set(step, summary);
  });
  return [...found.values()];
}

/**
 * The ranks of a group in words: `0–40, 42–63`.
 * @param {Member[]} members
 * @param {RankGroup} group
 */
export function ranksText(members, { places }) {
  const numbers = places.map((place) => members[place].rank);
  if (numbers.some((number) => number === null)) return places.map((place) => members[place].label).join(", ");
  const sorted = /** @type {number[]} */ (numbers).sort((a, b) => a - b);
  const runs = sorted.filter((number, at) => number !== sorted[at - 1] + 1);
  return runs.map((first) => {
    let last = first;
    while (sorted.includes(last + 1)) last++;
    return first === last ? `${first}` : `${first}–${last}`;
  }).join(", ");
}

/**
 * A group of ranks in a few words: its ranks, or how many they are.
 * @param {Member[]} members
 * @param {RankGroup} group
 */
export function groupText(members, group) {
  const ranks = ranksText(members, group);
  return group.places.length === 1 ? members[group.places[0]].label.replace(/^step\d+ /, "") : ranks.length <= MOST_LETTERS ? `ranks ${ranks}` : `${group.places.length} alike`;
}

/**
 * The worst verdict of some nodes of `graph` in each rank; 0 in one that is not known yet.
 * @param {(Judged | undefined)[]} ranks
 * @param {Graph} graph
 * @param {number[]} nodes
 */
export const cellsOf = (ranks, graph, nodes) =>
  ranks.map((other) => (other ? nodes.reduce((worst, node) => Math.max(worst, other.worst[nodeIn(other, graph, node)] ?? 0), 0) : 0));
