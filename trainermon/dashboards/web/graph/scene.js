// The picture as a list of shapes in the plane's own units; canvas.js and svg.js draw the same list.

import { KIND, VERDICT } from "./skeleton.js";
import { TITLE } from "./layout.js";

/** @import { Box, Graph, Wire } from "./types.js" */
/** @typedef {{kind: "rect", x: number, y: number, width: number, height: number, fill: string, stroke: string, thick?: number, dashed?: boolean, radius: number}} RectShape */
/** @typedef {{kind: "text", x: number, y: number, text: string, fill: string, isBold?: boolean}} TextShape */
/** @typedef {{kind: "path", points: number[], stroke: string, thick: number, dashed: boolean}} PathShape */
/** @typedef {RectShape | TextShape | PathShape} Shape */

export const MARKS = ["", "", "+", "!", "×", "▲"];
const GOLDEN_ONLY = 2;
const TONES = ["edge", "edge", "info", "warning", "critical", "fatal"];

/**
 * @param {Graph} graph
 * @param {Box[]} boxes
 * @param {Wire[]} wires
 * @param {{selected: number, palette: Record<string, string>, hits: Set<number>}} look
 * @returns {Shape[]}
 */
export function shapesOf(graph, boxes, wires, { selected, palette, hits }) {
  const open = boxes.filter((box) => box.isOpen);
  const closed = boxes.filter((box) => !box.isOpen);
  return [
    ...open.flatMap((box) => boxShapes(graph, box, { selected, palette, hits })),
    ...wires.flatMap((wire) => wireShapes(wire, selected, palette)),
    ...closed.flatMap((box) => boxShapes(graph, box, { selected, palette, hits })),
  ];
}

/**
 * @param {Graph} graph
 * @param {Box} box
 * @param {{selected: number, palette: Record<string, string>, hits: Set<number>}} look
 * @returns {Shape[]}
 */
function boxShapes(graph, box, { selected, palette, hits }) {
  const verdict = Math.max(...box.nodes.map((node) => graph.worst[node]));
  const isSelected = box.node === selected && !box.isGroup;
  const tone = palette[TONES[verdict]];
  const isRound = graph.kinds[box.node] === KIND.parameter;
  /** @type {Shape[]} */
  const shapes = [];
  if (box.nodes.length > 1 && !box.isGroup) {
    for (const shift of [6, 3]) shapes.push(rect(box, { shift, fill: palette.panel, stroke: palette.edge, radius: 5 }));
  }
  const fill = box.isOpen ? palette[box.isGroup ? "page" : "plot"] : palette[hits.has(box.node) ? "info-soft" : "panel"];
  shapes.push({
    ...rect(box, { shift: 0, fill, stroke: isSelected ? palette.accent : verdict > VERDICT.pass ? tone : palette.edge, radius: isRound ? 11 : 5 }),
    thick: isSelected ? 2.5 : verdict === VERDICT.blamed ? 2 : 1,
    dashed: box.isGroup || graph.sides[box.node] === GOLDEN_ONLY,
  });
  if (verdict > VERDICT.pass && !box.isOpen) {
    shapes.push({ kind: "rect", x: box.x + 1, y: box.y + 1, width: 4, height: box.height - 2, fill: tone, stroke: "", radius: 2 });
  }
  shapes.push(...titleShapes(graph, box, verdict, palette));
  return shapes;
}

/**
 * @param {Box} box
 * @param {{shift: number, fill: string, stroke: string, radius: number}} look
 * @returns {RectShape}
 */
const rect = ({ x, y, width, height }, { shift, ...look }) => ({ kind: "rect", x: x + shift, y: y + shift, width, height, ...look });

/**
 * @param {Graph} graph
 * @param {Box} box
 * @param {number} verdict
 * @param {Record<string, string>} palette
 * @returns {Shape[]}
 */
function titleShapes(graph, box, verdict, palette) {
  const baseline = box.y + TITLE / 2 + 4.5;
  const mark = graph.sides[box.node] === GOLDEN_ONLY ? "−" : MARKS[verdict];
  const isFaint = graph.kinds[box.node] === KIND.parameter || box.isGroup;
  const times = box.nodes.length > 1 && !box.isGroup ? `  ×${box.nodes.length}` : "";
  const fill = palette[verdict > VERDICT.warning ? TONES[verdict] : isFaint ? "muted" : "ink"];
  return [
    { kind: "text", x: box.x + 10, y: baseline, text: `${mark ? `${mark} ` : ""}${box.label}${times}`, fill, isBold: box.isOpen },
  ];
}

/**
 * @param {Wire} wire
 * @param {number} selected
 * @param {Record<string, string>} palette
 * @returns {Shape[]}
 */
function wireShapes({ from, to, count, isExact }, selected, palette) {
  const isOut = from.node === selected;
  const isIn = to.node === selected;
  const stroke = isIn ? palette.accent : isOut ? palette["accent-2"] : palette.faint;
  const thick = (isIn || isOut ? 2 : 1) + Math.min(2, Math.log2(count) / 4);
  return [{ kind: "path", points: curve(from, to), stroke, thick, dashed: !isExact }];
}

/**
 * From the edge of one box to the facing edge of another; past boxes between them the curve swings out to the side.
 * @param {Box} from
 * @param {Box} to
 */
function curve(from, to) {
  const isDown = from.y + from.height <= to.y;
  const [x0, x1] = [from.x + from.width / 2, to.x + to.width / 2];
  const y0 = isDown ? from.y + from.height : from.y;
  const y1 = isDown ? to.y : to.y + to.height;
  const reach = Math.abs(y1 - y0);
  const swing = reach > 60 && Math.abs(x1 - x0) < 40 ? Math.max(from.width, to.width) / 2 + Math.min(60, reach / 6) : 0;
  const pull = (isDown ? 1 : -1) * Math.max(10, Math.min(60, reach / 2));
  return [x0, y0, x0 + swing, y0 + pull, x1 + swing, y1 - pull, x1, y1];
}
