// What each key does; the same table is shown as help.

import { el } from "../dom.js";

/** @typedef {{keys: string[], text: string, run: (key: string) => void}} KeyAction */

/**
 * @param {KeyAction[]} actions
 */
export function listenToKeys(actions) {
  const byKey = new Map(actions.flatMap((action) => action.keys.map((key) => [key, action])));
  addEventListener("keydown", (event) => {
    const target = /** @type {HTMLElement} */ (event.target);
    if (target.matches("input, select, textarea") || event.altKey || event.ctrlKey || event.metaKey) return;
    const name = event.shiftKey && event.key.length > 1 ? `Shift+${event.key}` : event.key;
    if (name === "Enter" && target.matches("button, a, summary")) return;
    const action = byKey.get(name);
    if (!action) return;
    event.preventDefault();
    action.run(name);
  });
}

/**
 * @param {HTMLElement} list
 * @param {KeyAction[]} actions
 */
export function showKeys(list, actions) {
  list.replaceChildren(...actions.flatMap(({ keys, text }) => [el("dt", {}, keys.map((key) => el("kbd", {}, key))), el("dd", {}, text)]));
}
