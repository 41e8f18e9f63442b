// Where boxes stand. Execution order is a topological order, so layers need one pass and no cycle breaking, and what
// is unfolded moves nothing above it.

import { foldChildren, spanned } from "./data/folding.js";
import { classOf, KIND, nameOf } from "./data/skeleton.js";

/** @import { Box, Fold, Graph, Opened } from "./types.js" */

export const TITLE = 24;
const PAD = 10;
const GAP_X = 14;
const GAP_Y = 16;
const MIN_WIDTH = 56;
const MAX_LABEL = 46;

/**
 * The boxes of the whole model, placed from (0, 0) on.
 * @param {Graph} graph
 * @param {Opened} opened - which nodes are unfolded, and which stand apart from those that are alike
 * @param {(text: string) => number} measure - width of a text in pixels
 * @returns {Box}
 */
export function layOut(graph, opened, measure) {
  const root = boxOf(graph, { members: [[0]] }, 0, opened, measure);
  place(root, 0, 0);
  return root;
}

/**
 * @param {Graph} graph
 * @param {Fold} fold
 * @param {number} at - which node of a repetition
 * @param {Opened} opened
 * @param {(text: string) => number} measure
 * @returns {Box}
 */
function boxOf(graph, fold, at, opened, measure) {
  const nodes = fold.members.map((member) => member[at]);
  const node = nodes[0];
  const box = emptyBox(node, nodes, labelOf(graph, nodes));
  const isOpen = graph.sizes[node] > 1 && opened.isOpen(node);
  const times = nodes.length > 1 ? measure(`×${nodes.length}`) + 10 : 0;
  const sign = graph.nonfinite[node] ? measure("◆") + 4 : 0;
  box.width = Math.max(MIN_WIDTH, measure(box.label) + 26 + times + sign);
  box.height = TITLE;
  if (isOpen) fill(graph, box, opened, measure);
  return box;
}

/**
 * @param {number} node
 * @param {number[]} nodes
 * @param {string} label
 * @returns {Box}
 */
const emptyBox = (node, nodes, label) => ({ node, nodes, label, x: 0, y: 0, width: 0, height: 0, children: [], isOpen: false, isGroup: false });

/**
 * @param {Graph} graph
 * @param {number[]} nodes
 */
function labelOf(graph, nodes) {
  const name = spanned(nameOf(graph, nodes[0]), nameOf(graph, nodes[nodes.length - 1]));
  const label = [name, classOf(graph, nodes[0])].filter(Boolean).join("  ");
  return label.length > MAX_LABEL ? `${label.slice(0, MAX_LABEL - 1)}…` : label;
}

/**
 * @param {Graph} graph
 * @param {Box} box
 * @param {Opened} opened
 * @param {(text: string) => number} measure
 */
function fill(graph, box, opened, measure) {
  box.isOpen = true;
  for (const fold of foldChildren(graph, box.node, opened.isApart, opened.isHidden)) {
    const boxes = fold.members[0].map((_, at) => boxOf(graph, fold, at, opened, measure));
    if (boxes.length === 1) box.children.push(boxes[0]);
    else box.children.push(groupOf(graph, fold, boxes, measure));
  }
  const kind = graph.kinds[box.node];
  if (kind === KIND.microStep && box.children.length > 1) besides(box);
  else stack(box, layersOf(graph, box), graph.directions[box.node] === 2);
}

/**
 * @param {Graph} graph
 * @param {Fold} fold
 * @param {Box[]} boxes
 * @param {(text: string) => number} measure
 */
function groupOf(graph, fold, boxes, measure) {
  const label = `${fold.members.length} times`;
  const group = { ...emptyBox(fold.members[0][0], fold.members.flat(), label), children: boxes, isOpen: true, isGroup: true };
  group.width = measure(label) + 26;
  stack(group, layersOf(graph, group), false);
  return group;
}

/**
 * The layer of each child: one below the last of those that it takes a value from; without any, below its elder.
 * Parameters share the first layer.
 * @param {Graph} graph
 * @param {Box} box
 */
function layersOf(graph, box) {
  const starts = box.children.map((child) => child.node);
  const layers = new Int32Array(starts.length);
  const inputs = siblingEdges(graph, box, starts);
  let deepest = -1;
  box.children.forEach((child, at) => {
    if (graph.kinds[child.node] === KIND.parameter) return void (deepest = Math.max(deepest, 0));
    const from = inputs[at].filter((other) => other < at);
    layers[at] = from.length ? Math.max(...from.map((other) => layers[other])) + 1 : deepest + 1;
    deepest = Math.max(deepest, layers[at]);
  });
  return layers;
}

/**
 * For each child, which other children it takes values from.
 * @param {Graph} graph
 * @param {Box} box
 * @param {number[]} starts
 */
function siblingEdges(graph, box, starts) {
  /** @type {number[][]} */
  const inputs = starts.map(() => []);
  if (starts.length < 2) return inputs;
  const begin = box.isGroup ? starts[0] : box.node;
  const end = box.isGroup ? starts[starts.length - 1] + graph.sizes[starts[starts.length - 1]] : box.node + graph.sizes[box.node];
  for (let edge = firstEdge(graph, begin); edge < graph.consumers.length && graph.consumers[edge] < end; edge++) {
    const producer = graph.producers[edge];
    if (producer < begin) continue;
    const [from, to] = [indexOf(graph, starts, producer), indexOf(graph, starts, graph.consumers[edge])];
    if (from >= 0 && to >= 0 && from !== to && !inputs[to].includes(from)) inputs[to].push(from);
  }
  return inputs;
}

/**
 * @param {Graph} graph
 * @param {number} node
 */
function firstEdge(graph, node) {
  let [low, high] = [0, graph.consumers.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (graph.consumers[middle] < node) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * Which of the nodes that begin at `starts` a node is in; -1: in one that is folded away.
 * @param {Graph} graph
 * @param {number[]} starts
 * @param {number} node
 */
function indexOf(graph, starts, node) {
  let [low, high] = [0, starts.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (starts[middle] <= node) low = middle + 1;
    else high = middle;
  }
  return low > 0 && node < starts[low - 1] + graph.sizes[starts[low - 1]] ? low - 1 : -1;
}

/**
 * Children side by side: what runs backward stands beside what runs forward.
 * @param {Box} box
 */
function besides(box) {
  let [x, height] = [PAD, 0];
  for (const child of box.children) {
    [child.x, child.y] = [x, TITLE + PAD];
    x += child.width + 2 * GAP_X;
    height = Math.max(height, child.height);
  }
  for (const child of box.children) child.y += child.children.length && child !== box.children[0] ? height - child.height : 0;
  box.width = Math.max(box.width, x - 2 * GAP_X + PAD);
  box.height = TITLE + 2 * PAD + height;
}

/**
 * Children in rows, one per layer, centred; `isUpward` puts the first at the bottom.
 * @param {Box} box
 * @param {Int32Array} layers
 * @param {boolean} isUpward
 */
function stack(box, layers, isUpward) {
  /** @type {Box[][]} */
  const rows = [];
  box.children.forEach((child, at) => (rows[layers[at]] ??= []).push(child));
  const filled = rows.filter(Boolean);
  const widths = filled.map((row) => row.reduce((sum, child) => sum + child.width + GAP_X, -GAP_X));
  const inner = Math.max(box.width - 2 * PAD, ...widths);
  let y = TITLE + PAD;
  const order = filled.map((row, at) => ({ row, width: widths[at] }));
  for (const { row, width } of isUpward ? order.reverse() : order) {
    let x = PAD + (inner - width) / 2;
    const height = Math.max(...row.map((child) => child.height));
    for (const child of row) {
      [child.x, child.y] = [x, y];
      x += child.width + GAP_X;
    }
    y += height + GAP_Y;
  }
  box.width = inner + 2 * PAD;
  box.height = y - GAP_Y + PAD;
}

/**
 * @param {Box} box
 * @param {number} x
 * @param {number} y
 */
function place(box, x, y) {
  box.x += x;
  box.y += y;
  for (const child of box.children) place(child, box.x, box.y);
}
