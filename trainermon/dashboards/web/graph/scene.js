// The picture as a list of shapes in the plane's own units; canvas.js and svg.js draw the same list.

import { KIND, VERDICT } from "./data/skeleton.js";
import { TITLE } from "./layout.js";

/** @import { Box, Graph, Look, Wire } from "./types.js" */
/** @typedef {{kind: "rect", x: number, y: number, width: number, height: number, fill: string, stroke: string, thick?: number, dashed?: boolean, radius: number}} RectShape */
/** @typedef {{kind: "text", x: number, y: number, text: string, fill: string, isBold?: boolean, halo?: string, frame?: Box}} TextShape - `halo` keeps lines off it; `frame`: the open box whose title it is */
/** @typedef {{kind: "path", points: number[], stroke: string, thick: number, dashed: boolean}} PathShape */
/** @typedef {RectShape | TextShape | PathShape} Shape */

export const MARKS = ["", "", "+", "!", "×", "▲"];
const GOLDEN_ONLY = 2;
const TONES = ["edge", "edge", "info", "warning", "critical", "fatal"];

/**
 * @param {Graph} graph
 * @param {Box[]} boxes
 * @param {Wire[]} wires
 * @param {Look} look
 * @returns {Shape[]}
 */
export function shapesOf(graph, boxes, wires, look) {
  const open = boxes.filter((box) => box.isOpen);
  const closed = boxes.filter((box) => !box.isOpen);
  return [
    ...open.flatMap((box) => boxShapes(graph, box, look)),
    ...wires.flatMap((wire) => wireShapes(wire, look)),
    ...open.flatMap((box) => titleShapes(graph, box, look)),
    ...closed.flatMap((box) => boxShapes(graph, box, look)),
  ];
}

/**
 * The boxes that are drawn: of those in view at most `most`, the largest, but each at which something began.
 * @param {Graph} graph
 * @param {Box} root
 * @param {{left: number, top: number, right: number, bottom: number}} view
 * @param {number} most
 */
export function boxesInView(graph, root, { left, top, right, bottom }, most) {
  /** @type {Box[]} */
  const found = [];
  const waiting = [root];
  for (let box = waiting.pop(); box; box = waiting.pop()) {
    if (box.x > right || box.y > bottom || box.x + box.width < left || box.y + box.height < top) continue;
    found.push(box);
    waiting.push(...box.children);
  }
  found.sort((one, other) => one.node - other.node || other.height - one.height);
  if (found.length <= most) return found;
  const isFirst = (/** @type {Box} */ box) => box.nodes.some((node) => graph.worst[node] === VERDICT.blamed);
  const ranked = found.map((box) => ({ box, size: isFirst(box) ? Infinity : box.width * box.height }));
  const least = ranked.map(({ size }) => size).sort((a, b) => b - a)[most - 1];
  let room = most - ranked.filter(({ size }) => size > least).length;
  return ranked.filter(({ size }) => size === Infinity || size > least || (size === least && room-- > 0)).map(({ box }) => box);
}

/**
 * @param {Graph} graph
 * @param {Box} box
 * @param {Look} look
 * @returns {Shape[]}
 */
function boxShapes(graph, box, look) {
  const { palette } = look;
  const verdict = worstOf(graph, box);
  const isAround = box.isOpen && box.children.some((child) => worstOf(graph, child) === verdict);
  const tone = palette[isAround ? "faint" : TONES[verdict]];
  const near = look.near.get(box) ?? 0;
  const isSelected = (box.node === look.selected || look.others.has(box.node)) && !box.isGroup;
  const stroke = isSelected ? palette.ink : near ? palette[near > 0 ? "accent" : "accent-2"] : verdict > VERDICT.pass ? tone : palette.edge;
  /** @type {Shape[]} */
  const shapes = [];
  if (box.nodes.length > 1 && !box.isGroup) {
    for (const shift of [6, 3]) shapes.push(rect(box, { shift, fill: palette.panel, stroke: palette.edge, radius: 5 }));
  }
  const closedFill = look.hits.has(box.node) ? palette["info-soft"] : look.fillOf(box) || palette.panel;
  shapes.push({
    ...rect(box, { shift: 0, fill: box.isOpen ? palette[box.isGroup ? "page" : "plot"] : closedFill, stroke, radius: graph.kinds[box.node] === KIND.parameter ? 11 : 5 }),
    thick: isSelected ? 2.5 : Math.abs(near) === 1 || (verdict === VERDICT.blamed && !isAround) ? 2 : 1,
    dashed: box.isGroup || graph.sides[box.node] === GOLDEN_ONLY,
  });
  if (verdict > VERDICT.pass && !box.isOpen) {
    shapes.push({ kind: "rect", x: box.x + 1, y: box.y + 1, width: 4, height: box.height - 2, fill: tone, stroke: "", radius: 2 });
  }
  if (!box.isOpen) shapes.push(...titleShapes(graph, box, look), ...stripShapes(box, look));
  return shapes;
}

/**
 * @param {Graph} graph
 * @param {Box} box
 */
const worstOf = (graph, { nodes }) => nodes.reduce((worst, node) => Math.max(worst, graph.worst[node]), 0);

/**
 * A cell for each group of ranks on the lower edge, where any of them has something to say.
 * @param {Box} box
 * @param {Look} look
 * @returns {Shape[]}
 */
function stripShapes(box, { cellsOf, palette }) {
  const cells = cellsOf(box);
  if (cells.length < 2 || Math.max(...cells) <= VERDICT.pass) return [];
  const width = Math.min(12, (box.width - 16) / cells.length);
  return cells.map((verdict, at) => ({
    kind: "rect", x: box.x + 10 + at * width, y: box.y + box.height - 3, width: Math.max(1, width - 1), height: 6, radius: 1,
    fill: verdict > VERDICT.pass ? palette[TONES[verdict]] : palette.grid, stroke: "",
  }));
}

/**
 * @param {Box} box
 * @param {{shift: number, fill: string, stroke: string, radius: number}} look
 * @returns {RectShape}
 */
const rect = ({ x, y, width, height }, { shift, ...look }) => ({ kind: "rect", x: x + shift, y: y + shift, width, height, ...look });

/**
 * The title, and a mark where somebody has written a note.
 * @param {Graph} graph
 * @param {Box} box
 * @param {Look} look
 * @returns {Shape[]}
 */
function titleShapes(graph, box, { palette, hasNote }) {
  const verdict = worstOf(graph, box);
  const baseline = box.y + TITLE / 2 + 4.5;
  const sign = graph.sides[box.node] === GOLDEN_ONLY ? "−" : MARKS[verdict];
  const mark = !box.isOpen && graph.nonfinite[box.node] ? `${sign}◆` : sign;
  const isFaint = graph.kinds[box.node] === KIND.parameter || box.isGroup;
  const times = box.nodes.length > 1 && !box.isGroup ? `  ×${box.nodes.length}` : "";
  const fill = palette[verdict > VERDICT.warning ? TONES[verdict] : isFaint ? "muted" : "ink"];
  const halo = box.isOpen ? palette[box.isGroup ? "page" : "plot"] : undefined;
  /** @type {Shape} */
  const title = { kind: "text", x: box.x + 10, y: baseline, text: `${mark ? `${mark} ` : ""}${box.label}${times}`, fill, isBold: box.isOpen, halo, frame: box.isOpen ? box : undefined };
  if (box.isGroup || !hasNote(box.node)) return [title];
  return [title, { kind: "text", x: box.x + box.width - 8, y: box.y + 6, text: "✎", fill: palette.accent, halo: palette.plot }];
}

/**
 * @param {Wire} wire
 * @param {Look} look
 * @returns {Shape[]}
 */
function wireShapes(wire, { near, palette }) {
  const hop = near.get(wire) ?? 0;
  const stroke = hop ? palette[hop > 0 ? "accent" : "accent-2"] : palette.faint;
  const thick = (Math.abs(hop) === 1 ? 2 : hop ? 1.5 : 1) + Math.min(2, Math.log2(wire.count) / 4);
  const points = curve(wire.from, wire.to);
  /** @type {Shape[]} */
  const shapes = [{ kind: "path", points, stroke, thick, dashed: !wire.isExact }];
  if (wire.bundled) shapes.push({ kind: "text", x: points[6] + 8, y: points[7] - 4, text: `${wire.bundled} lines`, fill: palette.muted });
  return shapes;
}

/**
 * From the edge of one box to the facing edge of another; past boxes between them the curve swings out to the side.
 * @param {Box} from
 * @param {Box} to
 */
function curve(from, to) {
  if (from.y < to.y + to.height && to.y < from.y + from.height) return sideways(from, to);
  const isDown = from.y + from.height <= to.y;
  const [x0, x1] = [from.x + from.width / 2, to.x + to.width / 2];
  const y0 = isDown ? from.y + from.height : from.y;
  const y1 = isDown ? to.y : to.y + to.height;
  const reach = Math.abs(y1 - y0);
  const swing = reach > 60 && Math.abs(x1 - x0) < 40 ? Math.max(from.width, to.width) / 2 + Math.min(60, reach / 6) : 0;
  const pull = (isDown ? 1 : -1) * Math.max(10, Math.min(60, reach / 2));
  return [x0, y0, x0 + swing, y0 + pull, x1 + swing, y1 - pull, x1, y1];
}

/**
 * Between boxes that stand beside each other.
 * @param {Box} from
 * @param {Box} to
 */
function sideways(from, to) {
  const isRight = from.x + from.width <= to.x;
  const [x0, x1] = isRight ? [from.x + from.width, to.x] : [from.x, to.x + to.width];
  const [y0, y1] = [from.y + from.height / 2, to.y + to.height / 2];
  const pull = (isRight ? 1 : -1) * Math.max(10, Math.min(60, Math.abs(x1 - x0) / 2));
  return [x0, y0, x0 + pull, y0, x1 - pull, y1, x1, y1];
}
