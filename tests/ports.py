"""Ports for what a test starts."""

import contextlib
import secrets
import socket

PORTS = range(20000, 32000)


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on now.

    It is below those that the kernel hands out, so that no connection of another test takes it before it is used.
    """
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
