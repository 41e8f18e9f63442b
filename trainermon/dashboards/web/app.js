// Wiring: what the agent says goes into the charts, tables and the sentence on top. Decides nothing else.

import { keep, onAddress, show as showAddress, stated } from "./address.js";
import { diagnosisHash, getJson, hasEnded, listen, measured } from "./api.js";
import { CurvePanel } from "./curves/panel.js";
import { followTools, showTheme, showTools } from "./curves/tools.js";
import { showDiagnosis } from "./diagnosis.js";
import { byId, paced, perFrame, setText } from "./dom.js";
import { showFigures, showRun, showState } from "./header.js";
import { assess, principal, showHealth } from "./health.js";
import { LineChart } from "./lines.js";
import { MEASURE_NAMES, MeasureChart, measuresOf } from "./measures.js";
import { LayerPanel, RankPanel } from "./panels.js";
import { Ruler } from "./ruler.js";
import { formatStep } from "./scales.js";
import { firingFigure, showAlerts, showDumps } from "./tables.js";
import { Lines, StepView } from "./view.js";

/** @import { Alert, Columns, Dump, Report, Run, StepEvent, StepFigures } from "./types.js" */

const RUN_REFRESH_MS = 2000;
const STEP_REFRESH_MS = 200;
const LINES = ["loss", "grad_norm", "global_grad_norm", ...MEASURE_NAMES];
/** @type {Record<string, string>} */
const IN_EVENTS = { step_time: "step_time_s" };

// Asked for before the charts are built, so that the answers travel meanwhile.
const asked = ask();
const view = new StepView();
const lines = new Lines();
/**
 * @typedef {object} State
 * @property {Run | null} run
 * @property {Map<string, Alert>} alerts
 * @property {Dump[]} dumps
 * @property {StepFigures} now
 * @property {Map<string, string | undefined>} verdicts - by the address of the diagnosis
 * @property {boolean} connected
 * @property {Date | null} lostAt
 */

/** @type {State} */
const state = { run: null, alerts: new Map(), dumps: [], now: {}, verdicts: new Map(), connected: false, lostAt: null };

const parent = byId("timeline");
const alerts = () => [...state.alerts.values()].filter((alert) => alert.state !== "pending");
const charts = [
  new Ruler({ parent, view, alerts, dumps: () => state.dumps }),
  new LineChart({ parent, view, lines, alerts, name: "loss", colour: "accent", log: false, title: "Loss", hint: "mean of ranks and micro steps", label: "Loss over steps" }),
  new LineChart({ parent, view, lines, alerts, name: "grad_norm", colour: "accent-2", log: true, title: "Gradient norm", hint: "of the collected parameters, before clipping", label: "Gradient norm over steps", beside: { name: "global_grad_norm", colour: "ink", text: "dashed: the framework's own" } }),
];
const layers = new LayerPanel({ parent, view, onRow: (picked) => curves.toggle(picked) });
const curves = new CurvePanel({ parent, view });
const ranks = new RankPanel({ parent, view });

/** @type {MeasureChart | null} */
let measures = null;

/** The chart of the other numbers comes when the run has one. */
function offerMeasures() {
  const offered = measuresOf(lines);
  if (measures) return measures.offer(offered);
  if (!offered.length) return;
  measures = new MeasureChart({ parent, view, lines, alerts, offered });
  charts.push(measures);
  layers.map.root.before(measures.root);
}

/** @param {number} step */
const onShow = (step) => {
  if (location.hash.startsWith("#/")) location.hash = "";
  view.focus(step);
  parent.scrollIntoView({ block: "nearest" });
};

const refresh = perFrame(() => {
  if (!state.run) return;
  const all = [...state.alerts.values()];
  const firing = firingFigure(all.filter((alert) => alert.state === "firing"));
  showFigures(state.run, state.now, firing);
  const verdict = state.verdicts.get(principal(all)?.diagnosis ?? "");
  showHealth(assess({ run: state.run, alerts: all, step: state.now.step, verdict, lost: state.lostAt !== null }), onShow);
  document.title = `${firing.heard ? `▲ ${firing.heard} · ` : ""}${formatStep(state.now.step)} · ${state.run.run_id}`;
});

const retable = perFrame(() => {
  showAlerts([...state.alerts.values()], { run: state.run, onShow });
  showDumps(state.dumps, { onShow });
});

/** Alerts and dumps are in the tables, in the sentence on top and in the charts. */
function remark() {
  retable();
  refresh();
  for (const chart of charts) chart.redraw();
}

// A fast run has hundreds of steps a second; nobody sees more than a few pictures of it.
const advance = paced(() => {
  view.extend(lines.steps[0], lines.steps[lines.steps.length - 1]);
  for (const chart of charts) chart.redraw();
  refresh();
}, STEP_REFRESH_MS);

/** @param {Run} run */
function takeRun(run) {
  state.run = run;
  const { step, loss, grad_norm, step_time_s, tokens_per_second } = run;
  if ((step ?? -1) >= (state.now.step ?? -1)) state.now = { step, loss, grad_norm, step_time_s, tokens_per_second };
  showRun(run);
  layers.offer(run.heatmaps);
  ranks.offer(run.rank_quantities);
  takeConnection();
  refresh();
}

/** @param {Columns} columns */
function takeLines({ steps, series }) {
  lines.load(steps, Object.fromEntries(Object.entries(series).map(([name, column]) => [name, column.map(measured)])));
  if (steps.length) view.extend(steps[0], steps[steps.length - 1]);
  offerMeasures();
}

/** @param {Alert} alert */
function takeAlert(alert) {
  state.alerts.set(alert.id, alert);
  fetchVerdict();
  remark();
}

/** @param {Dump} dump */
function takeDump(dump) {
  state.dumps = [...state.dumps.filter(({ id, attempt, step }) => id !== dump.id || attempt !== dump.attempt || step !== dump.step), dump];
  // A dump links alerts to a diagnosis that did not exist when they fired.
  /** @type {Promise<Alert[]>} */ (getJson("api/alerts")).then((list) => list.forEach(takeAlert), () => {});
  remark();
}

/** @param {StepEvent} event */
function takeStep(event) {
  lines.append(event.step, Object.fromEntries(LINES.map((name) => [name, measured(event[IN_EVENTS[name] ?? name])])));
  offerMeasures();
  state.now = event;
  layers.touch();
  curves.touch();
  ranks.touch();
  advance();
}

/** The diagnosis's own sentence for the alert that the page speaks of; asked for once. */
function fetchVerdict() {
  const address = principal([...state.alerts.values()])?.diagnosis;
  const hash = diagnosisHash(address);
  if (!address || !hash || state.verdicts.has(address)) return;
  state.verdicts.set(address, undefined);
  const report = /** @type {Promise<Report>} */ (getJson(`api${hash.slice(1)}`));
  report.then(({ headline }) => (state.verdicts.set(address, headline), refresh()), () => state.verdicts.delete(address));
}

function takeConnection() {
  const finished = hasEnded(state.run);
  const running = !state.run || state.run.state === "running" ? "live" : state.run.state;
  const name = state.connected ? running : finished ? running : "reconnecting";
  showState(name);
  const banner = byId("banner");
  const problem = state.lostAt === null ? state.run?.problem : null;
  banner.hidden = state.lostAt === null && !problem;
  if (banner.hidden) return;
  if (problem) return void ((banner.dataset.tone = "bad"), setText(banner, `The agent cannot store what it reads: ${problem}`));
  banner.dataset.tone = finished ? "calm" : "bad";
  const since = state.lostAt?.toLocaleTimeString() ?? "";
  setText(banner, finished
    ? `The run has finished and its agent has ended. This is what it recorded, up to step ${formatStep(state.now.step)}.`
    : `The agent has not answered since ${since}. Shown is what it said up to step ${formatStep(state.now.step)}; trying again.`);
}

/** @param {"open" | "lost"} event */
function onConnection(event) {
  const again = event === "open" && state.lostAt !== null;
  state.connected = event === "open";
  if (event === "lost") state.lostAt ??= new Date();
  else state.lostAt = null;
  takeConnection();
  refresh();
  // What happened in between was missed.
  if (again) reload();
}

function ask() {
  return {
    run: /** @type {Promise<Run>} */ (getJson("api/run")),
    alerts: /** @type {Promise<Alert[]>} */ (getJson("api/alerts")),
    dumps: /** @type {Promise<Dump[]>} */ (getJson("api/dumps")),
    lines: /** @type {Promise<Columns>} */ (getJson(`api/lines?names=${LINES}`)),
  };
}

/** @param {ReturnType<typeof ask>} answers */
async function loadAll(answers) {
  const grids = [answers.run.then((run) => (layers.offer(run.heatmaps), layers.load())), ranks.load()];
  const [run, list, dumps, columns] = await Promise.all([answers.run, answers.alerts, answers.dumps, answers.lines]);
  state.alerts = new Map(list.map((alert) => [alert.id, alert]));
  state.dumps = dumps;
  takeLines(columns);
  takeRun(run);
  fetchVerdict();
  retable();
  followAddress();
  view.release();
  await Promise.all(grids);
}

/** Ranks, lag and counters change without a step, too. */
async function refreshRun() {
  if (!document.hidden && state.connected) await /** @type {Promise<Run>} */ (getJson("api/run")).then(takeRun, () => {});
  setTimeout(refreshRun, RUN_REFRESH_MS);
}

function showZoom() {
  const [first, last] = view.range;
  byId("zoom-reset").hidden = view.zoomed === null;
  setText(byId("zoom-text"), view.zoomed ? `steps ${formatStep(first)} to ${formatStep(last)}` : "drag across a chart to look closer");
}

/** The steps shown are part of the address; the whole run is not. */
function keepZoom() {
  keep("steps", view.zoomed && view.zoomed.join("-"));
}

/** What an address says is shown as soon as it is known which steps there are. */
function followAddress() {
  followTools();
  const steps = /^(\d+)-(\d+)$/.exec(stated("steps") ?? "");
  if (steps && view.known) view.zoom(Number(steps[1]), Number(steps[2]));
  else if (view.known) view.reset();
}

function route() {
  const match = /^#\/diagnosis\/([^/]+)\/(\d+)\/(\d+)$/.exec(location.hash);
  byId("run").hidden = Boolean(match);
  byId("diagnosis").hidden = !match;
  if (match) showDiagnosis(byId("diagnosis"), { dump: match[1], attempt: match[2], step: match[3], run: asked.run });
  else showAddress();
  scrollTo(0, 0);
}

/** The moment at which everything has been drawn is written down for the benchmark and the tests. */
function markReady() {
  requestAnimationFrame(() => requestAnimationFrame(() => (document.documentElement.dataset.ready = performance.now().toFixed(1))));
}

view.addEventListener("range", showZoom);
view.addEventListener("zoom", keepZoom);
onAddress(() => (followAddress(), layers.follow(), layers.refit(), curves.follow(), showTheme()));
showTheme();
showTools({ view, tracks: () => [...charts, layers.map, curves.chart, ranks.map] });
byId("zoom-reset").addEventListener("click", () => view.reset());
addEventListener("hashchange", route);
showZoom();
route();
/** @param {Partial<Run>} run */
const takeState = (run) => state.run && takeRun({ ...state.run, ...run });
const reload = () => void loadAll(ask()).catch(() => {});
listen({ step: takeStep, alert: takeAlert, dump: takeDump, state: takeState, reload }, onConnection);
loadAll(asked).then(markReady, () => onConnection("lost"));
setTimeout(refreshRun, RUN_REFRESH_MS);
