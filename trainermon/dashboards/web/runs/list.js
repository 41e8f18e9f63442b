// The list of runs: search, filters, order, and which are chosen for a comparison.

import { measured } from "../api.js";
import { byId, el, segmented, select, setText } from "../dom.js";
import { formatMeasured, formatSeconds, formatStep, formatTime } from "../scales.js";
import { GLYPHS } from "../theme.js";
import { fragment } from "./address.js";

/** @import { AddressState, RunEntry } from "./types.js" */

const MOST_CHOSEN = 32;
const STATES = [["all", "all"], ["running", "running"], ["finished", "finished"], ["alerts", "with alerts"], ["problem", "with problems"]];
/** @type {Record<string, string>} */
const STATE_TITLES = {
  running: "Its ranks train, or its agent stores what they left.",
  silent: "Its agent has not said that it ends, but has stored nothing for five minutes: it was killed, or its node is gone.",
  finished: "Its ranks have ended, and all that they left is stored.",
  stopped: "It was ended by SIGTERM from outside: a scheduler, a launcher, an operator.",
  interrupted: "It was ended by Ctrl-C, or SIGINT.",
  killed: "A rank was killed, and nothing went on after that: often for lack of memory.",
  failed: "An exception or an exit status ended the script of a rank; its alert says which.",
  crashed: "A rank died without a good-bye, and nothing went on after that.",
  empty: "No step was stored.",
};
/** @type {[string, string, (run: RunEntry) => string | number][]} */
const COLUMNS = [
  ["name", "Run", ({ name }) => name.toLowerCase()],
  ["state", "State", ({ state }) => state],
  ["started", "Started", ({ started_s, last_time_s }) => -(started_s ?? last_time_s ?? 0)],
  ["duration", "Duration", ({ started_s, last_time_s }) => -((last_time_s ?? 0) - (started_s ?? last_time_s ?? 0))],
  ["step", "Step", ({ step }) => -(step ?? -1)],
  ["loss", "Loss", ({ loss }) => byLoss(loss)],
  ["alerts", "Alerts", ({ alerts, alerts_firing }) => -(alerts_firing * 1e6 + alerts)],
  ["ranks", "Ranks", ({ world_size }) => -world_size],
];

/**
 * Finite ones by size, then those that are not finite, then what was not recorded.
 * @param {RunEntry["loss"]} loss
 */
function byLoss(loss) {
  const value = measured(loss);
  if (value === null) return Infinity;
  return Number.isFinite(value) ? value : Number.MAX_VALUE;
}

export class RunTable {
  /** @type {RunEntry[]} */
  #runs = [];
  #shown = "";

  /**
   * `state` is the page's, of which this changes search, filters, order and chosen runs; `onChange` hears of it.
   * @param {AddressState} state
   * @param {() => void} onChange
   */
  constructor(state, onChange) {
    this.state = state;
    this.onChange = onChange;
    const search = /** @type {HTMLInputElement} */ (byId("search"));
    search.value = state.search;
    search.addEventListener("input", () => this.#set({ search: search.value }));
    byId("states").append(segmented("Which runs", STATES, state.state, (key) => this.#set({ state: key })));
    byId("compare-chosen").addEventListener("click", () => (location.hash = `${fragment(this.state)}&view=compare`));
  }

  /** @param {RunEntry[]} runs */
  show(runs) {
    this.#runs = runs;
    this.#offerTags();
    this.render();
  }

  /** @param {Partial<AddressState>} change */
  #set(change) {
    Object.assign(this.state, change);
    this.onChange();
    this.render();
  }

  #offerTags() {
    const tags = [...new Set(this.#runs.flatMap((run) => run.tags))].sort();
    const key = JSON.stringify([tags, this.state.tag]);
    if (byId("tags").dataset.key === key) return;
    byId("tags").dataset.key = key;
    const options = [["", "any tag"], ...tags.map((tag) => [tag, tag])];
    byId("tags").replaceChildren(tags.length ? select("Tag", options, this.state.tag, (tag) => this.#set({ tag })) : "");
  }

  #found() {
    const words = this.state.search.toLowerCase().split(/\s+/).filter(Boolean);
    const { state, tag, sort } = this.state;
    /** @param {RunEntry} run */
    const matches = (run) => {
      if (tag && !run.tags.includes(tag)) return false;
      if (state === "alerts" ? !run.alerts_firing : state === "problem" ? !run.problem && !["silent", "killed", "failed", "crashed"].includes(run.state) : state !== "all" && run.state !== state) return false;
      const text = [run.name, run.path, run.framework, ...run.tags, ...run.nodes].join("\n").toLowerCase();
      return words.every((word) => text.includes(word));
    };
    const found = this.#runs.filter(matches);
    const column = COLUMNS.find(([name]) => name === sort.replace(/^-/, ""));
    if (!column) return found;
    const [sign, by] = [sort.startsWith("-") ? -1 : 1, column[2]];
    return found.sort((a, b) => sign * (by(a) < by(b) ? -1 : by(a) > by(b) ? 1 : 0));
  }

  render() {
    const found = this.#found();
    // Equal rows are not built anew: a click or a screen reader in the middle of them would lose its place.
    const shown = JSON.stringify([found, this.state.runs, this.state.sort]);
    const all = `${formatStep(this.#runs.length)} ${this.#runs.length === 1 ? "run" : "runs"}`;
    setText(byId("count"), found.length === this.#runs.length ? all : `${formatStep(found.length)} of ${all}`);
    this.#showChosen();
    if (shown === this.#shown) return;
    this.#shown = shown;
    if (!found.length) return byId("runs").replaceChildren(this.#nothing());
    const head = el("tr", {}, el("th", { cls: "choose" }), COLUMNS.map(([name, text]) => this.#heading(name, text)), el("th", {}));
    const rows = found.map((run) => this.#row(run));
    byId("runs").replaceChildren(el("table", { cls: "cards" }, el("thead", {}, head), el("tbody", {}, rows)));
  }

  #nothing() {
    const text = this.#runs.length ? "No run matches. Change the search or the filters above." : "No run yet. A run appears here as soon as its first rank has started.";
    return el("p", { cls: "empty" }, text);
  }

  /**
   * @param {string} name
   * @param {string} text
   */
  #heading(name, text) {
    const { sort } = this.state;
    const order = sort === name ? "ascending" : sort === `-${name}` ? "descending" : null;
    const next = sort === name ? `-${name}` : sort === `-${name}` ? "" : name;
    const mark = order === "ascending" ? " ↓" : order === "descending" ? " ↑" : "";
    return el("th", { "aria-sort": order }, el("button", { type: "button", onclick: () => this.#set({ sort: next }) }, `${text}${mark}`));
  }

  /** @param {RunEntry} run */
  #row(run) {
    const box = el("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, checked: this.state.runs.includes(run.key), onchange: () => this.#choose(run.key, box.checked) });
    const tags = run.tags.map((tag) => el("button", { type: "button", cls: "tag", title: "Show runs with this tag", onclick: () => this.#set({ tag }) }, tag));
    const problem = run.problem && el("div", { cls: "problem" }, run.problem);
    const began = run.started_s ?? run.last_time_s;
    const loss = measured(run.loss);
    return el("tr", {},
      el("td", { cls: "choose" }, box),
      el("td", { cls: "run" }, el("a", { cls: "name", href: `run/${encodeURIComponent(run.key)}/`, title: run.path }, run.name), tags.length ? el("div", {}, tags) : null, problem || null),
      el("td", { "data-label": "State" }, el("span", { cls: `pill ${run.state}`, title: STATE_TITLES[run.state] }, run.state)),
      el("td", { "data-label": "Started" }, began ? formatTime(began) : "–"),
      el("td", { "data-label": "Duration" }, run.started_s && run.last_time_s ? formatSeconds(Math.max(0, run.last_time_s - run.started_s)) : "–"),
      el("td", { "data-label": "Step" }, formatStep(run.step)),
      el("td", { "data-label": "Loss", cls: loss !== null && !Number.isFinite(loss) ? "nonfinite" : null }, formatMeasured(loss)),
      el("td", { "data-label": "Alerts" }, alertsOf(run)),
      el("td", { "data-label": "Ranks" }, run.world_size ? formatStep(run.world_size) : "–"),
      el("td", { cls: "links" }, run.page && /^https?:\/\//.test(run.page) ? el("a", { href: run.page, title: "While its agent runs, its own page knows of each step at once" }, "agent's page") : ""));
  }

  /**
   * @param {string} key
   * @param {boolean} isChosen
   */
  #choose(key, isChosen) {
    const others = this.state.runs.filter((other) => other !== key);
    this.state.runs = isChosen ? [...others, key].slice(-MOST_CHOSEN) : others;
    this.#shown = JSON.stringify([this.#found(), this.state.runs, this.state.sort]);
    this.onChange();
    this.#showChosen();
  }

  #showChosen() {
    const button = /** @type {HTMLButtonElement} */ (byId("compare-chosen"));
    const count = this.state.runs.length;
    button.disabled = count === 0;
    setText(button, count > 1 ? `Compare ${count} runs` : count ? "Chart 1 run" : "Compare");
    button.title = count ? "" : "Tick the runs that you want in one chart";
  }
}

/** @param {RunEntry} run */
function alertsOf({ alerts, alerts_firing, worst }) {
  if (!alerts_firing) return alerts ? el("span", { cls: "muted" }, `${formatStep(alerts)} over`) : "–";
  return el("span", { cls: `severity ${worst ?? ""}` }, el("span", { "aria-hidden": "true" }, `${GLYPHS[worst ?? ""] ?? "●"} `), `${formatStep(alerts_firing)} firing`);
}
