// The boxes as a tree for screen readers: it has the focus, and tells what the canvas shows.

import { el } from "../dom.js";
import { ancestorsOf, classOf, VERDICT } from "./data/skeleton.js";

/** @import { Box, Graph } from "./types.js" */

const WORDS = ["", "", "has no counterpart", "warning", "error", "it began here"];
const MOST = 1500;

/**
 * Mirrors the boxes; of very many those around the selected one.
 * @param {HTMLElement} tree
 * @param {Graph} graph
 * @param {Box[]} boxes - each before what is within it
 * @param {Box} selected
 */
export function showTree(tree, graph, boxes, selected) {
  const real = boxes.filter((box) => !box.isGroup);
  const from = Math.max(0, Math.min(real.indexOf(selected) - MOST / 2, real.length - MOST));
  tree.replaceChildren(...real.slice(from, from + MOST).map((box) => itemOf(graph, box, box === selected)));
  tree.setAttribute("aria-activedescendant", `box${selected.node}`);
}

/**
 * @param {HTMLElement} tree
 * @param {Box} selected
 */
export function selectInTree(tree, selected) {
  tree.querySelector('[aria-selected="true"]')?.setAttribute("aria-selected", "false");
  tree.querySelector(`#box${selected.node}`)?.setAttribute("aria-selected", "true");
  tree.setAttribute("aria-activedescendant", `box${selected.node}`);
}

/**
 * @param {Graph} graph
 * @param {Box} box
 * @param {boolean} isSelected
 */
function itemOf(graph, { node, nodes, label, isOpen }, isSelected) {
  const worst = Math.max(...nodes.map((one) => graph.worst[one]));
  const where = worst === VERDICT.blamed && graph.verdicts[node] !== worst ? "it began within" : WORDS[worst];
  const words = [label.includes(classOf(graph, node)) ? label : `${label} ${classOf(graph, node)}`, nodes.length > 1 ? `${nodes.length} alike` : "", where];
  return el("li", {
    role: "treeitem", id: `box${node}`, "aria-level": ancestorsOf(graph, node).length + 1, "aria-selected": String(isSelected),
    "aria-expanded": graph.sizes[node] > 1 ? String(isOpen) : null,
  }, words.filter(Boolean).join(", "));
}
