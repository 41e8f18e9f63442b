"""Collectives of several ranks that are one meeting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.analysis.graph.meetings import collectives_of, find_meetings
from trainermon.analysis.graph.reading import read_graphs

PAIRS = ((0, 1), (2, 3))


def write_collectives(folder: Path) -> None:
    """Write the dumps of four ranks: all meet twice, in between each meets its neighbour, and 3 sends to 0."""
    for rank in range(4):
        group: dict[str, Any] = {"type": "torch.ProcessGroup", "group_ranks": list(PAIRS[rank // 2])}
        data = {
            "Distributed.all_reduce.0.forward": forward(tensor(), output=tensor()),
            "Distributed.all_gather.0.forward": forward(tensor(), output=tensor(), group=group),
            "Distributed.all_reduce.1.forward": forward(tensor(), output=tensor()),
        }
        if rank in (0, 3):
            operation, peer = ("send", 0) if rank else ("recv", 3)
            number = {"type": "int", "value": peer}
            data[f"Distributed.{operation}.0.forward"] = forward(tensor(), number, output=tensor())
        write_dump(folder / "step0" / f"rank{rank}", data, info={"rank": rank})


def test_ranks_that_meet_have_the_same_number(tmp_path: Path) -> None:
    write_collectives(tmp_path)
    graphs = list(read_graphs(tmp_path))

    met: dict[int, set[tuple[int, str]]] = {}
    for rank, (graph, found) in enumerate(zip(graphs, find_meetings(list(map(collectives_of, graphs))), strict=True)):
        for node, number in zip(found.nodes.tolist(), found.numbers.tolist(), strict=True):
            call = graph.tree.nodes[node].call
            assert call is not None
            met.setdefault(number, set()).add((rank, ".".join(call.key.split(".")[1:3])))

    all_ranks = [{(rank, f"all_reduce.{number}") for rank in range(4)} for number in (0, 1)]
    pairs = [{(rank, "all_gather.0") for rank in pair} for pair in PAIRS]
    expected = [*all_ranks, *pairs, {(3, "send.0"), (0, "recv.0")}]
    assert sorted(map(sorted, met.values())) == sorted(map(sorted, expected))


def test_one_rank_meets_nobody(tmp_path: Path) -> None:
    write_collectives(tmp_path)
    (graph,) = read_graphs(tmp_path, rank=1)

    (found,) = find_meetings([collectives_of(graph)])
    assert len(found.nodes) == 0
