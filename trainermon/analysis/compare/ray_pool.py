"""Compares on a Ray cluster instead of the local process pool: the same function, applied to the same pairs.

The nodes need trainermon, and see the folders of both sides and of the output under the same paths.
"""

from __future__ import annotations

import itertools
import socket
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from trainermon.core.errors import ConfigError

_In = TypeVar("_In")
_Out = TypeVar("_Out")

CONNECT_TIMEOUT_S = 10
WAITING_PER_CPU = 2
"""Tasks that are handed to the cluster beforehand, for each of its processors."""


@contextmanager
def ray_map(address: str) -> Iterator[Callable[[Callable[[_In], _Out], Iterable[_In]], Iterator[_Out]]]:
    """Return a context with a map function that runs on the cluster at `address`, results in order.

    `address` is one that `ray.init` takes: `host:6379`, `ray://host:10001`, `auto`. A connection that the process has
    already is used and left open. Raises in the caller what the function raised.

    Raises:
        ConfigError: ray is not installed, or no cluster answers at `address`.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("a Ray cluster needs the package ray: pip install ray") from error
    was_connected = ray.is_initialized()
    if not was_connected:
        _connect(ray, address)
    try:
        yield partial(_map, ray)
    finally:
        if not was_connected:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    _check(address)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # on accelerators, of which no task has any
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise _no_answer(address, error) from error


def _check(address: str) -> None:
    """Refuse an address where nobody listens: ray itself would try again for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise _no_answer(address, error) from error


def _no_answer(address: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())
    return ConfigError(f"no Ray cluster answers at {address} ({reason}): give the address of its head")


def _map(ray: Any, function: Callable[[_In], _Out], arguments: Iterable[_In]) -> Iterator[_Out]:
    remote = ray.remote(num_cpus=1, max_retries=1)(_apply)
    waiting = WAITING_PER_CPU * max(1, int(ray.cluster_resources().get("CPU", 1)))
    left = iter(arguments)
    tasks = deque(remote.remote(function, one) for one in itertools.islice(left, waiting))
    while tasks:
        yield ray.get(tasks.popleft())
        tasks.extend(remote.remote(function, one) for one in itertools.islice(left, 1))


def _apply(function: Callable[[_In], _Out], argument: _In) -> _Out:
    return function(argument)
