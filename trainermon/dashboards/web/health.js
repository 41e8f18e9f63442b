// The sentence on top of the page: is the training healthy, and if not, where did it begin?

import { diagnosisHash, hasEnded } from "./api.js";
import { byId, el } from "./dom.js";
import { formatSpans, formatStep } from "./scales.js";
import { countAlerts, rankSpans, sentence, watching } from "./tables.js";

/** @import { Alert, Assessment, Run } from "./types.js" */

export const NO_LOSS = "No loss is recorded: call monitor.record(loss=loss) in each step of the script.";
const URGENCY = ["fatal", "critical", "warning", "info"];

/**
 * The alert to speak of: the most severe that fires, of those the one that began first, most often the cause.
 * @param {Alert[]} alerts
 * @returns {Alert | undefined}
 */
export function principal(alerts) {
  return alerts.filter(({ state }) => state === "firing").sort(
    (a, b) => URGENCY.indexOf(a.severity) - URGENCY.indexOf(b.severity) || a.attempt - b.attempt
      || a.first_step - b.first_step || Number(Boolean(b.diagnosis)) - Number(Boolean(a.diagnosis)) || a.rank - b.rank,
  )[0];
}

/**
 * What to say: {tone, headline, details, alert}. `verdict` is the headline of the diagnosis, when there is one.
 * @param {{run: Run, alerts: Alert[], step?: number | null, verdict?: string, lost: boolean}} known
 * @returns {Assessment}
 */
export function assess({ run, alerts, step, verdict, lost }) {
  const finished = hasEnded(run) || run.state === "empty";
  const first = principal(alerts);
  if (first) return unhealthy(first, alerts, verdict);
  const gone = run.state === "running" ? run.ranks.filter((rank) => !rank.alive) : [];
  if (gone.length) {
    const names = formatSpans(gone.map(({ rank }) => rank));
    const headline = gone.length === 1 ? `Rank ${names} is gone` : `Ranks ${names} are gone`;
    return { tone: "bad", headline, details: [`Last seen at step ${formatStep(gone[0].step)}.`] };
  }
  if (step === null || step === undefined) {
    if (finished) return { tone: "calm", headline: "The run ended without a step", details: [] };
    return { tone: "calm", headline: "Waiting for the first step", details: ["The charts fill in as soon as every rank has finished one."] };
  }
  const details = [history(run, alerts), ...(run.rules_without_loss ? [NO_LOSS] : [])];
  if (finished) return { tone: "good", headline: `Finished healthy at step ${formatStep(step)}`, details };
  if (run.state === "silent") return { tone: "warn", headline: `Silent since step ${formatStep(step)}`, details: ["Its agent has not ended, and stores nothing any more: it was killed, or its node is gone.", ...details] };
  if (lost) return { tone: "warn", headline: "The agent does not answer", details: [`Training was healthy up to step ${formatStep(step)}.`] };
  return { tone: "good", headline: "Training is healthy", details };
}

/**
 * @param {Run} run
 * @param {Alert[]} alerts
 */
function history(run, alerts) {
  const past = alerts.filter(({ state }) => state === "resolved");
  if (!past.length) return `${watching(run)}; none has fired.`;
  const last = formatStep(Math.max(...past.map((alert) => alert.step)));
  const count = countAlerts(past);
  return count === 1 ? `One earlier alert is over since step ${last}.` : `${count} earlier alerts are over, the last since step ${last}.`;
}

/**
 * @param {Alert} first
 * @param {Alert[]} alerts
 * @param {string | undefined} verdict
 * @returns {Assessment}
 */
function unhealthy(first, alerts, verdict) {
  const tone = ["fatal", "critical"].includes(first.severity) ? "bad" : "warn";
  const same = alerts.filter(({ rule, first_step: step, state }) => rule === first.rule && step === first.first_step && state === "firing");
  const ranks = rankSpans(same);
  // A reduction carries a bad gradient to every rank; where it came from only the diagnosis knows.
  const where = verdict || !ranks ? "" : ` on ${same.length === 1 ? "rank" : "ranks"} ${ranks}`;
  const headline = `${tone === "bad" ? "Not healthy" : "Needs a look"} since step ${formatStep(first.first_step)}${where}`;
  return { tone, headline, details: [verdict ?? sentence(first)], alert: first };
}

/**
 * @param {Assessment} assessment
 * @param {(step: number) => void} onShow
 */
export function showHealth({ tone, headline, details, alert }, onShow) {
  const key = JSON.stringify([tone, headline, details, alert?.diagnosis]);
  // Built anew only when it says something new: a screen reader reads it out, and a button keeps the focus.
  if (byId("health").dataset.key === key) return;
  byId("health").dataset.key = key;
  const actions = el("div", { cls: "actions" });
  const link = alert && diagnosisHash(alert.diagnosis);
  if (alert) actions.append(el("button", { type: "button", onclick: () => onShow(alert.first_step) }, "Show the step"));
  if (link) actions.append(el("a", { cls: "button primary", href: link }, "Open the diagnosis"));
  if (alert?.report) actions.append(el("a", { cls: "button primary", href: alert.report, target: "_blank" }, "Open the post-mortem"));
  const text = el("div", {}, el("p", { cls: "headline" }, headline), details.map((detail) => el("p", { cls: "detail" }, detail)));
  byId("health").dataset.tone = tone;
  byId("health").replaceChildren(el("span", { cls: "lamp", "aria-hidden": "true" }), text, actions);
}
