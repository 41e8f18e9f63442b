// The one tooltip of the page.

import { el } from "./dom.js";

const tip = el("div", { cls: "tip", role: "status", hidden: true });
document.body.append(tip);

/**
 * `lines` are texts, the first one a heading. Stays inside the window.
 * @param {string[]} lines
 * @param {number} clientX
 * @param {number} clientY
 */
export function showTip(lines, clientX, clientY) {
  tip.replaceChildren(...lines.filter(Boolean).map((text, k) => el("div", { cls: k ? null : "tip-head" }, text)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const x = clientX + 16 + width > innerWidth ? clientX - 16 - width : clientX + 16;
  const y = clientY + 16 + height > innerHeight ? clientY - 16 - height : clientY + 16;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}

export function hideTip() {
  tip.hidden = true;
}
