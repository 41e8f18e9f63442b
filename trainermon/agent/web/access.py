"""Who may read and who may order over HTTP, and the certificate that is shown to them.

A secret comes from a file or from the environment, never from a command line or a settings file that others may read;
it is never logged, and compared in constant time.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainermon.core.errors import ConfigError
from trainermon.core.signing import signed_digest
from trainermon.core.strict import require

PREFIX = "TRAINERMON_"
TOKEN_VARIABLE = "TRAINERMON_TOKEN"  # noqa: S105 - the name of a variable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """Who may read and order over HTTP, and the certificate.

    Without any of it reading is open, and orders need the run's token. What is not given here is taken from the
    environment: `token_file` from `TRAINERMON_TOKEN_FILE` and so on. The three secrets may also stand there themselves,
    in `TRAINERMON_TOKEN`, `TRAINERMON_READ_TOKEN` and `TRAINERMON_PASSWORD`.

    Attributes:
        token_file: File with the token that orders need, shared by agents and controller.
        read_token_file: File with a bearer token that opens reading, which is closed then to all without credentials.
        user: Name that opens reading by basic authentication; reading is closed then to all without credentials.
        password_file: File with that user's password.
        tls_cert_file: Certificate chain in PEM form; with it only HTTPS is spoken.
        tls_key_file: Its private key.
    """

    token_file: str | None = None
    read_token_file: str | None = None
    user: str | None = None
    password_file: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None

    def __post_init__(self) -> None:
        require(
            bool(self.tls_cert_file) == bool(self.tls_key_file),
            "access",
            "a certificate without its key or a key alone" if self.tls_cert_file or self.tls_key_file else None,
            "tls_cert_file and tls_key_file together",
        )
        require(not self.user or ":" not in self.user, "access.user", self.user, "a name without a colon")

    def completed(self, environ: Mapping[str, str] = os.environ) -> AccessSettings:
        """Return these settings, with those of the environment where none is given.

        Raises:
            ConfigError: The two together are impossible.
        """
        found = {
            field.name: getattr(self, field.name) or environ.get(PREFIX + field.name.upper()) or None
            for field in dataclasses.fields(self)
        }
        return AccessSettings(**found)


class TokenAccess:
    """Checks what a request's `Authorization` header allows: reading, ordering, or nothing.

    Args:
        tokens: One of them is needed for every order; they also open all reading.
        read_token: Opens reading, or None.
        user: With `password`, opens reading.
        password: Of `user`.
    """

    def __init__(
        self, *tokens: str, read_token: str | None = None, user: str | None = None, password: str | None = None
    ) -> None:
        self._tokens = tokens
        self._orders = [_digest(b"bearer " + token.encode()) for token in tokens]
        self._readers = []
        self.challenge = "Bearer"
        if read_token:
            self._readers.append(_digest(b"bearer " + read_token.encode()))
        if user and password:
            self._readers.append(_digest(b"basic " + base64.b64encode(f"{user}:{password}".encode())))
            self.challenge = 'Basic realm="trainermon", charset="UTF-8"'

    @property
    def reading_is_open(self) -> bool:
        """Whether reading (page, metrics) needs no credentials."""
        return not self._readers

    def signed_digest(self, authorization: bytes | None, method: str, target: str) -> str | None:
        """Return the SHA-256 of the body for which the request was signed with a token for orders; None if it was not.

        `authorization` is the header's value, `target` the path with its query. The caller compares the body.
        """
        return signed_digest(authorization or b"", self._tokens, method, target, now_s=time.time())

    def may_order(self, authorization: bytes | None) -> bool:
        """Return whether the header's value holds a token for orders."""
        return _is_one_of(authorization, self._orders)

    def may_read(self, authorization: bytes | None) -> bool:
        """Return whether the header's value allows reading; without it only if reading is open."""
        return _is_one_of(authorization, [*self._orders, *self._readers]) or self.reading_is_open

    def __repr__(self) -> str:
        return f"Access(reading_is_open={self.reading_is_open})"


def open_access(
    settings: AccessSettings, environ: Mapping[str, str] = os.environ, *, own_token: str = ""
) -> TokenAccess:
    """Read the secrets that `settings` and the environment name; return what checks requests with them.

    `own_token` opens orders too, if it is given.

    Raises:
        ConfigError: A file cannot be read or is empty, there is no token, or a user without password.
    """
    tokens = [token for token in (read_secret(settings.token_file, environ.get(TOKEN_VARIABLE)), own_token) if token]
    require(tokens, "access.token_file", None, f"a file with the token that orders need, or {TOKEN_VARIABLE}")
    password = read_secret(settings.password_file, environ.get(PREFIX + "PASSWORD"))
    require(not settings.user or password, "access.password_file", None, f"the user's password, or {PREFIX}PASSWORD")
    return TokenAccess(
        *tokens,
        read_token=read_secret(settings.read_token_file, environ.get(PREFIX + "READ_TOKEN")),
        user=settings.user,
        password=password,
    )


def read_secret(path: str | None, otherwise: str | None = None) -> str | None:
    """Return the content of the file `path` without surrounding white space, or `otherwise` if there is no path.

    Raises:
        ConfigError: The file cannot be read or is empty.
    """
    if path is None:
        return otherwise or None
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the secret in {path} cannot be read: {type(error).__name__}") from None
    if not secret:
        raise ConfigError(f"the secret in {path} is empty")
    return secret


def _is_one_of(authorization: bytes | None, secrets: Sequence[bytes]) -> bool:
    scheme, _, credential = (authorization or b"").partition(b" ")
    given = _digest(scheme.lower() + b" " + credential.strip())
    # Every secret is compared: the time does not tell which one it was.
    return sum(hmac.compare_digest(given, secret) for secret in secrets) > 0


def _digest(secret: bytes) -> bytes:
    return hashlib.sha256(secret).digest()  # one length for all: a comparison's time tells nothing of a secret's
