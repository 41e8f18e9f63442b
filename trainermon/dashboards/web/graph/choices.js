// The entries of the menus: what can be saved, and what can be done with the selected node.

import { byId } from "../dom.js";
import { matchSelected } from "./byhand.js";
import { keyOf } from "./data/skeleton.js";
import { openMenu } from "./menu.js";
import { follow } from "./moves.js";
import { collectConfig, diffCommand, saveJson, saveNotes, savePng, saveSvg } from "./saving.js";

/** @import { GraphView } from "./graphview.js" */
/** @typedef {{x: number, y: number}} Point */

/**
 * What can be saved.
 * @param {GraphView} view
 */
export const openSaving = (view) => openMenu(corner(), savingChoices(view));

/**
 * What can be done with the selected node.
 * @param {GraphView} view
 * @param {Point} [point]
 */
export const openNodeMenu = (view, point) => openMenu(point ?? corner(), nodeChoices(view));

/** @returns {Point} */
function corner() {
  const { left, top } = byId("graph").getBoundingClientRect();
  return { x: left + 16, y: top + 16 };
}

/** @param {GraphView} view */
function savingChoices({ panes: { main: pane }, palette, graph, selected }) {
  const area = pane.boxes[0];
  return [
    { text: "Save the boxes as SVG", run: () => saveSvg(pane.shapes(), area, palette) },
    { text: "Save the boxes as PNG", run: () => savePng(pane.shapes(), area, palette) },
    { text: "Save the selection as JSON", run: () => saveJson(graph, selected) },
    { text: "Save notes and matches, to lie beside the dump", run: () => saveNotes(graph) },
  ];
}

/** @param {GraphView} view */
function nodeChoices(view) {
  const { graph, selected } = view;
  const command = diffCommand(graph, selected);
  const copy = (/** @type {string} */ text) => view.copy(text);
  return [
    ...(graph.sizes[selected] > 1 ? [{ text: "Unfold, fold", run: () => view.panes.toggle(selected) }] : []),
    { text: "To what gives it a value", run: () => follow(view, "producers") },
    { text: "To what takes its value", run: () => follow(view, "consumers") },
    ...(view.panes.folds.others.size ? [{ text: "Match the selected by hand", run: () => matchSelected(view) }] : []),
    { text: "Copy the address of this view", run: () => view.copyAddress() },
    ...(keyOf(graph, selected) ? [
      { text: "Copy the call’s key", run: () => copy(keyOf(graph, selected)) },
      { text: "Copy a configuration that collects its tensors", run: () => copy(collectConfig(graph, selected)) },
    ] : []),
    ...(command ? [{ text: "Copy the command that compares its tensors", run: () => copy(command) }] : []),
  ];
}
