// Draws a list of shapes onto a canvas: only what is in view, and labels only where they can be read. Titles of frames stay
// readable, as far as they have room, so that one sees from afar what is where; and in view as long as their frame is, so that
// one sees from near what is around.

/** @import { Box, Camera } from "./types.js" */
/** @import { Shape, TextShape } from "./scene.js" */

const READABLE = 5.5;
const FONT_SIZE = 12.5;
const HALO = 5;
const FRAME_TITLE = 11; // pixels on the screen, where other labels are too small

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Shape[]} shapes
 * @param {Camera} camera
 * @param {{width: number, height: number, font: string}} frame
 */
export function draw(context, shapes, camera, { width, height, font }) {
  const { x, y, zoom } = camera;
  const [left, top, right, bottom] = [x - width / 2 / zoom, y - height / 2 / zoom, x + width / 2 / zoom, y + height / 2 / zoom];
  context.save();
  context.scale(zoom, zoom);
  context.translate(-left, -top);
  context.textBaseline = "alphabetic";
  context.lineJoin = "round";
  const showsText = FONT_SIZE * zoom >= READABLE;
  const size = showsText ? FONT_SIZE : FRAME_TITLE / zoom;
  /** @type {{x: number, y: number, end: number}[]} */
  const titles = [];
  /** @type {TextShape[]} */
  const beyond = [];
  for (const shape of shapes) {
    if (shape.kind === "rect") {
      if (shape.x > right || shape.y > bottom || shape.x + shape.width < left || shape.y + shape.height < top) continue;
      drawRect(context, shape);
    } else if (shape.kind === "path") {
      const [x0, y0, , , , , x1, y1] = shape.points;
      if (Math.min(y0, y1) > bottom || Math.max(y0, y1) < top || Math.min(x0, x1) - 400 > right || Math.max(x0, x1) + 400 < left) continue;
      drawPath(context, shape);
    } else if (shape.frame && isBeyond(shape, shape.frame, { left, top, right, bottom }, size)) {
      beyond.push(shape);
    } else if ((showsText || shape.isBold) && shape.y > top && shape.y - size < bottom && shape.x < right) {
      context.font = fontOf(font, shape.isBold, size);
      if (!showsText) {
        const title = { x: shape.x, y: shape.y, end: shape.x + context.measureText(shape.text).width };
        if (titles.some(({ x, y, end }) => Math.abs(y - title.y) < size && x < title.end && title.x < end)) continue;
        titles.push(title);
      }
      drawText(context, shape, (HALO * size) / FONT_SIZE);
    }
  }
  drawPinned(context, beyond, { left, top }, { font, size });
  context.restore();
}

/**
 * Whether a frame is in view, and its title is not.
 * @param {TextShape} title
 * @param {Box} box
 * @param {{left: number, top: number, right: number, bottom: number}} view
 * @param {number} size - of the letters
 */
function isBeyond({ x, y }, box, { left, top, right, bottom }, size) {
  const isSeen = box.x < right && box.y < bottom && box.x + box.width > left + 4 * size && box.y + box.height > top + 4 * size;
  return isSeen && (y - size < top || x < left);
}

/**
 * Titles of frames that began above or left of what is in view: in a line on its edge, outer ones before inner ones.
 * @param {CanvasRenderingContext2D} context
 * @param {TextShape[]} titles
 * @param {{left: number, top: number}} view
 * @param {{font: string, size: number}} letters
 */
function drawPinned(context, titles, { left, top }, { font, size }) {
  context.font = fontOf(font, true, size);
  let end = left;
  for (const title of titles) {
    const isBehind = end > left && title.x < end + size;
    const text = isBehind ? `› ${title.text}` : title.text;
    const x = Math.max(title.x, end + size / 2);
    const y = Math.max(title.y, top + 1.5 * size);
    end = x + context.measureText(text).width;
    context.fillStyle = title.halo ?? "";
    context.beginPath();
    context.roundRect(x - size / 2, y - 1.1 * size, end - x + size, 1.5 * size, size / 4);
    context.fill();
    drawText(context, { ...title, text, x, y }, (HALO * size) / FONT_SIZE);
  }
}

/**
 * @param {string} font
 * @param {boolean} [isBold]
 * @param {number} [size]
 */
export const fontOf = (font, isBold, size = FONT_SIZE) => `${isBold ? "600 " : ""}${size}px ${font}`;

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Extract<Shape, {kind: "text"}>} shape
 * @param {number} halo - its width
 */
function drawText(context, shape, halo) {
  if (shape.halo) {
    context.strokeStyle = shape.halo;
    context.lineWidth = halo;
    context.setLineDash([]);
    context.strokeText(shape.text, shape.x, shape.y);
  }
  context.fillStyle = shape.fill;
  context.fillText(shape.text, shape.x, shape.y);
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Extract<Shape, {kind: "rect"}>} shape
 */
function drawRect(context, { x, y, width, height, fill, stroke, thick = 1, dashed, radius }) {
  context.beginPath();
  context.roundRect(x, y, width, height, radius);
  if (fill) {
    context.fillStyle = fill;
    context.fill();
  }
  if (!stroke) return;
  context.strokeStyle = stroke;
  context.lineWidth = thick;
  context.setLineDash(dashed ? [4, 3] : []);
  context.stroke();
}

/**
 * @param {CanvasRenderingContext2D} context
 * @param {Extract<Shape, {kind: "path"}>} shape
 */
function drawPath(context, { points, stroke, thick, dashed }) {
  const [x0, y0, x1, y1, x2, y2, x3, y3] = points;
  context.beginPath();
  context.moveTo(x0, y0);
  context.bezierCurveTo(x1, y1, x2, y2, x3, y3);
  context.strokeStyle = stroke;
  context.lineWidth = thick;
  context.setLineDash(dashed ? [4, 3] : []);
  context.stroke();
  const length = Math.hypot(x3 - x2, y3 - y2) || 1;
  const [dx, dy] = [(x3 - x2) / length, (y3 - y2) / length];
  context.setLineDash([]);
  context.beginPath();
  context.moveTo(x3 - 5 * dx - 3.2 * dy, y3 - 5 * dy + 3.2 * dx);
  context.lineTo(x3, y3);
  context.lineTo(x3 - 5 * dx + 3.2 * dy, y3 - 5 * dy - 3.2 * dx);
  context.stroke();
}
