"""In which order a model calls its modules, as far as stored activations tell; else the order of their definition.

What one module returned and another one was given has the same eight moments on both sides. A module that is defined
before another one, and called after it, is common: a norm behind the block that it stands before, rotary embeddings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from trainermon.core.values import Kind

if TYPE_CHECKING:
    import duckdb

Flow = tuple[str, str]
"""Who returned a tensor, and who was given it."""

MAX_FLOWS = 100_000


def in_execution_order(modules: Sequence[str], flows: Iterable[Flow]) -> tuple[str, ...]:
    """Return `modules`, given in the order of definition, in the order in which they run, as far as `flows` tell.

    `flows` say which module's output another was given. Modules stay behind those that hold them. Where flows say
    nothing or contradict one another, the given order stands. The module without a name is the whole, and comes first.
    """
    known = dict.fromkeys(name for module in modules for name in with_outer(module) if name)
    children: dict[str, list[str]] = defaultdict(list)
    for name in known:
        children[name.rpartition(".")[0]].append(name)
    follows: dict[str, set[str]] = defaultdict(set)
    for producer, consumer in flows:
        pair = _beside(producer, consumer)
        if pair is not None:
            follows[pair[1]].add(pair[0])
    found: list[str] = []
    waiting = [""]
    while waiting:
        name = waiting.pop()
        found.append(name)
        waiting.extend(reversed(_sorted(children[name], follows)))
    listed = set(modules)
    return tuple(name for name in found if name in listed)


def with_outer(module: str) -> list[str]:
    """Return the names of all modules that hold a module, the outermost first, and its own."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _beside(producer: str, consumer: str) -> tuple[str, str] | None:
    """Return the two modules of one parent that hold producer and consumer; None if one holds the other."""
    pairs = zip(with_outer(producer), with_outer(consumer), strict=False)
    return next(((one, other) for one, other in pairs if one != other), None)


def _sorted(names: Sequence[str], follows: dict[str, set[str]]) -> list[str]:
    """Return `names` such that each stands behind those that it follows; of several the first that is ready."""
    left, found = list(names), []
    while left:
        ready = (name for name in left if not (follows[name] & set(left)) - {name})
        first = next(ready, left[0])
        left.remove(first)
        found.append(first)
    return found


def read_flows(connection: duckdb.DuckDBPyConnection, step: int, view: str = "stats") -> list[Flow]:
    """Return which module's output became which module's input on a stored step, found by equal statistics.

    Tensors of equal elements, like masks, tell nothing. `view` is the table that is read.
    """
    query = f"""
        WITH tensors AS (
            SELECT DISTINCT name, starts_with(slot, 'output') AS is_output, rank, stage, micro_step,
                (count, min, max, sum, sum_sq, zeros) AS value
            FROM {view} WHERE step = ? AND kind = '{Kind.ACTV}' AND finite > 0 AND min < max AND sum <> 0
        )
        SELECT DISTINCT made.name, given.name FROM tensors made JOIN tensors given
            ON made.rank = given.rank AND made.stage = given.stage AND made.value = given.value
            AND made.micro_step IS NOT DISTINCT FROM given.micro_step
        WHERE made.is_output AND NOT given.is_output AND made.name <> given.name LIMIT {MAX_FLOWS}
    """  # noqa: S608  # our own names
    return [(str(made), str(given)) for made, given in connection.execute(query, [step]).fetchall()]
