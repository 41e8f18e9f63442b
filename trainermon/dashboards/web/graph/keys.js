// What each key does; the same table is shown as help.

import { el } from "../dom.js";
import { matchSelected, undoLastMatch } from "./byhand.js";
import { openNodeMenu, openSaving } from "./choices.js";
import { keyOf, worstWithin } from "./data/skeleton.js";
import { beside, inMicroStep } from "./data/walking.js";
import { follow, goToIfAny, showDirection, toParent, toStep, zoomMap } from "./moves.js";

/** @import { GraphView } from "./graphview.js" */

/** @typedef {{keys: string[], text: string, run: (key: string) => void}} KeyAction */

const PAN = 60;

/**
 * @param {GraphView} view
 * @returns {KeyAction[]}
 */
export function actionsOf(view) {
  const { panes } = view;
  return [
    { keys: ["n"], text: "next finding, or hit of the search", run: () => view.finder.step(1) },
    { keys: ["p"], text: "previous finding, or hit", run: () => view.finder.step(-1) },
    { keys: ["o"], text: "to the origin: the first finding", run: () => view.finder.toFirst() },
    { keys: ["ArrowDown"], text: "next beside it", run: () => goToIfAny(view, beside(view.graph, view.selected, 1)) },
    { keys: ["ArrowUp"], text: "previous beside it", run: () => goToIfAny(view, beside(view.graph, view.selected, -1)) },
    { keys: ["ArrowLeft"], text: "what it is in", run: () => view.graph.parents[view.selected] >= 0 && view.goTo(view.graph.parents[view.selected]) },
    { keys: ["ArrowRight"], text: "the first within it", run: () => view.graph.sizes[view.selected] > 1 && view.goTo(view.selected + 1) },
    { keys: ["Alt+ArrowUp"], text: "one level up", run: () => toParent(view) },
    { keys: ["Enter"], text: "unfold, fold", run: () => panes.toggle(view.selected) },
    { keys: ["Shift+Enter"], text: "to the worst within", run: () => view.goTo(worstWithin(view.graph, view.selected)) },
    { keys: ["i"], text: "to what gives it a value", run: () => follow(view, "producers") },
    { keys: ["u"], text: "to what takes its value", run: () => follow(view, "consumers") },
    { keys: ["["], text: "the micro step before", run: () => goToIfAny(view, inMicroStep(view.graph, view.selected, -1)) },
    { keys: ["]"], text: "the next micro step", run: () => goToIfAny(view, inMicroStep(view.graph, view.selected, 1)) },
    { keys: ["{"], text: "the step before", run: () => toStep(view, -1) },
    { keys: ["}"], text: "the next step", run: () => toStep(view, 1) },
    { keys: [","], text: "the rank before", run: () => view.showRank(view.shown - 1) },
    { keys: ["."], text: "the next rank", run: () => view.showRank(view.shown + 1) },
    { keys: ["f"], text: "forward alone; again: both", run: () => showDirection(view, 1) },
    { keys: ["b"], text: "backward alone; again: both", run: () => showDirection(view, 2) },
    { keys: digits(view.modes.length), text: `colour by ${view.modes.join(", ")}`, run: (key) => view.colourBy(view.modes[Number(key) - 1]) },
    { keys: ["\\"], text: "both sides in one pane, or in two", run: () => view.split() },
    { keys: ["/"], text: "search", run: () => view.finder.input.focus() },
    { keys: ["0"], text: "show all", run: () => panes.fitAll() },
    { keys: ["z"], text: "fit the selection", run: () => panes.fit(view.selected) },
    { keys: ["Z"], text: "the map: the selection, or the whole step", run: () => zoomMap(view) },
    { keys: ["+", "="], text: "closer", run: () => panes.zoom(1.25) },
    { keys: ["-"], text: "further away", run: () => panes.zoom(0.8) },
    { keys: ["w"], text: "move up", run: () => panes.pan(0, -PAN) },
    { keys: ["s"], text: "move down", run: () => panes.pan(0, PAN) },
    { keys: ["a"], text: "move left", run: () => panes.pan(-PAN, 0) },
    { keys: ["d"], text: "move right", run: () => panes.pan(PAN, 0) },
    { keys: ["x", "Shift+F10", "ContextMenu"], text: "what can be done with it", run: () => openNodeMenu(view) },
    { keys: ["m"], text: "match by hand: the selected node, and those selected with Shift and click", run: () => matchSelected(view) },
    { keys: ["M"], text: "undo the last match", run: () => undoLastMatch(view) },
    { keys: ["e"], text: "save: SVG, PNG, JSON, notes", run: () => openSaving(view) },
    { keys: ["c"], text: "copy the address of what is shown", run: () => view.copyAddress() },
    { keys: ["C"], text: "copy the key of the selected call", run: () => view.copy(keyOf(view.graph, view.selected)) },
    { keys: ["?"], text: "this help", run: () => view.help.showModal() },
  ];
}

/** @param {number} count */
const digits = (count) => Array.from({ length: Math.min(9, count) }, (_, at) => String(at + 1));

/**
 * @param {KeyAction[]} actions
 */
export function listenToKeys(actions) {
  const byKey = new Map(actions.flatMap((action) => action.keys.map((key) => [key, action])));
  addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (target.matches("input, select, textarea") || event.ctrlKey || event.metaKey) return;
    const shift = event.shiftKey && event.key.length > 1 ? "Shift+" : "";
    const name = `${event.altKey ? "Alt+" : ""}${shift}${event.key}`;
    if (name === "Enter" && target.matches("button, a, summary")) return;
    const action = byKey.get(name);
    if (!action) return;
    event.preventDefault();
    action.run(name);
  });
}

/**
 * @param {HTMLElement} list
 * @param {KeyAction[]} actions
 */
export function showKeys(list, actions) {
  list.replaceChildren(...actions.flatMap(({ keys, text }) => [el("dt", {}, keys.map((key) => el("kbd", {}, key))), el("dd", {}, text)]));
}
