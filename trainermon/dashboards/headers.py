"""What a browser may do with a page of ours: the headers of every answer, whoever serves it."""

from __future__ import annotations

import re

_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "img-src 'self' data:",
    "connect-src 'self'",
)
_BORDERS = ("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'")
CONTENT_SECURITY_POLICY = "; ".join((*_POLICY, *_BORDERS))
SECURITY_HEADERS = (
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-resource-policy", "same-origin"),
)
"""Beside the policy, which differs for a page that is one file."""

_own_policy = re.compile(rb'<meta http-equiv="Content-Security-Policy" content="([ -~]+?)">')
_HEAD_BYTES = 2000


def policy_of(page: bytes) -> str:
    """Return the policy for a page that is one file: its own, which names its one script by hash, and who may frame it.

    A page that says none may do nothing.
    """
    found = _own_policy.search(page[:_HEAD_BYTES])
    return "; ".join((found[1].decode() if found else "default-src 'none'", *_BORDERS))
