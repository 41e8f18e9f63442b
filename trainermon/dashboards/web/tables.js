// Alerts and dumps as tables.

import { diagnosisHash, graphAddress, hasEnded, number } from "./api.js";
import { byId, el, setText } from "./dom.js";
import { orderButtons } from "./orders.js";
import { formatSpans, formatStatistic, formatStep, formatTime, formatValue, isTime } from "./scales.js";
import { GLYPHS } from "./theme.js";
import { kindText } from "./words.js";

/** @import { Alert, AlertGroup, Dump, Finding, Numeric, Run, Series } from "./types.js" */

const SHOWN = 100;
const MESSAGES = 8;
/** @type {Record<string, string>} */
const STATUSES = { nonfinite: "replayed, not finite again", clean: "replayed, clean" };
/** @type {Record<string, string>} */
const STATUS_TONES = { nonfinite: "firing", clean: "resolved", written: "resolved" };
/** @type {Set<string>} */
const open = new Set();
let showAll = false;
// Only an agent takes orders; a run that is only stored has nobody who would.
const ENDED = "The run has ended: there is nothing left to dump, and no agent that takes an acknowledgement or a silence.";
const ELSEWHERE = "This page only shows. Dumps are ordered, and alerts acknowledged and silenced, on the page of the run's agent, or by trainermon alerts on its node.";
/** Why no orders are taken here; "": they are. */
let refusal = "";

/**
 * Readable name of a series; the same text as SeriesKey.label in Python.
 * @param {Series} series
 */
export function seriesLabel({ name, slot, call, micro_step: microStep, stage }) {
  let text = slot ? `${name}.${slot}` : name;
  if (call) text += `#${call}`;
  if (microStep !== null && microStep !== undefined) text += `@${microStep}`;
  return stage ? `${stage}:${text}` : text;
}

/**
 * An alert's message without the name of its rule, which stands beside it.
 * @param {Pick<Alert, "rule" | "message">} alert
 */
export const sentence = ({ rule, message }) => (message?.startsWith(`${rule}: `) ? message.slice(rule.length + 2) : message || rule);

/**
 * One row for what a rule found at one step, however many ranks have it: after a reduction that is all of them.
 * @param {Alert[]} alerts
 * @returns {AlertGroup[]}
 */
function grouped(alerts) {
  /** @type {Map<string, Alert[]>} */
  const groups = new Map();
  for (const alert of alerts) groups.set(keyOf(alert), [...(groups.get(keyOf(alert)) ?? []), alert]);
  return [...groups.values()].map((members) => {
    members.sort((a, b) => Number(Boolean(b.diagnosis)) - Number(Boolean(a.diagnosis)) || a.rank - b.rank);
    return { ...members[0], members, num_series: Math.max(...members.map((alert) => alert.num_series)) };
  });
}

/** @param {Pick<Alert, "rule" | "attempt" | "first_step" | "state" | "severity">} alert */
const keyOf = ({ rule, attempt, first_step: step, state, severity }) => [rule, attempt, step, state, severity].join(" ");

/**
 * How many findings `alerts` are, of whatever number of ranks, so that every place counts alike.
 * @param {Parameters<typeof keyOf>[0][]} alerts
 */
export const countAlerts = (alerts) => new Set(alerts.map(keyOf)).size;

/**
 * How many findings fire, as a figure: silenced ones are counted and named, and do not colour it.
 * @param {(Parameters<typeof keyOf>[0] & { silenced?: unknown })[]} alerts
 */
export function firingFigure(alerts) {
  const all = countAlerts(alerts);
  const heard = countAlerts(alerts.filter(({ silenced }) => !silenced));
  return { heard, text: heard < all ? `${all}, of these ${all - heard} silenced` : `${all}`, tone: heard ? "bad" : "" };
}

/**
 * What a rule found again and again, and is over, as one: the first, and the others in order.
 * @param {AlertGroup[]} groups - in order
 */
function folded(groups) {
  /** @type {Map<string, AlertGroup[]>} */
  const found = new Map();
  for (const group of groups) {
    const key = group.state === "resolved" ? [group.rule, group.attempt, group.severity].join(" ") : group.id;
    found.set(key, [...(found.get(key) ?? []), group]);
  }
  return [...found.values()];
}

/**
 * Firing ones first; then by where they began, because the first one is most often the cause of the others.
 * @param {Alert[]} alerts
 */
function order(alerts) {
  /** @param {Alert} alert */
  const key = ({ state }) => ["firing", "pending", "resolved"].indexOf(state);
  return grouped(alerts).sort((a, b) => key(a) - key(b) || a.attempt - b.attempt || a.first_step - b.first_step || a.rank - b.rank);
}

/**
 * How many rules watch, and how many cannot.
 * @param {{rules?: number, rules_without_loss?: number}} run
 */
export function watching({ rules, rules_without_loss: blind }) {
  if (!rules) return "The rules are watching";
  return blind ? `${rules - blind} of ${rules} rules are watching, ${blind} have no loss to look at` : `${rules} rules are watching`;
}

/**
 * @param {Alert[]} alerts
 * @param {{run: Run | null, onShow: (step: number) => void}} actions
 */
export function showAlerts(alerts, { run, onShow }) {
  refusal = hasEnded(run) ? ENDED : run?.takes_orders ? "" : ELSEWHERE;
  const all = order(alerts);
  const firing = all.filter(({ state }) => state === "firing").length;
  setText(byId("alerts-hint"), all.length ? `${firing} firing, ${all.length} in all` : "");
  if (!alerts.length) {
    byId("alerts").replaceChildren(empty("No alerts.", `${watching(run ?? {})}.`));
    return;
  }
  const redraw = () => showAlerts(alerts, { run, onShow });
  const rowsOfAll = folded(all);
  const shown = showAll ? rowsOfAll : rowsOfAll.slice(0, SHOWN);
  const head = ["Severity", "Rule", "Step", "Ranks", "Where", "Value", "Expected", "State", ""];
  const rows = shown.flatMap((groups) => foldRows(groups, { onShow, redraw }));
  const more = shown.length < rowsOfAll.length
    && el("button", { type: "button", cls: "more", onclick: () => ((showAll = true), redraw()) }, `Show all ${rowsOfAll.length}`);
  keepFocus(() => byId("alerts").replaceChildren(table("alert-table cards", head, rows), more || ""));
}

/**
 * A table that is built anew must not take the focus away from the button that was pressed.
 * @param {() => void} rebuild
 */
function keepFocus(rebuild) {
  const id = document.activeElement?.id;
  rebuild();
  if (id && document.activeElement?.id !== id) document.getElementById(id)?.focus();
}

/**
 * @param {AlertGroup[]} groups - of one rule
 * @param {{onShow: (step: number) => void, redraw: () => void}} actions
 */
function foldRows([first, ...others], actions) {
  if (!others.length) return alertRows(first, actions);
  const id = `again-${first.id}`;
  const toggle = () => (open.has(id) ? open.delete(id) : open.add(id), actions.redraw());
  const isOpen = open.has(id);
  const times = el("button", { type: "button", cls: "link more-series", id, "aria-expanded": String(isOpen), onclick: toggle, title: `found ${others.length + 1} times, last at step ${formatStep(others[others.length - 1].first_step)}` }, `${isOpen ? "▾" : "▸"} ${formatStep(others.length + 1)} times`);
  return [...alertRows(first, actions, times), ...(isOpen ? others.flatMap((group) => alertRows(group, actions)) : [])];
}

/**
 * @param {AlertGroup} alert
 * @param {{onShow: (step: number) => void, redraw: () => void}} actions
 * @param {HTMLElement | string} [times] - how often, where others are folded into it
 */
function alertRows(alert, { onShow, redraw }, times = "") {
  const { id, severity, state, findings = [] } = alert;
  const toggle = () => (open.has(id) ? open.delete(id) : open.add(id), redraw());
  const isOpen = open.has(id);
  const row = el("tr", { cls: `alert ${state}`, "data-severity": severity },
    el("td", {}, el("span", { cls: `severity ${severity}` }, el("span", { "aria-hidden": "true" }, `${GLYPHS[severity] ?? "●"} `), severity)),
    el("td", {}, alert.rule, times && " ", times),
    el("td", { cls: "num" }, el("button", { type: "button", cls: "link", title: "Show this step in the charts", onclick: () => onShow(alert.first_step) }, formatStep(alert.first_step))),
    el("td", {}, rankSpans(alert.members) || "–"),
    el("td", { cls: "where" }, where(alert, { toggle, isOpen })),
    el("td", { cls: "num" }, ...against(alert)),
    el("td", { cls: "num" }, expected(alert.baseline, alert.statistic, worst(alert))),
    el("td", {}, el("span", { cls: `pill ${state}` }, state === "resolved" ? `resolved at ${formatStep(alert.step)}` : state), saidOf(alert)),
    el("td", { cls: "links" }, diagnosisLink(alert.diagnosis), " ", reportLink(alert.report), " ", runbookLink(alert)));
  if (!isOpen) return [row];
  return [row, el("tr", { cls: "detail-row" }, el("td", { colspan: "9", id: `detail-${id}` }, detail(alert, findings)))];
}

/**
 * What people have said about an alert.
 * @param {AlertGroup} alert
 */
function saidOf({ acknowledged: known, silenced: quiet }) {
  return [
    known ? el("span", { cls: "said", title: known.note || null }, `known to ${known.by}, ${formatTime(known.time_s)}`) : null,
    quiet ? el("span", { cls: "said", title: quiet.note || null }, `silenced by ${quiet.by} until ${formatTime(quiet.until_s)}`) : null,
  ];
}

/** @param {Pick<Alert, "rule" | "runbook">} alert */
const runbookLink = ({ rule, runbook }) => el("a", { href: `runbook/${encodeURIComponent(runbook ?? rule)}`, target: "_blank" }, "runbook");

/**
 * @param {AlertGroup} alert
 * @param {{toggle: () => void, isOpen: boolean}} fold
 */
function where(alert, { toggle, isOpen }) {
  const findings = alert.findings ?? [];
  const label = findings.length ? seriesLabel(findings[0].series) : kindText(alert.kind);
  const others = Math.max(0, alert.num_series - 1);
  const text = others ? `+ ${formatStep(others)} more` : "details";
  const button = el("button", { type: "button", cls: "link more-series", id: `toggle-${alert.id}`, "aria-expanded": String(isOpen), "aria-controls": `detail-${alert.id}`, onclick: toggle }, text);
  return [el("code", { title: label }, label), " ", button];
}

/**
 * @param {Alert} alert
 * @returns {Series}
 */
const worst = ({ findings = [], kind }) => findings[0]?.series ?? { kind };

/**
 * The value, and how many times the expected one it is where that says something.
 * @param {Alert} alert
 */
function against(alert) {
  const [value, baseline] = [number(alert.value), number(alert.baseline)];
  const ratio = value === null || baseline === null ? NaN : value / baseline;
  const says = Number.isFinite(ratio) && ratio > 0 && (ratio >= 1.05 || ratio <= 0.95);
  const text = ratio >= 1 ? ` (${formatValue(ratio, 2)} ×)` : ` (÷ ${formatValue(1 / ratio, 2)})`;
  return [formatStatistic(value, alert.statistic, worst(alert)), says ? el("span", { cls: "ratio" }, text) : null];
}

/**
 * The unit stands with the value; only a time needs it here too. A rule with a limit of its own learns nothing to expect.
 * @param {Numeric} baseline
 * @param {string | null} statistic
 * @param {Series} series
 */
const expected = (baseline, statistic, series) => {
  const value = Number.isNaN(number(baseline)) ? null : number(baseline);
  return isTime(series) ? formatStatistic(value, statistic, series) : formatValue(value);
};

/**
 * @param {AlertGroup} alert
 * @param {Finding[]} findings
 */
function detail(alert, findings) {
  const rows = findings.map(({ series, value, baseline }) => el("tr", {},
    el("td", {}, el("code", {}, seriesLabel(series))),
    el("td", {}, kindText(series.kind)),
    el("td", { cls: "num" }, formatStatistic(number(value), alert.statistic, series)),
    el("td", { cls: "num" }, expected(baseline, alert.statistic, series))));
  const rest = alert.num_series - findings.length;
  return el("div", { cls: "findings" },
    alert.members.slice(0, MESSAGES).map((member) => el("p", {}, sentence(member))),
    alert.members.length > MESSAGES ? el("p", { cls: "hint" }, `and alike on ${alert.members.length - MESSAGES} more ranks`) : null,
    rows.length ? table("finding-table", ["Series", "Kind", "Value", "Expected"], rows) : null,
    rest > 0 ? el("p", { cls: "hint" }, `and ${formatStep(rest)} more series; these are the worst.`) : null,
    refusal ? el("p", { cls: "hint" }, refusal) : orderButtons(alert));
}

/**
 * @param {Dump[]} dumps
 * @param {{onShow: (step: number) => void}} actions
 */
export function showDumps(dumps, { onShow }) {
  setText(byId("dumps-hint"), dumps.length ? String(dumps.length) : "");
  if (!dumps.length) {
    byId("dumps").replaceChildren(empty("No dumps.", "A step whose gradients are not finite is replayed and dumped by itself."));
    return;
  }
  const rows = dumps.map((dump) => el("tr", {},
    el("td", { cls: "num" }, el("button", { type: "button", cls: "link", onclick: () => onShow(dump.step) }, formatStep(dump.step))),
    el("td", { cls: "num" }, String(dump.attempt)),
    el("td", {}, formatSpans(dump.ranks ?? [])),
    el("td", {}, el("span", { cls: `pill ${STATUS_TONES[dump.status] ?? "pending"}` }, STATUSES[dump.status] ?? dump.status)),
    el("td", { cls: "where" }, el("code", { title: dump.path }, dump.path ?? "–")),
    el("td", { cls: "links" }, el("a", { href: graphAddress(dump) }, "graph"), " ", diagnosisLink(dump.diagnosis))));
  byId("dumps").replaceChildren(table("dump-table cards", ["Step", "Attempt", "Ranks", "Status", "Path", ""], rows));
}

/** @param {string | null | undefined} address */
function diagnosisLink(address) {
  const hash = diagnosisHash(address);
  return hash ? el("a", { href: hash }, "diagnosis") : "";
}

/**
 * The post-mortem of a hang or a crash opens beside the page, as text.
 * @param {string | null | undefined} address
 */
function reportLink(address) {
  return address ? el("a", { href: address, target: "_blank" }, "post-mortem") : "";
}

/**
 * The ranks of alerts in words; "" where no rank of this node is to blame (rank -1).
 * @param {Pick<Alert, "rank">[]} alerts
 */
export const rankSpans = (alerts) => formatSpans(alerts.map(({ rank }) => rank).filter((rank) => rank >= 0));

const NUMERIC = ["Step", "Value", "Expected", "Attempt", "Before", "After"];

/**
 * With the class "cards" a row becomes a card on a phone, and each cell needs the name of its column.
 * @param {string} cls
 * @param {string[]} head
 * @param {HTMLTableRowElement[]} rows
 */
export function table(cls, head, rows) {
  for (const { cells } of rows) if (cells.length === head.length) head.forEach((text, k) => text && (cells[k].dataset.label = text));
  const titles = head.map((text) => el("th", { scope: "col", cls: NUMERIC.includes(text) ? "num" : null }, text || el("span", { cls: "visually-hidden" }, "Links")));
  return el("table", { cls }, el("thead", {}, el("tr", {}, titles)), el("tbody", {}, rows));
}

/**
 * @param {string} headline
 * @param {string} detail
 */
export function empty(headline, detail) {
  return el("p", { cls: "empty" }, el("strong", {}, headline), ` ${detail}`);
}

