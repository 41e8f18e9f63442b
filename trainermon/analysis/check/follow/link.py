"""Where the other host is, and what both sides show each other: certificates, and a token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import ssl
from pathlib import Path
from typing import NamedTuple

from trainermon.core.errors import ConfigError

AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.pem", "cert.pem", "key.pem"
_ADDRESS = re.compile(r"(?:(tls|tcp)://)?(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})/?", re.ASCII)


class HostAddress(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parsed_address(option: str, text: str) -> HostAddress:
    """Return the address in `HOST:PORT` or `tls://HOST:PORT`.

    Raises:
        ConfigError: It is none.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > 65535:
        raise ConfigError(f"{option}: found {text[:100]!r}, expected HOST:PORT")
    return HostAddress(found[2].strip("[]"), int(found[3]))


def require_protected(option: str, address: HostAddress, tls: Path | None, *, is_asked: bool = False) -> None:
    """Refuse to send tensors of a training over a network without TLS, or anywhere if it is asked for.

    Raises:
        ConfigError: The address is none of this machine's, and there are no certificates.
    """
    if tls is None and (is_asked or not address.is_loopback):
        raise ConfigError(f"{option} {address}: expected --tls DIR, with the certificates of this side")


def read_token(path: Path | None) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: There is none.
    """
    if path is None:
        raise ConfigError("expected --token-file FILE, the same on both sides")
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: {error}") from error
    if len(token) < 16:
        raise ConfigError(f"--token-file {path}: found {len(token)} characters, expected 16 or more")
    return token


def is_token(given: object, token: str) -> bool:
    """Return whether `given` is the token; how long that takes says nothing about it."""
    text = given if isinstance(given, str) else ""
    one, other = (hashlib.sha256(each.encode(errors="surrogatepass")).digest() for each in (text, token))
    return hmac.compare_digest(one, other)


def tls_context(folder: Path, *, is_server: bool) -> ssl.SSLContext:
    """Return how TLS is spoken with the certificates in `folder`: version 1.2 or later, and both sides are verified.

    Raises:
        ConfigError: A file is missing or wrong.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(folder / AUTHORITY_FILE)
        context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
    except (OSError, ssl.SSLError) as error:
        names = ", ".join((AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE))
        raise ConfigError(f"--tls {folder}: {error}; expected {names} in it") from error
    return context
