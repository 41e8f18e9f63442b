// Wiring of the page of all runs: asks for them every few seconds, and shows the list or the comparison.

import { getJson } from "../api.js";
import { byId, el, setText } from "../dom.js";
import { fragment, readAddress } from "./address.js";
import { Comparison } from "./compare.js";
import { RunTable } from "./list.js";

/** @import { RunEntry, RunsAnswer } from "./types.js" */

const REFRESH_MS = 3000;
const asked = /** @type {Promise<RunsAnswer>} */ (getJson("api/runs"));
const state = readAddress();
let isComparing = /[&?]view=compare/.test(location.hash);
/** @type {RunEntry[]} */
let runs = [];
/** What the compared runs were when they were drawn. */
let drawn = "";

const write = () => history.replaceState(null, "", fragment(state) + (isComparing ? "&view=compare" : ""));
const table = new RunTable(state, write);
/** @type {Comparison | null} */
let comparison = null;

/** @param {string} key */
function leaveOut(key) {
  state.runs = state.runs.filter((other) => other !== key);
  write();
  show();
}

/** @param {RunsAnswer} answer */
function take(answer) {
  runs = answer.runs;
  byId("folders").replaceChildren(...answer.folders.map((folder) => el("code", {}, folder)));
  byId("footer").replaceChildren(el("span", {}, `trainermon ${answer.version}`), el("a", { href: "runbook" }, "runbook"), el("a", { href: "api/runs" }, "JSON"));
  const living = runs.filter((run) => run.state === "running").length;
  showState(living ? `${living} running` : "none running", living ? "good" : "calm");
  show();
}

function show() {
  byId("list").hidden = isComparing;
  byId("compare").hidden = !isComparing;
  setText(byId("title"), isComparing ? "Compared runs" : "Runs");
  document.title = isComparing ? `${state.runs.length} runs · trainermon` : "Runs · trainermon";
  if (!isComparing) return table.show(runs);
  const chosen = state.runs.flatMap((key) => runs.find((run) => run.key === key) ?? []);
  const now = JSON.stringify(chosen.map(({ key, state: of, step, last_time_s }) => [key, of, step, last_time_s]));
  if (now === drawn) return;
  drawn = now;
  comparison ??= new Comparison(state, { onChange: write, onRemove: leaveOut });
  comparison.show(chosen).then(markReady, (error) => showState(error.message, "warn"));
}

function route() {
  const isNow = /[&?]view=compare/.test(location.hash);
  Object.assign(state, readAddress());
  if (isNow === isComparing) return;
  isComparing = isNow;
  drawn = "";
  show();
  scrollTo(0, 0);
}

/**
 * @param {string} text
 * @param {string} tone
 */
function showState(text, tone) {
  setText(byId("state"), text);
  byId("state").dataset.tone = tone;
}

async function refresh() {
  if (!document.hidden) await /** @type {Promise<RunsAnswer>} */ (getJson("api/runs")).then(take, () => showState("not answering, trying again", "warn"));
  setTimeout(refresh, REFRESH_MS);
}

/** The moment at which all was drawn is written down for the benchmark and the tests. */
function markReady() {
  requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.ready ??= performance.now().toFixed(1))));
}

addEventListener("hashchange", route);
byId("back").addEventListener("click", (event) => {
  event.preventDefault();
  location.hash = fragment(state);
});
asked.then((answer) => {
  take(answer);
  if (!isComparing) markReady();
}, (error) => showState(error.message, "warn"));
setTimeout(refresh, REFRESH_MS);
