// The sentence on top of the page: is the training healthy, and if not, where did it begin?

import { diagnosisHash, number } from "./api.js";
import { byId, el } from "./dom.js";
import { formatStep, formatValue } from "./scales.js";
import { seriesLabel } from "./tables.js";

const URGENCY = ["fatal", "critical", "warning", "info"];

/** The alert to speak of: the most severe, of those the one that began first, which is most often the cause. */
export function principal(alerts) {
  return [...alerts].sort(
    (a, b) => URGENCY.indexOf(a.severity) - URGENCY.indexOf(b.severity)
      || a.attempt - b.attempt || a.first_step - b.first_step,
  )[0];
}

/** What to say: {tone, headline, detail, link}. `verdict` is the headline of its diagnosis, when there is one. */
export function assess(run, alerts, step, verdict) {
  const active = alerts.filter(({ state }) => state === "firing");
  const grave = alerts.filter(({ severity, state }) => severity === "fatal" && state !== "pending");
  if (active.length || grave.length) return unhealthy(active.length ? [...active, ...grave] : grave, verdict, active.length);
  if (step === null || step === undefined) {
    const detail = "The charts fill in as soon as a rank has finished one.";
    return { tone: "calm", headline: run.state === "finished" ? "The run ended without a step" : "Waiting for the first step", detail };
  }
  const lost = run.state === "running" ? run.ranks.filter((rank) => !rank.alive) : [];
  if (lost.length) {
    const names = lost.slice(0, 8).map(({ rank }) => rank).join(", ");
    return { tone: "bad", headline: `Rank ${names}${lost.length > 8 ? " …" : ""} is gone`, detail: `Last seen at step ${formatStep(lost[0].step)}.` };
  }
  return healthy(run, alerts, step);
}

function healthy(run, alerts, step) {
  const past = alerts.filter(({ state }) => state === "resolved");
  const headline = run.state === "finished" ? `Finished healthy at step ${formatStep(step)}` : "Training is healthy";
  const watching = run.rules ? `${run.rules} rules are watching` : "The rules are watching";
  if (!past.length) return { tone: "good", headline, detail: `${watching}; none has fired.` };
  const last = Math.max(...past.map((alert) => alert.step));
  const count = past.length === 1 ? "One earlier alert is" : `${past.length} earlier alerts are`;
  return { tone: "good", headline, detail: `${count} over, the last since step ${formatStep(last)}.` };
}

function unhealthy(alerts, verdict, firing) {
  const first = principal(alerts);
  const tone = ["fatal", "critical"].includes(first.severity) ? "bad" : "warn";
  const place = first.findings?.length ? seriesLabel(first.findings[0].series) : first.kind;
  const headline = tone === "warn"
    ? `Needs a look since step ${formatStep(first.first_step)}: ${first.message || first.rule}`
    : `Not healthy since step ${formatStep(first.first_step)}: ${first.message || first.rule}`;
  const fallback = `Rank ${first.rank}, ${place}: ${formatValue(number(first.value))} where ${formatValue(number(first.baseline))} was expected.`;
  return { tone: firing || tone === "bad" ? tone : "calm", headline, detail: verdict ?? fallback, alert: first, link: diagnosisHash(first.diagnosis) };
}

export function showHealth({ tone, headline, detail, link, alert }, onShow) {
  const actions = el("div", { cls: "actions" });
  if (alert) actions.append(el("button", { type: "button", onclick: () => onShow(alert.first_step) }, "Show the step"));
  if (link) actions.append(el("a", { cls: "button primary", href: link }, "Open the diagnosis"));
  const text = el("div", {}, el("p", { cls: "headline" }, headline), el("p", { cls: "detail" }, detail));
  byId("health").dataset.tone = tone;
  byId("health").replaceChildren(el("span", { cls: "lamp", "aria-hidden": "true" }), text, actions);
}
