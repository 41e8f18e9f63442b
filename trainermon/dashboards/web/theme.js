// The colours that canvases paint with: style.css decides them, this module reads them and says when they change.

import { keep, stated } from "./address.js";
import { diverging, pack, parseHex, sequential } from "./colour.js";

/** @typedef {"ink" | "muted" | "faint" | "grid" | "panel" | "plot" | "accent" | "accent-2" | "nonfinite" | "nonfinite-2"} ColourName */

/** @type {ColourName[]} */
const NAMES = ["ink", "muted", "faint", "grid", "panel", "plot", "accent", "accent-2", "nonfinite", "nonfinite-2"];
const SEVERITIES = ["info", "warning", "critical", "fatal"];

/** @type {Record<string, string>} */
export const GLYPHS = { info: "○", warning: "●", critical: "▲", fatal: "◆" };

const changes = new EventTarget();
const NUM_LINES = 8;
const STORED = "trainermon-theme";
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
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
  const lines = Array.from({ length: NUM_LINES }, (_, k) => colour(`line-${k + 1}`));
  const maps = { sequential: sequential(), diverging: diverging(isDark) };
  /** @param {ColourName} name */
  const pixel = (name) => pack(parseHex(colours[name]));
  const pixels = { none: pixel("plot"), nonfinite: pixel("nonfinite"), nonfinite2: pixel("nonfinite-2") };
  return { ...colours, lines, severity, maps, pixels, font: colour("font"), mono: colour("mono") };
}

/** What the reader has chosen, here or in a link: "light", "dark", or "" for what the system says. */
let chosen = "";

/** @param {string} choice */
function apply(choice) {
  if (choice) document.documentElement.dataset.theme = choice;
  else delete document.documentElement.dataset.theme;
}

/** What the browser remembers of an earlier visit; a private window may remember nothing. */
function remembered() {
  try {
    return localStorage.getItem(STORED);
  } catch {
    return null;
  }
}

/** @param {string | null} text */
const known = (text) => (text === "light" || text === "dark" ? text : "");

chosen = known(stated("theme") ?? remembered());
apply(chosen);
export const theme = read();

function refresh() {
  Object.assign(theme, read());
  changes.dispatchEvent(new Event("change"));
}

export const chosenTheme = () => chosen || "auto";

/**
 * Takes a choice and remembers it.
 * @param {string} choice - "auto", "light" or "dark"
 */
export function chooseTheme(choice) {
  chosen = known(choice);
  keep("theme", chosen);
  try {
    localStorage.setItem(STORED, chosen);
  } catch {
    // Then it holds for this visit.
  }
  apply(chosen);
  refresh();
}

dark.addEventListener("change", refresh);
// Paper is white: canvases are repainted for it, the style sheet alone cannot do that.
addEventListener("beforeprint", () => (apply("light"), refresh()));
addEventListener("afterprint", () => (apply(chosen), refresh()));
