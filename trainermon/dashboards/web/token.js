// The token of a run, without which the agent takes no orders: this tab remembers it, and nothing else.

const TOKEN = "trainermon-token";

/** The token that was given in this tab; "": none was. */
export function rememberedToken() {
  try {
    return sessionStorage.getItem(TOKEN) ?? "";
  } catch {
    return "";
  }
}

/** @param {string} token */
export function rememberToken(token) {
  try {
    sessionStorage.setItem(TOKEN, token);
  } catch {
    // Then it is asked for again.
  }
}
