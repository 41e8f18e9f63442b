// The colours that canvases paint with: style.css decides them, this module reads them and says when they change.

import { diverging, pack, parseHex, sequential } from "./colour.js";

/** @typedef {"ink" | "muted" | "faint" | "grid" | "panel" | "plot" | "accent" | "accent-2" | "nonfinite" | "nonfinite-2"} ColourName */

/** @type {ColourName[]} */
const NAMES = ["ink", "muted", "faint", "grid", "panel", "plot", "accent", "accent-2", "nonfinite", "nonfinite-2"];
const SEVERITIES = ["info", "warning", "critical", "fatal"];

/** @type {Record<string, string>} */
export const GLYPHS = { info: "○", warning: "●", critical: "▲", fatal: "◆" };

const changes = new EventTarget();
const dark = matchMedia("(prefers-color-scheme: dark)");

/** @param {() => void} repaint */
export const onTheme = (repaint) => changes.addEventListener("change", repaint);

function read() {
  const root = document.documentElement;
  const style = getComputedStyle(root);
  /** @param {string} name */
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const colours = /** @type {Record<ColourName, string>} */ (Object.fromEntries(NAMES.map((name) => [name, colour(name)])));
  /** @type {Record<string, string>} */
  const severity = Object.fromEntries(SEVERITIES.map((name) => [name, colour(name)]));
  const isDark = dark.matches && root.dataset.theme !== "light";
  const maps = { sequential: sequential(isDark), diverging: diverging(isDark) };
  /** @param {ColourName} name */
  const pixel = (name) => pack(parseHex(colours[name]));
  const pixels = { none: pixel("plot"), nonfinite: pixel("nonfinite"), nonfinite2: pixel("nonfinite-2") };
  return { ...colours, severity, maps, pixels, font: colour("font"), mono: colour("mono") };
}

export const theme = read();

function refresh() {
  Object.assign(theme, read());
  changes.dispatchEvent(new Event("change"));
}

dark.addEventListener("change", refresh);
// Paper is white: canvases are repainted for it, the style sheet alone cannot do that.
addEventListener("beforeprint", () => ((document.documentElement.dataset.theme = "light"), refresh()));
addEventListener("afterprint", () => (delete document.documentElement.dataset.theme, refresh()));
