// All ranks over the whole step: a line for each, execution order from left to right, the worst verdict of each pixel.

import { VERDICT } from "./skeleton.js";

/** @import { Graph } from "./types.js" */

const ROW = 20;
const LEAST_ROW = 3;
const MOST = 160;
export const GUTTER = 108;

/** @type {WeakMap<Graph, ReturnType<typeof worstOf>>} */
const known = new WeakMap();

/**
 * The worst verdict of the nodes that each pixel stands for, and the first node that has it; computed once per width.
 * @param {Graph} graph
 * @param {number} pixels
 */
export function worstPerPixel(graph, pixels) {
  let found = known.get(graph);
  if (found?.worst.length !== pixels) known.set(graph, (found = worstOf(graph, pixels)));
  return found;
}

/**
 * @param {Graph} graph
 * @param {number} pixels
 */
function worstOf(graph, pixels) {
  const worst = new Uint8Array(pixels);
  const first = new Int32Array(pixels);
  for (let pixel = 0; pixel < pixels; pixel++) {
    const begin = Math.floor((pixel * graph.count) / pixels);
    const end = Math.max(begin + 1, Math.floor(((pixel + 1) * graph.count) / pixels));
    first[pixel] = begin;
    for (let node = begin; node < end; node++) {
      if (graph.verdicts[node] > worst[pixel]) [worst[pixel], first[pixel]] = [graph.verdicts[node], node];
    }
  }
  return { worst, first };
}

/**
 * How high the map is, and each of its lines.
 * @param {number} lines
 */
export function mapHeights(lines) {
  const row = Math.max(LEAST_ROW, Math.min(ROW, Math.floor(MOST / lines)));
  return { row, height: row * lines + 14 };
}

/**
 * The graph and the node at a point of the map.
 * @param {Graph[]} graphs
 * @param {{x: number, y: number, width: number}} point
 */
export function placeAt(graphs, { x, y, width }) {
  const { row } = mapHeights(graphs.length);
  const line = Math.max(0, Math.min(graphs.length - 1, Math.floor((y - 7) / row)));
  const left = gutterOf(graphs);
  const pixel = Math.max(0, Math.min(width - left - 1, Math.floor(x - left)));
  return { line, node: worstPerPixel(graphs[line], width - left).first[pixel] };
}

/** @param {Graph[]} graphs */
export const gutterOf = (graphs) => (graphs.length > 1 ? GUTTER : 0);

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Graph[]} graphs
 * @param {{width: number, height: number, shown: number, selected: number, peers: {place: number, node: number}[], palette: Record<string, string>}} frame
 */
export function drawMap(context, graphs, { width, height, shown, selected, peers, palette }) {
  const { row } = mapHeights(graphs.length);
  const left = gutterOf(graphs);
  const tones = [palette.grid, palette["good-soft"], palette.info, palette.warning, palette.critical, palette.fatal];
  graphs.forEach((graph, line) => {
    const y = 7 + line * row;
    drawLine(context, graph, { left, y, width: width - left, row, tones });
    if (left && row >= 12) drawLabel(context, graph.label, y + row / 2, line === shown ? palette.ink : palette.muted, palette.font);
  });
  const pointOf = (/** @type {{place: number, node: number}} */ { place, node }) => ({
    x: left + ((node + 0.5) * (width - left)) / graphs[place].count, y: 7 + (place + 0.5) * row,
  });
  const from = pointOf({ place: shown, node: selected });
  context.strokeStyle = palette.accent;
  context.lineWidth = 1.5;
  for (const to of peers.map(pointOf)) {
    context.beginPath();
    context.moveTo(from.x, from.y);
    context.lineTo(to.x, to.y);
    context.arc(to.x, to.y, 2.5, 0, 7);
    context.stroke();
  }
  drawFrame(context, graphs[shown], { left, y: 7 + shown * row, width: width - left, row, height, selected, ink: palette.ink });
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Graph} graph
 * @param {{left: number, y: number, width: number, row: number, tones: string[]}} line
 */
function drawLine(context, graph, { left, y, width, row, tones }) {
  const { worst } = worstPerPixel(graph, width);
  const gap = row > 8 ? 1 : 0;
  for (let x = 0, end = 0; x < width; x = end) {
    for (end = x + 1; end < width && worst[end] === worst[x]; ) end++;
    context.fillStyle = tones[worst[x]];
    const isOrigin = worst[x] === VERDICT.blamed;
    context.fillRect(left + x, isOrigin ? y - 3 : y, isOrigin ? Math.max(2, end - x) : end - x, isOrigin ? row + 6 : row - gap);
  }
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {string} label
 * @param {number} y
 * @param {string} fill
 * @param {string} font
 */
function drawLabel(context, label, y, fill, font) {
  context.fillStyle = fill;
  context.font = `11.5px ${font}`;
  context.textBaseline = "middle";
  context.fillText(label, 14, y, GUTTER - 20);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Graph} graph
 * @param {{left: number, y: number, width: number, row: number, height: number, selected: number, ink: string}} frame
 */
function drawFrame(context, graph, { left, y, width, row, selected, ink }) {
  context.strokeStyle = ink;
  context.lineWidth = 1.5;
  const at = left + ((selected + 0.5) * width) / graph.count;
  context.strokeRect(at - 2, y - 4, Math.max(4, (graph.sizes[selected] * width) / graph.count), row + 8);
}
