// What is shown stands in the address, so that it can be sent to somebody and found again: `#?steps=50-100&row=…`.

/** @type {URLSearchParams} */
let state = parse();
const changes = new EventTarget();

function parse() {
  return new URLSearchParams(location.hash.startsWith("#?") ? location.hash.slice(2) : "");
}

/**
 * The value of a part of the state; null where the page decides.
 * @param {string} name
 */
export const stated = (name) => state.get(name);

/**
 * All values of a part that there may be several of.
 * @param {string} name
 */
export const allStated = (name) => state.getAll(name);

/**
 * Writes a part of the state into the address; "", null or nothing takes it out. No step of the browser's history.
 * @param {string} name
 * @param {string | string[] | null} value
 */
export function keep(name, value) {
  state.delete(name);
  for (const each of [value ?? []].flat()) if (each) state.append(name, each);
  show();
}

/** Puts the state into the address of the run, where it was lost to a visit elsewhere. */
export function show() {
  if (location.hash.startsWith("#/")) return;
  const text = state.toString();
  history.replaceState(null, "", text ? `#?${text}` : location.pathname + location.search);
}

/** @param {() => void} follow - called when the reader has changed the address */
export const onAddress = (follow) => changes.addEventListener("change", follow);

addEventListener("hashchange", () => {
  if (!location.hash.startsWith("#?")) return;
  state = parse();
  changes.dispatchEvent(new Event("change"));
});
