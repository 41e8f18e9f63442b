// What is where on the map: the directions of each micro step, and where their outermost modules begin.

import { childrenOf, KIND, nameOf } from "../data/skeleton.js";

/** @import { Judged, Range, Skeleton } from "../types.js" */

export const AXIS = 15;
const LEAST_TICKS = 4;

/** @type {WeakMap<Skeleton["sizes"], {node: number, modules: number[]}[]>} */
const known = new WeakMap();

/** @param {Judged} graph */
function sectionsOf(graph) {
  let found = known.get(graph.sizes);
  if (!found) {
    const isSection = (/** @type {number} */ node) => graph.kinds[node] === KIND.section;
    const sections = childrenOf(graph, 0).flatMap((step) => (isSection(step) ? [step] : childrenOf(graph, step).filter(isSection)));
    found = sections.map((node) => ({ node, modules: childrenOf(graph, node).filter((child) => graph.kinds[child] === KIND.module) }));
    known.set(graph.sizes, found);
  }
  return found;
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Judged} graph
 * @param {{left: number, width: number, range: Range, palette: Record<string, string>}} frame
 */
export function drawAxis(context, graph, { left, width, range: [from, to], palette }) {
  const xOf = (/** @type {number} */ node) => left + ((node / graph.count - from) * (width - left)) / (to - from);
  context.font = `11px ${palette.font}`;
  context.textBaseline = "middle";
  for (const { node, modules } of sectionsOf(graph)) {
    const [begin, end] = [Math.max(left, xOf(node)), Math.min(width, xOf(node + graph.sizes[node]))];
    if (end - begin < 2) continue;
    context.fillStyle = palette.faint;
    context.fillRect(begin, AXIS, end - begin - 1, 1);
    const ticks = modules.map(xOf);
    if ((end - begin) / modules.length >= LEAST_TICKS) for (const x of ticks) context.fillRect(x, AXIS - 3, 1, 4);
    const name = nameOf(graph, node);
    context.fillStyle = palette.muted;
    if (context.measureText(name).width + 8 < end - begin) context.fillText(name, begin + 4, AXIS / 2);
  }
}
