// Finds rows by a part of their name while one types. 20,000 names are one pass of `includes` over lower-case text.

import { el } from "../dom.js";

const MOST = 50;
let numLists = 0;

/**
 * The rows that contain every word, in their own order; at most `most`, and how many there are in all.
 * @param {string[]} lowered - the names in lower case
 * @param {string} query
 * @param {number} [most]
 */
export function find(lowered, query, most = MOST) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  /** @type {number[]} */
  const found = [];
  let count = 0;
  for (let row = 0; row < lowered.length; row++) {
    const name = lowered[row];
    if (!words.every((word) => name.includes(word))) continue;
    if (count++ < most) found.push(row);
  }
  return { found, count };
}

/** A text field with a list of the rows that it finds: arrow keys, Enter and Escape work as in any combobox. */
export class RowSearch {
  /** @type {string[]} */
  #names = [];
  /** @type {string[]} */
  #lowered = [];
  /** @type {number[]} */
  #found = [];
  #at = 0;

  /** @param {{onPick: (name: string) => void}} options */
  constructor({ onPick }) {
    this.onPick = onPick;
    const id = `rows-found-${++numLists}`;
    this.list = el("ul", { cls: "found", role: "listbox", id, "aria-label": "Rows found", hidden: true });
    this.input = el("input", {
      type: "search", cls: "row-search", placeholder: "Find a row…", autocomplete: "off", spellcheck: "false",
      role: "combobox", "aria-label": "Find a row", "aria-controls": id, "aria-expanded": "false", "aria-autocomplete": "list",
      oninput: () => this.#search(), onfocus: () => this.#search(), onblur: () => this.#close(),
      onkeydown: (event) => this.#key(/** @type {KeyboardEvent} */ (event)),
    });
    // A click would take the focus away, and with it the list, before it is heard.
    this.list.addEventListener("pointerdown", (event) => event.preventDefault());
    this.root = el("div", { cls: "row-finder" }, this.input, this.list);
  }

  /** @param {string[]} names */
  offer(names) {
    if (names === this.#names) return;
    this.#names = names;
    this.#lowered = names.map((name) => name.toLowerCase());
    if (!this.list.hidden) this.#search();
  }

  #search() {
    const { found, count } = find(this.#lowered, this.input.value);
    this.#found = found;
    this.#at = 0;
    const rows = found.map((row, place) =>
      el("li", { role: "option", id: `${this.list.id}-${place}`, title: this.#names[row], onclick: () => this.#pick(row) }, this.#names[row]));
    const rest = count - found.length;
    const note = rest > 0 ? `${rest} more; type another word` : count ? "" : "no such row";
    this.list.replaceChildren(...rows, ...(note ? [el("li", { cls: "hint", role: "presentation" }, note)] : []));
    this.list.hidden = false;
    this.input.setAttribute("aria-expanded", "true");
    this.#mark();
  }

  #mark() {
    for (const [place, row] of [...this.list.children].entries()) row.setAttribute("aria-selected", String(place === this.#at && place < this.#found.length));
    if (this.#found.length) this.input.setAttribute("aria-activedescendant", `${this.list.id}-${this.#at}`);
    else this.input.removeAttribute("aria-activedescendant");
    this.list.children[this.#at]?.scrollIntoView({ block: "nearest" });
  }

  /** @param {number} row */
  #pick(row) {
    this.input.value = "";
    this.onPick(this.#names[row]);
    this.#close();
  }

  #close() {
    this.list.hidden = true;
    this.input.setAttribute("aria-expanded", "false");
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const moves = /** @type {Record<string, number>} */ ({ ArrowDown: 1, ArrowUp: -1 });
    if (event.key in moves && this.#found.length) {
      event.preventDefault();
      if (this.list.hidden) return this.#search();
      this.#at = (this.#at + moves[event.key] + this.#found.length) % this.#found.length;
      this.#mark();
    } else if (event.key === "Enter" && !this.list.hidden && this.#found.length) {
      event.preventDefault();
      this.#pick(this.#found[this.#at]);
    } else if (event.key === "Escape" && !this.list.hidden) {
      event.preventDefault();
      this.input.value = "";
      this.#close();
    }
  }
}
