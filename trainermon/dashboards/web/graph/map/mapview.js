// The canvas of the map: a click goes somewhere, a drag looks closer, a double click shows the whole step again.

import { fitCanvas, perFrame } from "../../dom.js";
import { drawMap, mapHeights, pixelAt } from "./stepmap.js";

/** @import { Range } from "../types.js" */
/** @import { Line, MapFrame } from "./stepmap.js" */
/** @typedef {Pick<MapFrame, "shown" | "selected" | "peers" | "hits" | "palette">} MapState */
/** @typedef {{pixel: number, pixels: number, range: Range}} MapPlace */

/** @type {Range} */
export const WHOLE = [0, 1];
const DRAG_PIXELS = 4;
const LEAST_RANGE = 1e-6;

export class MapView {
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {() => Line[]} lines
   * @param {() => MapState} state
   */
  constructor(canvas, lines, state) {
    this.canvas = canvas;
    this.lines = lines;
    this.state = state;
    this.range = WHOLE;
    /** @type {[number, number] | null} */
    this.dragged = null;
    /** @type {(line: number, place: MapPlace) => void} */
    this.onpick = () => {};
    this.onzoom = () => {};
    this.repaint = perFrame(() => this.paint());
    this.listen();
  }

  paint() {
    const lines = this.lines();
    const { clientWidth: width, clientHeight: height } = this.canvas;
    drawMap(fitCanvas(this.canvas, width, height), lines, { width, height, range: this.range, dragged: this.dragged, ...this.state() });
  }

  /** As high as its lines. */
  fit() {
    this.canvas.style.height = `${mapHeights(this.lines().length).height}px`;
    this.repaint();
  }

  /**
   * @param {number} from - as a share of the step
   * @param {number} to
   */
  zoom(from, to) {
    const [low, high] = [Math.max(0, Math.min(from, to)), Math.min(1, Math.max(from, to))];
    this.range = high - low < LEAST_RANGE || high - low === 1 ? WHOLE : /** @type {Range} */ ([low, high]);
    this.onzoom();
    this.repaint();
  }

  listen() {
    const at = (/** @type {MouseEvent} */ { offsetX: x, offsetY: y }) => pixelAt(this.lines().length, { x, y, width: this.canvas.clientWidth });
    /** @type {{line: number, pixel: number, pixels: number} | null} */
    let held = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      held = at(event);
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!held) return void (this.canvas.title = this.lines().length > 1 ? this.lines()[at(event).line].label : "");
      const { pixel } = at(event);
      if (this.dragged || Math.abs(pixel - held.pixel) > DRAG_PIXELS) this.dragged = [held.pixel, pixel];
      this.repaint();
    });
    this.canvas.addEventListener("pointercancel", () => ((held = this.dragged = null), this.repaint()));
    this.canvas.addEventListener("pointerup", () => {
      const { range: [from, to], dragged } = this;
      const start = held;
      held = this.dragged = null;
      if (!start) return;
      const shareOf = (/** @type {number} */ pixel) => from + ((to - from) * pixel) / start.pixels;
      if (dragged) this.zoom(shareOf(dragged[0]), shareOf(dragged[1]));
      else this.onpick(start.line, { pixel: start.pixel, pixels: start.pixels, range: this.range });
    });
    this.canvas.addEventListener("dblclick", () => this.zoom(...WHOLE));
    new ResizeObserver(() => this.repaint()).observe(this.canvas);
  }
}
