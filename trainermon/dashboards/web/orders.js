// What a reader asks of the agent from an alert: a dump, an acknowledgement, a silence. Each order needs the run's
// token, which this tab remembers and nothing else.

import { el, select } from "./dom.js";
import { rememberToken, rememberedToken } from "./token.js";

/** @import { AlertGroup, Content } from "./types.js" */

const NAME = "trainermon-name";
const MINUTES = [["60", "1 hour"], ["480", "8 hours"], ["1440", "1 day"], ["10080", "1 week"]];
const TASKS = [["statistics", "statistics"], ["tensor", "whole tensors"]];

/**
 * @param {Storage} storage
 * @param {string} key
 */
function recalled(storage, key) {
  try {
    return storage.getItem(key) ?? "";
  } catch {
    return "";
  }
}

/**
 * @param {Storage} storage
 * @param {string} key
 * @param {string} value
 */
function remember(storage, key, value) {
  try {
    storage.setItem(key, value);
  } catch {
    // Then it is asked for again.
  }
}

/**
 * @param {string} path
 * @param {unknown} body
 * @param {string} token
 */
async function send(path, body, token) {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token}` };
  const reply = await fetch(path, { method: "POST", headers, body: JSON.stringify(body) });
  if (reply.ok) return;
  if (reply.status === 401) throw new Error("This token is not the right one.");
  const detail = (await reply.json().catch(() => null))?.detail;
  throw new Error(typeof detail === "string" ? detail : `${reply.status} ${reply.statusText}`);
}

/**
 * @param {string} text
 * @param {...Content} control
 */
const field = (text, ...control) => el("label", {}, text, ...control);

/**
 * Asks for name, note and token, and sends the order; stays open, and says why, while it is refused.
 * @param {{title: string, about: string, extra?: HTMLElement[], path: string, body: (by: string, note: string) => unknown}} order
 */
function ask({ title, about, extra = [], path, body }) {
  const by = el("input", { type: "text", required: true, maxlength: 100, autocomplete: "username", value: recalled(localStorage, NAME) });
  const note = el("input", { type: "text", maxlength: 500 });
  const token = el("input", { type: "password", required: true, autocomplete: "off", value: rememberedToken() });
  const problem = el("p", { cls: "bad", role: "alert" });
  const submit = el("button", { type: "submit", cls: "primary" }, title);
  const form = el("form", { method: "dialog" },
    el("h2", {}, title), el("p", { cls: "hint" }, about), ...extra,
    field("Your name", by), field("Note", note),
    field("Token", token, el("span", { cls: "hint" }, "of the run: nodes/<host>/token in its directory; at a controller's address: its own (--token-file). This tab remembers it.")),
    problem, el("div", { cls: "actions" }, el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"), submit));
  const dialog = el("dialog", { "aria-label": title, onclose: () => dialog.remove() }, form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    submit.disabled = true;
    try {
      await send(path, body(by.value.trim(), note.value.trim()), token.value.trim());
      rememberToken(token.value.trim());
      remember(localStorage, NAME, by.value.trim());
      dialog.close();
    } catch (error) {
      problem.textContent = error instanceof Error ? error.message : String(error);
      submit.disabled = false;
    }
  });
  document.body.append(dialog);
  dialog.showModal();
}

/** @param {AlertGroup} alert */
function acknowledge({ rule, members }) {
  ask({
    title: "Acknowledge", about: `${rule}: you know of it, and look after it. Recorded with your name and the time.`,
    path: "api/acknowledgements", body: (by, note) => ({ alert: members.map(({ id }) => id), by, note }),
  });
}

/** @param {AlertGroup} alert */
function silence({ rule, silenced }) {
  let minutes = MINUTES[0][0];
  const series = el("input", { type: "text", maxlength: 500, placeholder: "all, or a pattern such as h.3.*", value: silenced?.series ?? "" });
  ask({
    title: "Silence", about: `${rule}: no dump follows and nobody is notified until then. Alerts are still found and shown here.`,
    extra: [field("For", select("For", MINUTES, minutes, (value) => (minutes = value))), field("Series", series)],
    path: "api/silences", body: (by, note) => ({ rule, minutes: Number(minutes), series: series.value.trim(), by, note }),
  });
}

/** @param {AlertGroup} alert */
function endSilence({ rule, silenced }) {
  ask({
    title: "End the silence", about: `${rule}: dumps and notification are on again.`,
    path: "api/silences", body: (by, note) => ({ rule, minutes: 0, series: silenced?.series ?? "", by, note }),
  });
}

/** @param {AlertGroup} alert */
function dump({ rule, members }) {
  let task = TASKS[0][0];
  const ranks = [...new Set(members.map(({ rank }) => rank))].filter((rank) => rank >= 0);
  ask({
    title: "Dump the next step", about: `${ranks.length ? `Rank ${ranks.join(", ")}` : "Every rank"} writes down the next step that it can.`,
    extra: [field("What", select("What", TASKS, task, (value) => (task = value)))],
    path: "api/commands",
    body: (by, note) => ({
      id: `page-${Date.now().toString(36)}`, action: "dump", task, reason: [`${rule}, ordered by ${by}`, note].filter(Boolean).join(": "),
      ...(ranks.length ? { ranks } : {}),
    }),
  });
}

/**
 * The buttons at an alert.
 * @param {AlertGroup} alert
 */
export function orderButtons(alert) {
  /**
   * @param {string} text
   * @param {(alert: AlertGroup) => void} act
   */
  const button = (text, act) => el("button", { type: "button", onclick: () => act(alert) }, text);
  return el("div", { cls: "actions orders" },
    alert.state === "firing" ? button("Dump…", dump) : null,
    button(alert.acknowledged ? "Acknowledge again…" : "Acknowledge…", acknowledge),
    alert.silenced ? button("End the silence…", endSilence) : button("Silence the rule…", silence));
}
