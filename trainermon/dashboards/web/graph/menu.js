// A menu at a point of the page: arrow keys, Enter, Escape; it gives the focus back.

import { el } from "../dom.js";

/** @typedef {{text: string, run: () => void}} MenuEntry */

/**
 * @param {{x: number, y: number}} point
 * @param {MenuEntry[]} entries
 */
export function openMenu({ x, y }, entries) {
  const before = /** @type {HTMLElement | null} */ (document.activeElement);
  let isOpen = true;
  const close = (hasFocus = true) => {
    if (!isOpen) return;
    isOpen = false; // removing it takes the focus from it, which closes it
    menu.remove();
    if (hasFocus) before?.focus();
  };
  const items = entries.map(({ text, run }) => el("button", { type: "button", role: "menuitem", onclick: () => (close(), run()) }, text));
  const menu = el("div", { role: "menu", cls: "menu" }, items);
  menu.addEventListener("keydown", (event) => {
    event.stopPropagation();
    const at = items.findIndex((item) => item === document.activeElement);
    if (event.key === "Escape" || event.key === "Tab") close();
    if (event.key === "ArrowDown") items[(at + 1) % items.length].focus();
    if (event.key === "ArrowUp") items[(at - 1 + items.length) % items.length].focus();
  });
  menu.addEventListener("focusout", (event) => {
    if (!menu.contains(/** @type {Node | null} */ (event.relatedTarget))) close(false);
  });
  document.body.append(menu);
  menu.style.left = `${Math.max(0, Math.min(x, innerWidth - menu.offsetWidth - 8))}px`;
  menu.style.top = `${Math.max(0, Math.min(y, innerHeight - menu.offsetHeight - 8))}px`;
  items[0].focus();
}
