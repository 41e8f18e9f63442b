// The first difference of two runs, in a sentence for every curve that is shown, with what to do next.

import { getJson } from "../api.js";
import { byId, el, select } from "../dom.js";
import { formatStep } from "../scales.js";

/** @import { DifferenceAnswer, RunEntry } from "./types.js" */

export class Differences {
  /** The run that the first is compared with. */
  other = "";
  #asked = 0;

  /** @param {(step: number) => void} onShow */
  constructor(onShow) {
    this.onShow = onShow;
  }

  /**
   * @param {RunEntry[]} runs - those that are compared, the first of them with one other
   * @param {string[]} names - of the curves
   */
  async load(runs, names) {
    byId("differences").hidden = runs.length < 2;
    if (runs.length < 2) return;
    const others = runs.slice(1);
    if (!others.some(({ key }) => key === this.other)) this.other = others[0].key;
    const choose = (/** @type {string} */ key) => ((this.other = key), void this.load(runs, names));
    const second = others.length > 1 ? select("The other run", others.map(({ key, name }) => [key, name]), this.other, choose) : others[0].name;
    byId("pair").replaceChildren(el("span", { cls: "hint" }, `${runs[0].name} against `, second));
    const mine = ++this.#asked;
    const pair = `${encodeURIComponent(runs[0].key)},${encodeURIComponent(this.other)}`;
    const answers = await Promise.all(names.map((name) => /** @type {Promise<DifferenceAnswer>} */ (getJson(`api/difference?runs=${pair}&name=${encodeURIComponent(name)}`)).catch((error) => String(error.message ?? error))));
    if (mine === this.#asked) byId("sentences").replaceChildren(...answers.map((answer) => this.#line(answer)), next(answers));
  }

  /** @param {DifferenceAnswer | string} answer */
  #line(answer) {
    if (typeof answer === "string") return el("p", { cls: "difference problem" }, answer);
    const step = (answer.beyond_rounding ?? answer.any)?.step;
    const button = step === undefined ? null : el("button", { type: "button", onclick: () => this.onShow(step) }, `Show step ${formatStep(step)}`);
    return el("p", { cls: "difference" }, answer.sentence, button);
  }
}

/** @param {(DifferenceAnswer | string)[]} answers */
function next(answers) {
  const known = answers.filter((answer) => typeof answer !== "string");
  if (!known.length) return "";
  const what = known.some(({ any }) => any) ? "Where it begins, in which module and on which rank: " : "Whether the runs differ in anything else, and where: ";
  return el("p", { cls: "next" }, what, el("code", {}, known[0].command));
}
