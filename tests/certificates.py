"""Certificates for tests, made by the openssl program: valid for 127.0.0.1 and localhost, and their own authority."""

from __future__ import annotations

import subprocess

from trainermon.agent.web.server import ServerCertificate


def make_certificate(folder):
    """Return a self-signed certificate; its chain is `folder/cert.pem`."""
    key, chain = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    extension = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    words = [*command.split(), *extension, "-keyout", str(key), "-out", str(chain)]
    subprocess.run(words, check=True, capture_output=True)
    return ServerCertificate(chain=str(chain), key=str(key))
