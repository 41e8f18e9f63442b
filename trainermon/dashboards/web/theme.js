// The colours that canvases paint with: style.css decides them, this module reads them and says when they change.

import { diverging, pack, parseHex, sequential } from "./colour.js";

const NAMES = ["ink", "muted", "faint", "grid", "panel", "plot", "accent", "accent-2", "nonfinite", "nonfinite-2"];
const SEVERITIES = ["info", "warning", "critical", "fatal"];

export const GLYPHS = { info: "○", warning: "●", critical: "▲", fatal: "◆" };

export const theme = { font: "", severity: {}, maps: {} };

const changes = new EventTarget();
const dark = matchMedia("(prefers-color-scheme: dark)");

export const onTheme = (repaint) => changes.addEventListener("change", repaint);

function read() {
  const root = document.documentElement;
  const style = getComputedStyle(root);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  for (const name of NAMES) theme[name] = colour(name);
  for (const name of SEVERITIES) theme.severity[name] = colour(name);
  theme.font = style.getPropertyValue("--font").trim();
  theme.mono = style.getPropertyValue("--mono").trim();
  const isDark = dark.matches && root.dataset.theme !== "light";
  theme.maps = { sequential: sequential(isDark), diverging: diverging(isDark) };
  const pixel = (name) => pack(parseHex(theme[name]));
  theme.pixels = { none: pixel("plot"), nonfinite: pixel("nonfinite"), nonfinite2: pixel("nonfinite-2") };
}

function refresh() {
  read();
  changes.dispatchEvent(new Event("change"));
}

dark.addEventListener("change", refresh);
// Paper is white: canvases are repainted for it, the style sheet alone cannot do that.
addEventListener("beforeprint", () => ((document.documentElement.dataset.theme = "light"), refresh()));
addEventListener("afterprint", () => (delete document.documentElement.dataset.theme, refresh()));
read();
