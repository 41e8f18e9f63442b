// All ranks over the step: a line for those that are judged alike, execution order from left to right, the worst verdict
// of each pixel.

import { VERDICT } from "../data/skeleton.js";
import { AXIS, drawAxis } from "./axis.js";

/** @import { Judged, Member, Range } from "../types.js" */
/** @typedef {{member: Member, judged: Judged | undefined, places: number[], label: string}} Line - `member` is the first of its ranks */

const ROW = 20;
const LEAST_ROW = 3;
const LABEL = 13;
const MOST = 160;
const TOP = AXIS + 5;
const BOTTOM = 7;
const GUTTER = 108;
const DIGIT_ZERO = 48;

/** @type {WeakMap<Line["member"] | Judged, {pixels: number, range: Range, worst: Uint8Array}>} */
const known = new WeakMap();

/**
 * The worst verdict of the nodes that each pixel stands for; of a rank that is not read yet, of the stretches that its header tells.
 * @param {Line} line
 * @param {number} pixels
 * @param {Range} range - the part of the step that is shown
 */
export function worstPerPixel({ member, judged }, pixels, range) {
  const owner = judged ?? member;
  let found = known.get(owner);
  if (found?.pixels !== pixels || found.range !== range) {
    const [count, verdictAt] = judged
      ? [judged.count, (/** @type {number} */ at) => judged.verdicts[at]]
      : [member.strip.length, (/** @type {number} */ at) => member.strip.charCodeAt(at) - DIGIT_ZERO];
    known.set(owner, (found = { pixels, range, worst: worstOf(count, verdictAt, pixels, range) }));
  }
  return found.worst;
}

/**
 * @param {number} count
 * @param {(at: number) => number} verdictAt
 * @param {number} pixels
 * @param {Range} range
 */
function worstOf(count, verdictAt, pixels, range) {
  const worst = new Uint8Array(pixels);
  for (let pixel = 0; pixel < pixels; pixel++) {
    const [begin, end] = cellsAt(count, pixel, pixels, range);
    for (let at = begin; at < end; at++) worst[pixel] = Math.max(worst[pixel], verdictAt(at));
  }
  return worst;
}

/**
 * Which of `count` equal cells a pixel stands for: at least one.
 * @param {number} count
 * @param {number} pixel
 * @param {number} pixels
 * @param {Range} range
 */
function cellsAt(count, pixel, pixels, [from, to]) {
  const placeOf = (/** @type {number} */ at) => Math.floor(count * (from + ((to - from) * at) / pixels));
  const begin = Math.min(placeOf(pixel), count - 1);
  return [begin, Math.max(begin + 1, Math.min(count, placeOf(pixel + 1)))];
}

/**
 * The first node with the worst verdict of those that a pixel stands for.
 * @param {Judged} graph
 * @param {{pixel: number, pixels: number, range: Range}} place
 */
export function worstNodeAt({ count, verdicts }, { pixel, pixels, range }) {
  const [begin, end] = cellsAt(count, pixel, pixels, range);
  let found = begin;
  for (let node = begin; node < end; node++) if (verdicts[node] > verdicts[found]) found = node;
  return found;
}

/**
 * How high the map is, and each of its lines.
 * @param {number} lines
 */
export function mapHeights(lines) {
  const row = Math.max(LEAST_ROW, Math.min(ROW, Math.floor(MOST / lines)));
  return { row, height: row * lines + TOP + BOTTOM };
}

/**
 * The line and the pixel at a point of the map.
 * @param {number} lines
 * @param {{x: number, y: number, width: number}} point
 */
export function pixelAt(lines, { x, y, width }) {
  const { row } = mapHeights(lines);
  const left = gutterOf(lines);
  const pixels = Math.max(1, width - left);
  return {
    line: Math.max(0, Math.min(lines - 1, Math.floor((y - TOP) / row))),
    pixel: Math.max(0, Math.min(pixels - 1, Math.floor(x - left))), pixels,
  };
}

/** @param {number} lines */
const gutterOf = (lines) => (lines > 1 ? GUTTER : 0);

/**
 * @typedef {{
 *   width: number, height: number, shown: number, selected: number, range: Range, palette: Record<string, string>,
 *   peers: {place: number, node: number}[], hits: {place: number, node: number}[], dragged: [number, number] | null,
 * }} MapFrame - `dragged` are two pixels
 */

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Line[]} lines
 * @param {MapFrame} frame
 */
export function drawMap(context, lines, frame) {
  const { width, height, shown, range, palette } = frame;
  const { row } = mapHeights(lines.length);
  const left = gutterOf(lines.length);
  const tones = [palette.grid, palette["good-soft"], palette.info, palette.warning, palette.critical, palette.fatal];
  lines.forEach((line, at) => drawLine(context, worstPerPixel(line, width - left, range), { left, y: TOP + at * row, row, tones }));
  if (left) drawLabels(context, lines, frame, row);
  const { judged } = lines.find(({ places }) => places.includes(shown)) ?? lines[0];
  context.save();
  context.beginPath();
  context.rect(left, 0, width - left, height);
  context.clip();
  if (judged) drawAxis(context, judged, { left, width, range, palette });
  drawMarks(context, lines, frame, { left, row });
  context.restore();
}

/**
 * What lies over the lines: hits of a search, the ranks that a collective met, the selection, and what is being dragged over.
 * @param {CanvasRenderingContext2D} context
 * @param {Line[]} lines
 * @param {MapFrame} frame
 * @param {{left: number, row: number}} place
 */
function drawMarks(context, lines, { width, height, shown, selected, range: [from, to], peers, hits, dragged, palette }, { left, row }) {
  const lineOf = new Map(lines.flatMap(({ places }, line) => places.map((place) => [place, line])));
  const own = lineOf.get(shown) ?? 0;
  const graph = lines[own].judged;
  const scale = (width - left) / (to - from);
  const xOf = (/** @type {number} */ share) => left + (share - from) * scale;
  const pointOf = (/** @type {{place: number, node: number}} */ { place, node }) => {
    const line = lineOf.get(place) ?? own;
    return { x: xOf((node + 0.5) / (lines[line].judged?.count ?? 1)), y: TOP + (line + 0.5) * row };
  };
  context.fillStyle = palette.accent;
  for (const { x, y } of hits.map(pointOf)) context.fillRect(x - 0.75, y - row / 2, 1.5, Math.max(3, row / 3));
  if (graph) {
    context.strokeStyle = palette.accent;
    context.lineWidth = 1.5;
    const start = pointOf({ place: shown, node: selected });
    for (const end of peers.map(pointOf)) {
      context.beginPath();
      context.moveTo(start.x, start.y);
      context.lineTo(end.x, end.y);
      context.arc(end.x, end.y, 2.5, 0, 7);
      context.stroke();
    }
    context.strokeStyle = palette.ink;
    context.strokeRect(start.x - 2, TOP + own * row - 4, Math.max(4, (graph.sizes[selected] * scale) / graph.count), row + 8);
  }
  if (!dragged) return;
  context.globalAlpha = 0.25;
  context.fillRect(left + Math.min(...dragged), 0, Math.abs(dragged[1] - dragged[0]), height);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Uint8Array} worst
 * @param {{left: number, y: number, row: number, tones: string[]}} line
 */
function drawLine(context, worst, { left, y, row, tones }) {
  const gap = row > 8 ? 1 : 0;
  for (let x = 0, end = 0; x < worst.length; x = end) {
    for (end = x + 1; end < worst.length && worst[end] === worst[x]; ) end++;
    context.fillStyle = tones[worst[x]];
    const isOrigin = worst[x] === VERDICT.blamed;
    context.fillRect(left + x, isOrigin ? y - 3 : y, isOrigin ? Math.max(2, end - x) : end - x, isOrigin ? row + 6 : row - gap);
  }
}

/**
 * The names of lines, as many as there is room for: that of the shown rank first, then those at which something began.
 * @param {CanvasRenderingContext2D} context
 * @param {Line[]} lines
 * @param {MapFrame} frame
 * @param {number} row
 */
function drawLabels(context, lines, { shown, palette }, row) {
  context.font = `11.5px ${palette.font}`;
  context.textBaseline = "middle";
  const urgency = lines.map(({ places, member }) => (places.includes(shown) ? 10 : 0) + member.worst_verdict);
  /** @type {number[]} */
  const used = [];
  for (const at of [...lines.keys()].sort((a, b) => urgency[b] - urgency[a] || a - b)) {
    const y = TOP + (at + 0.5) * row;
    if (used.some((other) => Math.abs(other - y) < LABEL)) continue;
    used.push(y);
    context.fillStyle = lines[at].places.includes(shown) ? palette.ink : palette.muted;
    context.fillText(lines[at].label, 14, y, GUTTER - 20);
  }
}
