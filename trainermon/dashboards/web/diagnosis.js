// The report of `trainermon diagnose` for one dump: what happened, the way of the first bad value through the model,
// and the evidence. The JSON is described in analysis/diagnosis/README.md.

import { getJson, graphAddress, number } from "./api.js";
import { el } from "./dom.js";
import { formatCount, formatSpans, formatStep, formatValue } from "./scales.js";
import { table } from "./tables.js";
import { isKind, kindText } from "./words.js";

/** @import { ChainLink, Content, Numeric, RankFinding, Report, Run, TensorFacts } from "./types.js" */

/** @type {Record<string, string>} */
const PHASES = {
  parameter: "in a weight, before the step", forward: "in the forward pass", backward: "in the backward pass",
  reduction: "in the reduction over ranks", before_step: "between the backward pass and the optimizer's step",
  optimizer: "in the optimizer", unknown: "unknown",
};
/** @type {Record<string, [string, string]>} */
const ROLES = {
  origin: ["began here", "firing"], reached: ["came here", "pending"], innocent: ["innocent", "resolved"],
  unknown: ["unknown", "pending"],
};
/** @type {Record<string, string>} */
const AGAIN = { not_reproducible: "not reproducible", unknown: "not known" };
const MOST_CONTRASTS = 64;
/** @type {Record<string, string>} */
const REPLAYS = { nonfinite: "not finite again", clean: "clean", none: "no replay" };

/**
 * Fills `main` with the report of the dump; says so when there is none.
 * @param {HTMLElement} main
 * @param {{dump: string, attempt: string, step: string, run: Promise<Run>}} address
 */
export async function showDiagnosis(main, { dump, attempt, step, run }) {
  const graph = el("a", { href: graphAddress({ id: dump, attempt, step }), cls: "back" }, "Graph of the step");
  // Code, elements of the tensor and plots stand there; whoever asks first waits for it to be written.
  const whole = el("a", { href: `diagnosis/${encodeURIComponent(dump)}/${attempt}/${step}`, cls: "back", target: "_blank" }, "The whole report: code, values and plots");
  main.replaceChildren(back(), el("p", { cls: "empty" }, "Reading the dump…"));
  try {
    const report = /** @type {Report} */ (await getJson(`api/diagnosis/${dump}/${attempt}/${step}`));
    main.replaceChildren(el("nav", { cls: "ways" }, back(), graph), ...article(report));
    run.then(({ diagnosis_pages: has }) => has && graph.after(whole), () => {});
  } catch (error) {
    main.replaceChildren(back(), el("section", { cls: "panel" },
      el("p", { cls: "empty" }, el("strong", {}, "No diagnosis to show. "), error instanceof Error ? error.message : String(error)),
      el("p", { cls: "empty" }, "In the run's directory, ", el("code", {}, `trainermon diagnose . --step ${step}`), " tells more.")));
  }
}

const back = () => el("a", { href: "#", cls: "back" }, "← Back to the run");

/** @param {Report} report */
function article(report) {
  const found = report.verdict === "located";
  const head = el("section", { cls: "health report-head", "data-tone": found ? "bad" : "calm" },
    el("span", { cls: "lamp", "aria-hidden": "true" }),
    el("div", {}, el("p", { cls: "eyebrow" }, eyebrow(report)), el("h1", { cls: "headline" }, report.headline), el("p", { cls: "detail" }, report.reason)));
  const evidence = [ranks(report), parameters(report), list("What followed", report.consequences), list("Also possible", report.candidates), levels(report), contrasts(report), list("Settings that differ", report.setting_differences), list("What this rests on", report.evidence), collect(report)];
  return [head, facts(report), el("div", { cls: "two" }, chain(report), el("div", { cls: "stack" }, evidence.filter(Boolean)))];
}

/** @param {Report} report */
function eyebrow({ run_id: run, step, attempt }) {
  return step === null ? `Diagnosis of ${run}` : `Diagnosis of ${run}, step ${formatStep(step)}, attempt ${attempt}`;
}

/**
 * @param {string} label
 * @param {...Content} value
 */
const entry = (label, ...value) => el("div", { cls: "figure" }, el("dt", {}, label), el("dd", {}, ...value));

/** @param {Report} report */
function facts(report) {
  const { rank, module, class_name: type, call, phase, micro_step: microStep, tensor, source, dump, api } = report;
  const made = report.classification?.source;
  return el("dl", { cls: "figures facts-of-report" },
    entry("Rank", rank === null ? "unknown" : String(rank)),
    entry("Module", el("code", {}, module || "unknown"), type ? el("small", {}, ` ${type}`) : null, call ? el("small", {}, ` call ${call}`) : null),
    api ? entry("Function", el("code", {}, api)) : null,
    entry("Where", PHASES[phase] ?? phase),
    tensor && entry("Tensor", el("code", {}, tensor.slot), el("small", {}, ` ${shapeText(tensor)}`)),
    microStep === null || microStep === undefined ? null : entry("Micro step", String(microStep)),
    ...causes(report),
    made && entry("Made in", el("code", {}, made)),
    source && source !== made ? entry("Called in", el("code", {}, source)) : null,
    dump && entry("Dump", el("code", {}, dump)));
}

/**
 * Why the first bad operation gave what it gave, and whether the step gives it again; as far as a replay has told.
 * @param {Report} report
 */
function causes({ classification: verdict, reproducibility: again, reproducibility_reason: why }) {
  const because = verdict && [verdict.operation, verdict.reason].filter(Boolean).join(": ");
  const collect = verdict?.collect ? `. To know: ${verdict.collect}` : "";
  return [
    verdict && entry("Cause", verdict.cause, el("small", {}, ` ${because}${collect}`)),
    again && entry("Run again", AGAIN[again] ?? again, el("small", {}, ` ${why}`)),
  ];
}

/** @param {TensorFacts} tensor */
const shapeText = ({ shape, dtype }) => [dtype?.replace(/^torch\./, ""), shape?.length ? `[${shape.join(" × ")}]` : ""].filter(Boolean).join(" ");

/** @param {Pick<TensorFacts, "count" | "nans" | "infs">} tensor */
function countsText({ count, nans, infs }) {
  const all = count > 0 && nans + infs === count;
  if (all && count > 1 && !(nans > 0 && infs > 0)) return `all ${formatCount(count)} elements ${nans ? "NaN" : "Inf"}`;
  const bad = [nans > 0 && `${formatStep(nans)} NaN`, infs > 0 && `${formatStep(infs)} Inf`].filter(Boolean).join(", ");
  if (!bad) return nans < 0 && infs < 0 ? "not finite" : "";
  return count > 1 ? `${bad} of ${formatCount(count)} elements` : bad;
}

/** @param {TensorFacts} tensor */
function rangeText({ min, max }) {
  if (min === null || max === null || min === undefined || max === undefined) return "no finite element";
  return `finite ones ${formatValue(number(min))} to ${formatValue(number(max))}`;
}

/**
 * A bar as wide as the share of non-finite elements; even one element gets a visible sliver.
 * @param {TensorFacts} tensor
 */
function shareBar({ count, nans, infs }) {
  const bad = Math.max(0, nans) + Math.max(0, infs);
  if (!(count > 0) || !bad) return null;
  const fill = el("i");
  fill.style.width = `${Math.max(2, (100 * bad) / count)}%`;
  return el("span", { cls: "share", "aria-hidden": "true" }, fill);
}

/** @param {Report} report */
function chain({ chain: links, phase }) {
  if (!links.length) return el("section", { cls: "panel" }, el("h2", {}, "Its way through the model"), el("p", { cls: "empty" }, "No module is known."));
  const backward = phase === "backward";
  const items = links.flatMap((link, k) => [omitted(link), node(link, k === 0)]);
  const end = backward ? "to the model's input" : "to the loss";
  return el("section", { cls: "panel" },
    el("header", { cls: "panel-head" }, el("h2", {}, "Its way through the model"), el("span", { cls: "hint" }, `from where it began ${end}`)),
    el("ol", { cls: "chain" }, items.filter(Boolean)));
}

/** @param {ChainLink} link */
const omitted = ({ omitted: count }) =>
  count ? el("li", { cls: "omitted" }, `${formatStep(count)} ${count === 1 ? "module" : "modules"} left out`) : null;

/**
 * @param {ChainLink} link
 * @param {boolean} first
 */
function node({ module, class_name: type, direction, call, tensor }, first) {
  return el("li", { cls: first ? "first" : null },
    el("div", { cls: "node-head" }, el("code", {}, module), type && module !== type ? el("span", { cls: "hint" }, type) : null,
      el("span", { cls: "direction" }, direction === "backward" ? "↑ backward" : "↓ forward"),
      first ? el("span", { cls: "pill firing" }, "began here") : null),
    el("div", { cls: "node-stats" }, el("code", {}, tensor.slot), el("span", {}, shapeText(tensor)),
      el("span", { cls: "bad" }, countsText(tensor)), el("span", {}, rangeText(tensor)),
      call ? el("span", {}, `call ${call}`) : null),
    shareBar(tensor));
}

/**
 * Ranks of which the same is known share a row: with a thousand of them the odd one out must be seen.
 * @param {RankFinding[]} findings
 */
function alike(findings) {
  /** @type {Map<string, Omit<RankFinding, "rank"> & {ranks: number[]}>} */
  const groups = new Map();
  for (const { rank, ...known } of findings) {
    const key = JSON.stringify(known);
    const group = groups.get(key);
    if (group) group.ranks.push(rank);
    else groups.set(key, { ...known, ranks: [rank] });
  }
  const order = ["origin", "reached", "unknown", "innocent"];
  return [...groups.values()].sort((a, b) => order.indexOf(a.role) - order.indexOf(b.role));
}

/** @param {Report} report */
function ranks({ ranks: findings }) {
  if (!findings.length) return null;
  /** @param {number | null | undefined} count */
  const gradients = (count) => (count === null || count === undefined ? "–" : formatStep(count));
  const rows = alike(findings).map(({ ranks: members, role, replay, replay_reason: why, unreduced, reduced }) => {
    const [text, tone] = ROLES[role] ?? [role, "pending"];
    return el("tr", {}, el("td", {}, formatSpans(members)), el("td", {}, el("span", { cls: `pill ${tone}` }, text)),
      el("td", {}, [REPLAYS[replay] ?? replay, why].filter(Boolean).join(": ")), el("td", { cls: "num" }, gradients(unreduced)), el("td", { cls: "num" }, gradients(reduced)));
  });
  return el("section", { cls: "panel" },
    el("header", { cls: "panel-head" }, el("h2", {}, "Ranks"), el("span", { cls: "hint" }, "non-finite gradients before and after the reduction")),
    el("div", { cls: "scroll" }, table("rank-table", ["Ranks", "Role", "Replay", "Before", "After"], rows)));
}

/** @param {Report} report */
function parameters({ parameters: bad, rank }) {
  if (!bad.length) return null;
  const rows = bad.map(({ name, count, nans, infs }) => el("tr", {},
    el("td", { cls: "where" }, el("code", { title: name }, name)), el("td", { cls: "num bad" }, countsText({ count, nans, infs }))));
  return el("section", { cls: "panel" },
    el("header", { cls: "panel-head" }, el("h2", {}, "Weights that were not finite"), el("span", { cls: "hint" }, `before the step, on rank ${rank}`)),
    el("div", { cls: "scroll" }, table("parameter-table", ["Parameter", "Value"], rows)));
}

/** @param {Report} report */
function levels({ levels: found = [] }) {
  if (!found.length) return null;
  const rows = found.map(({ level, answer, reason, source }) => el("tr", {},
    el("td", {}, level.replaceAll("_", " ")), el("td", { cls: "where" }, answer || "–"), el("td", { cls: "where" }, reason), el("td", { cls: "where hint" }, source)));
  return el("section", { cls: "panel" }, el("h2", {}, "How it was found"),
    el("div", { cls: "scroll" }, table("level-table cards", ["Level", "Answer", "Because", "By"], rows)));
}

/**
 * "grad_reduced h.0.weight" is how files name a series.
 * @param {string} place
 */
function placeOf(place) {
  const [kind, name] = [place.slice(0, place.indexOf(" ")), place.slice(place.indexOf(" ") + 1)];
  return isKind(kind) ? [el("code", {}, name), " ", el("span", { cls: "hint" }, kindText(kind))] : [el("code", {}, place)];
}

/** @param {Record<string, Numeric>} values */
const numbersText = (values) => Object.entries(values).filter(([, value]) => value !== null).map(([name, value]) => `${name} ${formatValue(number(value))}`).join(", ") || "–";

/** @param {Report} report */
function contrasts({ contrasts: found = [], reference }) {
  if (!found.length) return null;
  const rows = found.slice(0, MOST_CONTRASTS).map(({ rank, place, value, usual, relative }) => el("tr", {},
    el("td", { cls: "where" }, placeOf(place)), el("td", { cls: "num" }, rank === null ? "–" : String(rank)),
    el("td", { cls: "where" }, numbersText(value)), el("td", { cls: "where" }, numbersText(usual)), el("td", { cls: "num" }, formatValue(number(relative), 2))));
  return el("section", { cls: "panel" }, el("h2", {}, "Beside what it should be"),
    el("div", { cls: "scroll" }, table("contrast-table cards", ["Place", "Rank", "Here", reference ? "Reference" : "Usual", "Apart by"], rows)));
}

/** @param {Report} report */
function collect({ collect: order }) {
  if (!order) return null;
  const settings = [["config.json, for PrecisionDebugger", order.debugger], ["monitor_config.json, for TrainerMon", order.monitor]];
  return el("section", { cls: "panel" }, el("h2", {}, "What to collect next"), el("p", {}, order.reason),
    settings.flatMap(([name, wanted]) => (wanted ? [el("p", { cls: "hint" }, String(name)), el("pre", { cls: "scroll settings" }, JSON.stringify(wanted, null, 2))] : [])));
}

/**
 * @param {string} title
 * @param {string[] | undefined} texts
 */
function list(title, texts) {
  if (!texts?.length) return null;
  return el("section", { cls: "panel" }, el("h2", {}, title), el("ul", { cls: "notes" }, texts.map((text) => el("li", {}, text))));
}
