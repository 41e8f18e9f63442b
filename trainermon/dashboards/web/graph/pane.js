// The canvas with the boxes: what is unfolded, what is in view, and the pointer.

import { fitCanvas, perFrame } from "../dom.js";
import { draw, fontOf } from "./canvas.js";
import { SIDES } from "./folds.js";
import { layOut } from "./layout.js";
import { boxesInView, shapesOf } from "./scene.js";
import { allBoxes, bundled, closedBoxes, nearTo, shownIn, wiresBetween } from "./wires.js";

/** @import { Folds } from "./folds.js" */
/** @import { Box, Camera, Graph, Look, Wire } from "./types.js" */

const ZOOMS = [0.05, 4];
const MARGIN = 40;
/** More boxes than these are never drawn at once. */
export const MOST_BOXES = 1500;

export class GraphPane {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Graph} graph
   * @param {Folds} folds
   * @param {() => Record<string, string>} palette
   */
  constructor(canvas, graph, folds, palette) {
    this.canvas = canvas;
    this.graph = graph;
    this.folds = folds;
    this.palette = palette;
    /** One of SIDES. */
    this.side = SIDES.union;
    /** @type {(node: number) => boolean} */
    this.hasNote = () => false;
    /** @type {(node: number) => void} */
    this.onselect = () => {};
    /** @type {(node: number) => void} */
    this.onadd = () => {};
    /** @type {(node: number) => void} */
    this.ontoggle = () => {};
    /** @type {(x: number, y: number) => void} */
    this.onpan = (x, y) => this.pan(x, y);
    /** @type {(factor: number, at: {x: number, y: number}) => void} */
    this.onzoom = (factor, at) => this.zoom(factor, at);
    /** @type {Set<number>} */
    this.hits = new Set();
    /** @type {(box: Box) => string} */
    this.fillOf = () => "";
    /** @type {(box: Box) => number[]} */
    this.cellsOf = () => [];
    this.onarrange = () => {};
    this.onmove = () => {};
    /** @type {(node: number, point: {x: number, y: number}) => void} */
    this.onmenu = () => {};
    /** @type {WeakMap<Box, {fill: string, cells: number[]}>} */
    this.faces = new WeakMap();
    /** @type {Camera} */
    this.camera = { x: 0, y: 0, zoom: 1 };
    /** @type {Box[]} */
    this.boxes = [];
    /** @type {Wire[]} */
    this.wires = [];
    /** @type {{node: number, wires: Wire[], found: Map<Box | Wire, number>} | undefined} */
    this.nearOf = undefined;
    this.repaint = perFrame(() => this.paint());
    this.listen();
  }

  /** @param {Graph} graph */
  show(graph) {
    this.graph = graph;
    this.arrange();
  }

  get size() {
    return { width: this.canvas.clientWidth, height: this.canvas.clientHeight };
  }

  /** Lays everything out anew; call it whenever the folds or the side have changed. */
  arrange() {
    const context = this.canvas.getContext("2d");
    if (!context) throw new Error("this browser draws no canvas");
    context.font = fontOf(this.palette().font, true);
    const widths = new Map();
    const measure = (/** @type {string} */ text) => {
      if (!widths.has(text)) widths.set(text, context.measureText(text).width);
      return widths.get(text);
    };
    const opened = {
      isOpen: (/** @type {number} */ node) => this.folds.open.has(node),
      isApart: (/** @type {number} */ node) => this.folds.apart.has(node),
      isHidden: (/** @type {number} */ node) => this.isHidden(node),
    };
    this.root = layOut(this.graph, opened, measure);
    this.boxes = allBoxes(this.root);
    const closed = closedBoxes(this.root);
    this.shown = shownIn(this.graph, closed);
    this.closed = closed;
    this.wires = wiresBetween(this.graph, closed, this.shown);
    this.onarrange();
    this.repaint();
  }

  /** @param {number} node */
  isHidden(node) {
    const { folds, graph, side } = this;
    return folds.isLeftOut(graph, node) || (side !== SIDES.union && graph.sides[node] !== SIDES.union && graph.sides[node] !== side);
  }

  paint() {
    const { width, height } = this.size;
    const context = fitCanvas(this.canvas, width, height);
    draw(context, this.shapes(this.inView()), this.camera, { width, height, font: this.palette().font });
  }

  /** The boxes that are drawn where one is. */
  inView() {
    const { width, height } = this.size;
    const [from, to] = [this.toPlane({ x: 0, y: 0 }), this.toPlane({ x: width, y: height })];
    return boxesInView(this.graph, this.boxes[0], { left: from.x, top: from.y, right: to.x, bottom: to.y }, MOST_BOXES);
  }

  /** What is near the selection; known until it or the boxes change. */
  get near() {
    if (this.nearOf?.node === this.folds.selected && this.nearOf.wires === this.wires) return this.nearOf.found;
    const found = nearTo(this.graph, this.wires, this.folds.selected);
    this.nearOf = { node: this.folds.selected, wires: this.wires, found };
    return found;
  }

  /** The picture of some boxes as shapes, of all if none are named. */
  shapes(boxes = this.boxes) {
    const { near } = this;
    const drawn = new Set(boxes);
    const isDrawn = (/** @type {Wire} */ { from, to }) => drawn.has(from) || drawn.has(to) || boxes.length < MOST_BOXES;
    const wires = bundled(this.wires.filter(isDrawn), near);
    /** @type {Look} */
    const look = {
      selected: this.folds.selected, others: this.folds.others, hasNote: this.hasNote, palette: this.palette(), hits: this.hits, near,
      fillOf: (box) => this.faceOf(box).fill, cellsOf: (box) => this.faceOf(box).cells,
    };
    return shapesOf(this.graph, boxes, wires, look);
  }

  /**
   * What a box says beside its verdict, which costs a pass over what is in it; known until the boxes change.
   * @param {Box} box
   */
  faceOf(box) {
    let face = this.faces.get(box);
    if (!face) this.faces.set(box, (face = { fill: this.fillOf(box), cells: this.cellsOf(box) }));
    return face;
  }

  /** Call it when `fillOf` or `cellsOf` has changed. */
  recolour() {
    this.faces = new WeakMap();
    this.repaint();
  }

  /**
   * The box that shows a node: its own, or the closed one that it is in.
   * @param {number} node
   */
  boxOf(node) {
    const at = this.shown?.[node] ?? -1;
    if (at >= 0 && this.closed) return this.closed[at];
    return this.boxes.find((box) => !box.isGroup && box.nodes.includes(node)) ?? this.boxes[0];
  }

  /**
   * Marks the boxes that some nodes are in.
   * @param {number[]} nodes
   */
  mark(nodes) {
    const { shown, closed } = this;
    this.hits = new Set(nodes.map((node) => (shown && closed && shown[node] >= 0 ? closed[shown[node]].node : node)));
    this.repaint();
  }

  /**
   * Unfolding must not move the box under the pointer.
   * @param {number} node
   * @param {() => void} change
   */
  keepInPlace(node, change) {
    const before = this.boxOf(node);
    change();
    const after = this.boxOf(node);
    this.moveTo({ ...this.camera, x: this.camera.x + after.x - before.x, y: this.camera.y + after.y - before.y });
  }

  /** @param {number} node */
  center(node) {
    const box = this.boxOf(node);
    const { width, height } = this.size;
    const zoom = Math.max(this.camera.zoom, 0.6);
    const isLarge = box.height * zoom > height - 2 * MARGIN;
    const y = isLarge ? box.y + (height / 2 - MARGIN) / zoom : box.y + box.height / 2;
    const x = box.width * zoom > width - 2 * MARGIN ? box.x + (width / 2 - MARGIN) / zoom : box.x + box.width / 2;
    this.moveTo({ x, y, zoom });
  }

  /** @param {Camera} camera */
  moveTo(camera) {
    this.camera = camera;
    this.repaint();
    this.onmove();
  }

  /** @param {Box} box */
  fit(box) {
    const { width, height } = this.size;
    const zoom = Math.min(1.2, (width - MARGIN) / box.width, (height - MARGIN) / box.height);
    this.moveTo({ x: box.x + box.width / 2, y: box.y + box.height / 2, zoom: Math.max(ZOOMS[0], zoom) });
  }

  /**
   * @param {number} factor
   * @param {{x: number, y: number}} [at] - a point of the canvas that stays where it is
   */
  zoom(factor, at = { x: this.size.width / 2, y: this.size.height / 2 }) {
    const before = this.toPlane(at);
    const zoom = Math.min(ZOOMS[1], Math.max(ZOOMS[0], this.camera.zoom * factor));
    this.camera = { ...this.camera, zoom };
    const after = this.toPlane(at);
    this.moveTo({ zoom, x: this.camera.x + before.x - after.x, y: this.camera.y + before.y - after.y });
  }

  /**
   * @param {number} x
   * @param {number} y
   */
  pan(x, y) {
    this.moveTo({ ...this.camera, x: this.camera.x + x / this.camera.zoom, y: this.camera.y + y / this.camera.zoom });
  }

  /** @param {{x: number, y: number}} point */
  toPlane({ x, y }) {
    const { width, height } = this.size;
    return { x: this.camera.x + (x - width / 2) / this.camera.zoom, y: this.camera.y + (y - height / 2) / this.camera.zoom };
  }

  /**
   * The innermost box at a point of the canvas.
   * @param {{x: number, y: number}} point
   */
  boxAt(point) {
    const { x, y } = this.toPlane(point);
    const inside = this.boxes.filter((box) => !box.isGroup && x >= box.x && y >= box.y && x <= box.x + box.width && y <= box.y + box.height);
    return inside[inside.length - 1];
  }

  listen() {
    /** @type {{x: number, y: number, moved: boolean} | null} */
    let held = null;
    const at = (/** @type {MouseEvent} */ event) => ({ x: event.offsetX, y: event.offsetY });
    this.canvas.addEventListener("pointerdown", (event) => {
      held = { ...at(event), moved: false };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!held) return void (this.canvas.style.cursor = this.boxAt(at(event)) ? "pointer" : "grab");
      const [dx, dy] = [held.x - event.offsetX, held.y - event.offsetY];
      if (!held.moved && Math.hypot(dx, dy) < 4) return;
      held = { ...at(event), moved: true };
      this.onpan(dx, dy);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      const box = held?.moved ? undefined : this.boxAt(at(event));
      held = null;
      if (box) (event.shiftKey ? this.onadd : this.onselect)(box.node);
    });
    this.canvas.addEventListener("contextmenu", (event) => {
      const box = this.boxAt(at(event));
      if (!box) return;
      event.preventDefault();
      this.onmenu(box.node, { x: event.clientX, y: event.clientY });
    });
    this.canvas.addEventListener("dblclick", (event) => {
      const box = this.boxAt(at(event));
      if (box) this.ontoggle(box.node);
    });
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) this.onzoom(Math.exp(-event.deltaY / 300), at(event));
      else this.onpan(event.deltaX, event.deltaY);
    }, { passive: false });
    new ResizeObserver(() => this.repaint()).observe(this.canvas);
  }
}
