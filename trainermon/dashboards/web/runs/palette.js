// How runs are told apart: by colour, and without colour by dashes and by a number at the end of the line.

import { el, fitCanvas } from "../dom.js";
import { onTheme, theme } from "../theme.js";

const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [4, 2]];

/** @param {number} place */
export const colourOf = (place) => theme.lines[place % theme.lines.length];

/**
 * Another pattern for neighbours, and for runs that share a colour: 8 and 5 have no common factor.
 * @param {number} place
 */
export const dashOf = (place) => DASHES[place % DASHES.length];

/**
 * A short piece of the line.
 * @param {number} place
 */
export function swatch(place) {
  const canvas = el("canvas", { cls: "swatch", "aria-hidden": "true" });
  const paint = () => {
    const context = fitCanvas(canvas, 30, 12);
    context.strokeStyle = colourOf(place);
    context.lineWidth = 2;
    context.setLineDash(dashOf(place));
    context.beginPath();
    context.moveTo(0, 6);
    context.lineTo(30, 6);
    context.stroke();
  };
  paint();
  onTheme(paint);
  return canvas;
}
