// Which neighbours are alike and are shown as one box; the same rule as analysis/graph/folding.py.

import { childrenOf } from "./skeleton.js";

/** @import { Fold, Graph } from "../types.js" */

const MAX_PERIOD = 32;

/**
 * The children of a node, neighbours that repeat together and have equal verdicts. Those that `isApart` says stand alone.
 * @param {Graph} graph
 * @param {number} node
 * @param {(child: number) => boolean} isApart
 * @param {(child: number) => boolean} [isHidden] - which are left out
 * @returns {Fold[]}
 */
export function foldChildren(graph, node, isApart, isHidden = () => false) {
  const children = childrenOf(graph, node).filter((child) => !isHidden(child));
  const shapes = children.map((child) => (isApart(child) ? `${child} apart` : `${graph.structures[child]} ${graph.worst[child]}`));
  const folds = [];
  for (let at = 0; at < children.length; ) {
    const [period, count] = repetition(shapes, at);
    const members = Array.from({ length: count }, (_, k) => children.slice(at + k * period, at + (k + 1) * period));
    folds.push({ members });
    at += period * count;
  }
  return folds;
}

/**
 * The period and the number of repetitions that cover most from `at` on.
 * @param {string[]} shapes
 * @param {number} at
 */
function repetition(shapes, at) {
  let best = [1, 1];
  for (let period = 1; period <= MAX_PERIOD; period++) {
    let end = at + period;
    while (end < shapes.length && shapes[end] === shapes[end - period]) end++;
    const count = Math.floor((end - at) / period);
    if (count > 1 && count * period > best[0] * best[1]) best = [period, count];
  }
  return best;
}

/**
 * The name of several: `layers.0` and `layers.11` are `layers.0–11`.
 * @param {string} first
 * @param {string} last
 */
export function spanned(first, last) {
  const ends = last.match(/\d+/g) ?? [];
  let at = 0;
  return first.replace(/\d+/g, (start) => {
    const end = ends[at++] ?? start;
    return start === end ? start : `${start}–${end}`;
  });
}
