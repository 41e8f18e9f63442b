// The address of what is shown: keeps it as the view changes, and shows what it says.

import { asFragment, readFragment } from "./address.js";
import { MODES } from "./colouring.js";
import { firstOpen, SIDES } from "./folds.js";
import { WHOLE } from "./map/mapview.js";
import { chooseTab, chosenTab } from "./panel/panel.js";

/** @import { Address } from "./address.js" */
/** @import { GraphView } from "./graphview.js" */

export class Permalink {
  /** @param {GraphView} view */
  constructor(view) {
    this.view = view;
    /** What the address says; before it says anything, there is nothing that one could go back to. */
    this.kept = "";
  }

  /** @returns {Address} */
  get address() {
    const { store, graph, selected, mode, finder, map: { range }, panes: { folds, isSplit, main: { camera } } } = this.view;
    const first = firstOpen(graph);
    return {
      of: store.members.length > 1 ? graph.label : undefined, node: selected,
      open: [...folds.open].filter((node) => !first.has(node)), shut: [...first].filter((node) => !folds.open.has(node)), apart: [...folds.apart],
      at: [camera.x, camera.y, camera.zoom], colour: mode === MODES[0] ? undefined : mode, direction: folds.direction,
      two: isSplit, search: finder.query, map: range === WHOLE ? undefined : range, tab: chosenTab(),
    };
  }

  /** Another rank or node is a new entry of the history, to which one can go back. */
  keep() {
    const { graph, selected } = this.view;
    const shown = `${graph.label} ${selected}`;
    history[this.kept && this.kept !== shown ? "pushState" : "replaceState"](null, "", `#${asFragment(this.address)}`);
    this.kept = shown;
  }

  /** Shows what the address says now, after somebody has gone back or changed it. */
  restore() {
    const { view } = this;
    const address = readFragment(location.hash);
    const member = view.store.members.find((one) => one.label === address.of) ?? view.graph.member;
    this.kept = `${member.label} ${address.node ?? 0}`;
    view.members = view.store.members.filter((one) => one.level === member.level);
    view.showRank(view.members.indexOf(member), (graph) => ((address.node ?? 0) < graph.count ? (address.node ?? 0) : 0), address);
  }

  /**
   * Shows the graph as an address says.
   * @param {Address} address
   * @param {number} node
   */
  open({ open = [], shut = [], apart = [], at, colour, direction = 0, two = false, search = "", map, tab }, node) {
    const { view } = this;
    const { graph, panes, panes: { folds } } = view;
    const known = (/** @type {number[]} */ nodes) => nodes.filter((one) => one < graph.count);
    folds.reset(graph);
    folds.reveal(graph, node);
    for (const one of known(open)) folds.open.add(one);
    for (const one of shut) folds.open.delete(one);
    if (apart.length) folds.apart = new Set(known(apart));
    folds.direction = direction;
    if (tab) chooseTab(tab);
    panes.main.side = two && graph.golden ? SIDES.target : SIDES.union;
    panes.show(graph);
    panes.arrange();
    view.map.range = map ?? WHOLE;
    view.colourBy(colour && view.modes.includes(colour) ? colour : MODES[0]);
    view.finder.ask(search);
    if (node) panes.center(node);
    else panes.fitAll();
    if (at) panes.moveTo({ x: at[0], y: at[1], zoom: at[2] });
    view.select(node);
  }
}
