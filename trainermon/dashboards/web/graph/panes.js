// One pane with the calls of both sides, or two beside each other: same folds, same selection, moved together.

import { byId } from "../dom.js";
import { isAlike } from "./data/ranks.js";
import { Folds, SIDES } from "./folds.js";
import { GraphPane } from "./pane.js";

/** @import { Box, Camera, Graph } from "./types.js" */

export class GraphPanes {
  /**
   * @param {Graph} graph
   * @param {() => Record<string, string>} palette
   */
  constructor(graph, palette) {
    this.graph = graph;
    this.folds = new Folds();
    this.folds.reset(graph);
    const paneOf = (/** @type {string} */ id) => new GraphPane(/** @type {HTMLCanvasElement} */ (byId(id)), graph, this.folds, palette);
    this.main = paneOf("graph");
    this.golden = paneOf("golden");
    this.golden.side = SIDES.golden;
    /** @type {(node: number, pane: GraphPane) => void} */
    this.onselect = () => {};
    this.onfold = () => {};
    for (const pane of [this.main, this.golden]) {
      pane.onselect = (node) => this.onselect(node, pane);
      pane.ontoggle = (node) => this.toggle(node);
      pane.onpan = (x, y) => this.pan(x, y);
      pane.onzoom = (factor, at) => this.zoom(factor, at);
    }
  }

  get isSplit() {
    return this.main.side !== SIDES.union;
  }

  get shown() {
    return this.isSplit ? [this.main, this.golden] : [this.main];
  }

  /**
   * Shows another graph; what is unfolded stays so where both are built alike.
   * @param {Graph} graph
   */
  show(graph) {
    if (!isAlike(graph, this.graph)) this.folds.reset(graph);
    this.graph = this.main.graph = this.golden.graph = graph;
    if (!graph.golden) this.main.side = SIDES.union;
    this.tellSplit();
  }

  tellSplit() {
    byId("stage").toggleAttribute("data-split", this.isSplit);
    document.getElementById("split")?.setAttribute("aria-pressed", String(this.isSplit));
  }

  /** @param {boolean} isSplit */
  split(isSplit) {
    this.main.side = isSplit ? SIDES.target : SIDES.union;
    this.tellSplit();
    this.golden.camera = { ...this.main.camera };
    this.arrange();
  }

  arrange() {
    for (const pane of this.shown) pane.arrange();
  }

  repaint() {
    for (const pane of this.shown) pane.repaint();
  }

  /**
   * @param {(box: Box) => string} fillOf
   * @param {(box: Box) => number[]} cellsOf
   */
  colour(fillOf, cellsOf) {
    for (const pane of [this.main, this.golden]) {
      Object.assign(pane, { fillOf, cellsOf });
      pane.recolour();
    }
  }

  /** @param {number[]} hits - of a search */
  mark(hits) {
    for (const pane of this.shown) pane.mark(hits);
  }

  /**
   * Unfolds all that a node is in.
   * @param {number} node
   */
  reveal(node) {
    this.folds.reveal(this.graph, node);
    this.arrange();
  }

  /** @param {number} node */
  toggle(node) {
    if (this.graph.sizes[node] === 1) return;
    this.folds.toggle(node);
    for (const pane of this.shown) pane.keepInPlace(node, () => pane.arrange());
    this.onfold();
  }

  /**
   * To the middle of one pane, unless it stays as it is, and in the other with its upper edge at the same height.
   * @param {number} node
   * @param {GraphPane} [except] - stays as it is
   */
  center(node, except) {
    const first = except ?? this.main;
    if (!except) first.center(node);
    const { node: shown, y } = first.boxOf(node);
    for (const pane of this.shown) {
      if (pane === first) continue;
      pane.center(node);
      const box = pane.boxOf(node);
      if (box.node === shown) pane.moveTo({ ...pane.camera, y: box.y - (y - first.camera.y) });
    }
  }

  fitAll() {
    for (const pane of this.shown) pane.fit(pane.boxes[0]);
  }

  /** @param {number} node */
  fit(node) {
    for (const pane of this.shown) pane.fit(pane.boxOf(node));
  }

  /**
   * Moves the first pane there, and the other as far.
   * @param {Camera} camera
   */
  moveTo({ x, y, zoom }) {
    const { camera: before } = this.main;
    for (const pane of this.shown) pane.moveTo({ x: pane.camera.x + x - before.x, y: pane.camera.y + y - before.y, zoom });
  }

  /**
   * @param {number} factor
   * @param {{x: number, y: number}} [at]
   */
  zoom(factor, at) {
    for (const pane of this.shown) pane.zoom(factor, at);
  }

  /**
   * @param {number} x
   * @param {number} y
   */
  pan(x, y) {
    for (const pane of this.shown) pane.pan(x, y);
  }
}
