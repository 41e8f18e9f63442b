// Elements are made here and nowhere else. Text only ever enters the page as a text node, because layer names, run ids
// and messages come from the training process and are not trusted.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name === "cls" ? "class" : name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

export function setText(node, text) {
  // Writing equal text would still invalidate layout and restart a screen reader's announcement.
  if (node.textContent !== text) node.textContent = text;
}

/** A labelled select; keyboard and screen readers come with the native element. */
export function select(label, options, value, onchange) {
  const choices = options.map(([key, text]) => el("option", { value: key, selected: key === value }, text));
  const input = el("select", { "aria-label": label, onchange: () => onchange(input.value) }, choices);
  return input;
}

/** Two or three exclusive choices shown side by side. */
export function segmented(label, options, value, onchange) {
  const group = el("div", { cls: "segmented", role: "group", "aria-label": label });
  const mark = (chosen) => {
    for (const button of group.children) button.setAttribute("aria-pressed", String(button.value === chosen));
  };
  for (const [key, text] of options) {
    const choose = () => (mark(key), onchange(key));
    group.append(el("button", { type: "button", value: key, onclick: choose }, text));
  }
  mark(value);
  return group;
}

/** Sharp on every display: the bitmap has device pixels, the drawing code thinks in CSS pixels. */
export function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const [deviceWidth, deviceHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== deviceWidth || canvas.height !== deviceHeight) {
    canvas.width = deviceWidth;
    canvas.height = deviceHeight;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** Runs `work` soon after a call, but never more often than every `intervalMs`. */
export function paced(work, intervalMs) {
  let [timer, last] = [null, -Infinity];
  const run = () => {
    [timer, last] = [null, performance.now()];
    work();
  };
  return () => {
    timer ??= setTimeout(run, Math.max(0, last + intervalMs - performance.now()));
  };
}

/** Runs `work` at most once per frame however often the returned function is called. */
export function perFrame(work) {
  let pending = 0;
  return () => {
    pending ||= requestAnimationFrame(() => {
      pending = 0;
      work();
    });
  };
}
