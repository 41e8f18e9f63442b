// What is unfolded, set apart, selected and left out: shared by the panes that show it.

import { ancestorsOf, childrenOf, KIND } from "./data/skeleton.js";

/** @import { Graph } from "./types.js" */

/** Which calls a pane has: of both sides, or of one. */
export const SIDES = { union: 0, target: 1, golden: 2 };

export class Folds {
  selected = 0;
  /** Which direction alone is shown; 0: both. */
  direction = 0;
  /** @type {Set<number>} */
  open = new Set();
  /** Those that stand apart from neighbours that are alike. @type {Set<number>} */
  apart = new Set();
  /** What is selected beside the selected one. @type {Set<number>} */
  others = new Set();

  /**
   * Folds all but the micro steps and the directions in them.
   * @param {Graph} graph
   */
  reset(graph) {
    this.open = firstOpen(graph);
    this.apart.clear();
    this.others.clear();
  }

  /**
   * Unfolds all that a node is in, and sets it apart from those that are like it.
   * @param {Graph} graph
   * @param {number} node
   */
  reveal(graph, node) {
    for (const at of ancestorsOf(graph, node)) {
      if (this.isLeftOut(graph, at)) this.direction = 0;
      this.open.add(at);
      this.apart.add(at);
    }
    this.apart.add(node);
  }

  /** @param {number} node */
  toggle(node) {
    if (!this.open.delete(node)) this.open.add(node);
  }

  /**
   * Whether a node is of the direction that is left out.
   * @param {Graph} graph
   * @param {number} node
   */
  isLeftOut(graph, node) {
    return Boolean(this.direction) && graph.kinds[node] === KIND.section && graph.directions[node] !== this.direction;
  }
}

/**
 * What is unfolded before anybody has touched it.
 * @param {Graph} graph
 */
export function firstOpen(graph) {
  const open = new Set([0]);
  for (const step of childrenOf(graph, 0)) {
    if (graph.kinds[step] === KIND.microStep || graph.kinds[step] === KIND.section) open.add(step);
    if (graph.kinds[step] === KIND.microStep) childrenOf(graph, step).forEach((child) => graph.kinds[child] === KIND.section && open.add(child));
  }
  return open;
}
