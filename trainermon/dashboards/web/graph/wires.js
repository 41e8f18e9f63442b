// Which boxes are joined: the edges of the graph, lifted to the innermost boxes that are shown.

import { KIND } from "./data/skeleton.js";

/** @import { Box, Graph, Wire } from "./types.js" */

const MOST_INTO = 12;

/**
 * All boxes that are shown closed, in the order of their nodes.
 * @param {Box} box
 * @returns {Box[]}
 */
export function closedBoxes(box) {
  return box.isOpen ? box.children.flatMap(closedBoxes) : [box];
}

/**
 * All boxes, each before what is within it.
 * @param {Box} box
 * @returns {Box[]}
 */
export function allBoxes(box) {
  return [box, ...box.children.flatMap(allBoxes)];
}

/**
 * For each node the index in `boxes` of the one that it is in, or stands for; -1 for what is open itself.
 * @param {Graph} graph
 * @param {Box[]} boxes
 */
export function shownIn(graph, boxes) {
  const shown = new Int32Array(graph.count).fill(-1);
  boxes.forEach((box, at) => {
    for (const node of box.nodes) shown.fill(at, node, node + graph.sizes[node]);
  });
  return shown;
}

/**
 * One wire for all values that go from one box to another. Of boxes that stand for several, only neighbours' values count.
 * @param {Graph} graph
 * @param {Box[]} boxes
 * @param {Int32Array} shown
 * @returns {Wire[]}
 */
export function wiresBetween(graph, boxes, shown) {
  /** @type {Map<number, Wire>} */
  const found = new Map();
  for (let edge = 0; edge < graph.consumers.length; edge++) {
    const [from, to] = [shown[graph.producers[edge]], shown[graph.consumers[edge]]];
    if (from < 0 || to < 0 || from === to) continue;
    const key = from * boxes.length + to;
    const wire = found.get(key);
    if (wire) [wire.count, wire.isExact] = [wire.count + 1, wire.isExact && graph.exact[edge] === 1];
    else found.set(key, { from: boxes[from], to: boxes[to], count: 1, isExact: graph.exact[edge] === 1 });
  }
  return [...found.values()].filter(({ from, to }) => !isFar(graph, from, to));
}

/**
 * What is drawn of some wires: of more than `MOST_INTO` into one box a single one from the last of those it comes from, but all
 * that are near the selection.
 * @param {Wire[]} wires
 * @param {Map<Box | Wire, number>} near
 * @returns {Wire[]}
 */
export function bundled(wires, near) {
  /** @type {Map<Box, Wire[]>} */
  const into = new Map();
  for (const wire of wires) {
    const others = into.get(wire.to);
    if (others) others.push(wire);
    else into.set(wire.to, [wire]);
  }
  return [...into.values()].flatMap((some) => {
    const far = some.filter((wire) => !near.has(wire));
    if (far.length <= MOST_INTO) return some;
    const last = far.reduce((found, wire) => (wire.from.node > found.from.node ? wire : found));
    const count = far.reduce((sum, wire) => sum + wire.count, 0);
    return [...some.filter((wire) => near.has(wire)), { ...last, count, isExact: far.every((wire) => wire.isExact), bundled: far.length }];
  });
}

/**
 * A weight that a later micro step uses again says nothing there; it would only cross the picture.
 * @param {Graph} graph
 * @param {Box} from
 * @param {Box} to
 */
const isFar = (graph, from, to) => graph.kinds[from.node] === KIND.parameter && graph.parents[from.node] !== graph.parents[to.node];

/**
 * What gives values to a node and takes its values, by one and by two steps: 1 and 2 before, -1 and -2 behind it.
 * @param {Graph} graph
 * @param {Wire[]} wires
 * @param {number} node
 * @returns {Map<Box | Wire, number>}
 */
export function nearTo(graph, wires, node) {
  /** @type {Map<Box | Wire, number>} */
  const found = new Map();
  const isWithin = (/** @type {Box} */ box) => box.node >= node && box.node < node + graph.sizes[node];
  let before = new Set(wires.map((wire) => wire.to).filter(isWithin));
  let behind = new Set(wires.map((wire) => wire.from).filter(isWithin));
  for (const hop of [1, 2]) {
    const giving = wires.filter(({ from, to }) => before.has(to) && !isWithin(from));
    const taking = wires.filter(({ from, to }) => behind.has(from) && !isWithin(to));
    for (const [some, sign] of /** @type {const} */ ([[giving, 1], [taking, -1]])) {
      for (const wire of some) {
        for (const one of [wire, sign > 0 ? wire.from : wire.to]) if (!found.has(one)) found.set(one, sign * hop);
      }
    }
    before = new Set(giving.map((wire) => wire.from));
    behind = new Set(taking.map((wire) => wire.to));
  }
  return found;
}
