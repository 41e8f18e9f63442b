"""Requests that are signed with a token instead of carrying it, so that whoever hears one learns no secret.

    Authorization: TMON-HMAC-SHA256 <Unix time>:<SHA-256 of the body>:<HMAC of method, path with query, time, digest>

A signature is good for this request alone, and for a few minutes; an order that is heard and sent again is one that was
carried out already, as each has an id. The clocks of both sides may differ by as much.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

SCHEME = "TMON-HMAC-SHA256"
MAX_AGE_S = 300.0


def sign(token: str, method: str, target: str, body: bytes = b"", *, now_s: float) -> str:
    """Return the value of the header `Authorization` that signs a request with `token`, which itself is not sent.

    `target` is the path with its query, as it is sent; `now_s` is Unix time, since a signature expires.
    """
    time_s, digest = str(int(now_s)), body_digest(body)
    return f"{SCHEME} {time_s}:{digest}:{_mac(token, method, target, time_s, digest)}"


def signed_digest(authorization: bytes, tokens: Iterable[str], method: str, target: str, *, now_s: float) -> str | None:
    """Return the SHA-256 of the body that the header signs with one of `tokens`; None if none did, or too long ago.

    `target` is the path with its query, `now_s` Unix time. The caller must still compare the body with it.
    """
    scheme, _, signature = authorization.decode("latin-1").partition(" ")
    parts = signature.split(":")
    if scheme != SCHEME or len(parts) != 3 or not (parts[0].isascii() and parts[0].isdecimal()):
        return None
    time_s, digest, mac = parts
    if len(time_s) > 12 or abs(now_s - int(time_s)) > MAX_AGE_S:
        return None
    found = [
        hmac.compare_digest(_mac(token, method, target, time_s, digest).encode(), mac.encode()) for token in tokens
    ]
    return digest if any(found) else None


def body_digest(body: bytes) -> str:
    """Return the SHA-256 of a request's body in hexadecimal."""
    return hashlib.sha256(body).hexdigest()


def _mac(token: str, method: str, target: str, time_s: str, digest: str) -> str:
    text = "\n".join((SCHEME, method, target, time_s, digest))
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()
