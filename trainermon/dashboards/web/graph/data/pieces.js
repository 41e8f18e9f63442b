// The pieces of the page's data, each packed by gzip: they stand in the page, or its server has them.

const PACKING = "gzip";

/** Settles when the browser has read the whole page; what stands in front of the script is there before. */
const parsed = new Promise((done) => {
  if (document.readyState !== "loading") done(undefined);
  else document.addEventListener("DOMContentLoaded", () => done(undefined), { once: true });
});

/**
 * The bytes of a piece that stands in the page, in an element of this name.
 * @param {string} name
 */
export async function inlinePiece(name) {
  const text = (document.getElementById(name) ?? (await parsed, document.getElementById(name)))?.textContent;
  if (!text) throw new Error(`the file is cut off: it has no ${name}`);
  const stream = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream(PACKING));
  return new Response(stream).arrayBuffer();
}

/**
 * The bytes of a piece that the server has; the browser unpacks them.
 * @param {number} number
 */
export async function servedPiece(number) {
  const reply = await fetch(`pieces/${number}`);
  if (!reply.ok) throw new Error((await reply.json().catch(() => null))?.detail ?? `the server answered ${reply.status}`);
  return reply.arrayBuffer();
}

/** @param {string} base64 */
function bytesOf(base64) {
  const letters = atob(base64);
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < bytes.length; at++) bytes[at] = letters.charCodeAt(at);
  return bytes;
}
