// The page of a whole job: asks the controller every two seconds and shows what it says.

import { getJson } from "./api.js";
import { byId, el, segmented, select, setText } from "./dom.js";
import { RankMap } from "./job_map.js";
import { assess, isDone, readJob, runsOf } from "./job_state.js";
import { pageLink, showEscalations, showNodes, showRanks, turnBack } from "./job_tables.js";
import { formatSeconds, formatStep } from "./scales.js";
import { firingFigure } from "./tables.js";
import { chooseTheme, chosenTheme } from "./theme.js";

/** @import { Assessment, Job, JobRank, JobState } from "./types.js" */

const PERIOD_MS = 2000;
const MAPPED = 256; // of fewer ranks the table of nodes shows each
/** @type {Job | null} */
let job = null;
/** @type {JobState | null} */
let state = null;
/** @type {string | null} */
let chosen = null;
let onlyTroubled = true;
let health = "";
let search = "";
/** @type {RankMap | null} */
let map = null;
const field = el("input", { type: "search", cls: "row-search", placeholder: "Node or rank", "aria-label": "Node or rank", oninput: () => find(field.value) });

byId("theme").append(segmented("Theme", [["auto", "auto"], ["light", "light"], ["dark", "dark"]], chosenTheme(), chooseTheme));
byId("ranks-filter").append(segmented("Which ranks", [["troubled", "need a look"], ["all", "all"]], "troubled", (key) => {
  onlyTroubled = key === "troubled";
  turnBack();
  showRankTable();
}));
byId("nodes-search").append(field);

async function turn() {
  try {
    job = /** @type {Job} */ (await getJson("api/v1/job"));
    show();
    if (state?.isOver) showState("finished", "calm");
    else showState(job.ready ? "live" : "starting", "good");
  } catch {
    showState("reconnecting", "warn");
  }
  setTimeout(turn, PERIOD_MS);
}

/**
 * @param {string} text
 * @param {string} tone
 */
function showState(text, tone) {
  setText(byId("state"), text);
  byId("state").dataset.tone = tone;
}

function show() {
  if (job === null) return;
  const runs = runsOf(job);
  const run = chosen !== null && runs.includes(chosen) ? chosen : runs[0];
  state = readJob(job, run);
  showIdentity(job, runs, state);
  showHealth(assess(state, job.ready), state.ranks.find(({ rank, up }) => rank === 0 && up));
  showFigures(job, state);
  showMap(state);
  showNodeTable();
  showRankTable();
  showEscalations(job.escalations.filter((entry) => entry.run === run || !run));
}

function showNodeTable() {
  if (state) showNodes(state, search, showNodeTable);
}

function showRankTable() {
  if (state) showRanks(state, onlyTroubled, search, showRankTable);
}

/** @param {string} text */
function find(text) {
  search = text.trim().toLowerCase();
  turnBack();
  showNodeTable();
  showRankTable();
}

/** @param {JobState} state */
function showMap(state) {
  byId("map-panel").hidden = state.ranks.length < MAPPED;
  if (byId("map-panel").hidden) return;
  map ??= new RankMap(({ node, url }) => ((field.value = node ?? url), find(field.value)));
  map.show(state);
}

/**
 * @param {Job} job
 * @param {string[]} runs
 * @param {JobState} state
 */
function showIdentity(job, runs, state) {
  setText(byId("run-id"), state.run ?? "trainermon");
  document.title = state.run ? `${state.run} · job` : "trainermon job";
  const facts = [state.attempt > 1 && `attempt ${state.attempt}`, state.nodes.length && (state.nodes.length === 1 ? "1 node" : `${formatStep(state.nodes.length)} nodes`)].filter(Boolean);
  setText(byId("run-facts"), facts.join(" · "));
  if (byId("runs").dataset.runs !== runs.join("\n")) {
    byId("runs").dataset.runs = runs.join("\n");
    byId("runs").replaceChildren(runs.length > 1 ? select("Run", runs.map((run) => [run, run]), state.run, (run) => ((chosen = run), show())) : "");
  }
  byId("footer").replaceChildren(el("span", {}, `trainermon ${job.version}`), el("a", { href: "metrics" }, "metrics"), el("a", { href: "api/v1/job" }, "JSON"));
}

/**
 * Charts over steps are on the nodes' pages, which know every step; that of rank 0's node stands for the job.
 * @param {Assessment} assessment
 * @param {JobRank | undefined} first
 */
function showHealth({ tone, headline, details }, first) {
  const key = JSON.stringify([tone, headline, details, first?.url]);
  if (key === health) return; // a screen reader would read it out again
  health = key;
  const text = el("div", {}, el("p", { cls: "headline" }, headline), details.map((detail) => el("p", { cls: "detail" }, detail)));
  byId("health").dataset.tone = tone;
  byId("health").replaceChildren(el("span", { cls: "lamp", "aria-hidden": "true" }), text, el("div", { cls: "actions" }, first ? pageLink(first.url, "Charts: loss, norms, layers", "button") : ""));
}

/**
 * @param {Job} job
 * @param {JobState} state
 */
function showFigures(job, state) {
  const up = state.nodes.filter((node) => node.up).length;
  const left = state.nodes.filter((node) => !node.up && isDone(node)).length;
  const all = Math.max(state.world, state.ranks.length);
  const { attempt } = state;
  const shown = [...state.alerts, ...state.silenced.map((alert) => ({ ...alert, silenced: true }))];
  const firing = firingFigure(shown.map((alert) => ({ ...alert, attempt, first_step: alert.step, state: "firing" })));
  figure("step", "Step", formatStep(state.step));
  figure("pace", "Time per step", state.pace ? formatSeconds(1 / state.pace) : "–");
  figure("nodes", "Nodes answering", `${up} / ${state.nodes.length}`, up + left < state.nodes.length ? "bad" : "");
  if (state.isOver) figure("ranks", "Ranks", formatStep(all));
  else figure("ranks", "Ranks alive", `${formatStep(state.living)} / ${formatStep(all)}`, state.living < state.world ? "bad" : "");
  figure("alerts", "Alerts firing", firing.text, firing.tone);
  figure("open", "Escalations open", formatStep(job.escalations.filter((entry) => !entry.outcome).length));
}

/**
 * @param {string} id
 * @param {string} label
 * @param {string} text
 * @param {string} [tone]
 */
function figure(id, label, text, tone = "") {
  if (!document.getElementById(`figure-${id}`)) {
    const [name, number] = [el("dt", { id: `label-${id}` }), el("span", { id: `number-${id}`, cls: "number" })];
    byId("figures").append(el("div", { cls: "figure" }, name, el("dd", { id: `figure-${id}` }, number)));
  }
  setText(byId(`label-${id}`), label);
  setText(byId(`number-${id}`), text);
  byId(`figure-${id}`).dataset.tone = tone;
}

turn();
