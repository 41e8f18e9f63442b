"""Which dumps one graph shows, when it is built again, and what is said where it cannot be."""

from __future__ import annotations

import asyncio
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.agent.orders.test_dumps import REPLAY, replayed
from trainermon.agent.orders.dumps import DumpKey, RunDumps
from trainermon.agent.orders.graphs import DumpGraphs, GraphState
from trainermon.dashboards.graph_details import join_parts, pack_detail

BUILD = "import pathlib, sys; pathlib.Path(sys.argv[3]).write_text(' '.join(sys.argv[1:2]) + str(len(sys.argv)))"
PACKED = join_parts(map(pack_detail, [b"{}", None, b'{"rows":[]}']))


def ask(tmp_path, folders, keys, script=BUILD):
    """Ask for the graphs of `keys` one after the other until each is there or has failed; return the answers."""

    async def main():
        dumps = RunDumps()
        for folder in folders:
            dumps.record(replayed({**REPLAY, "dump": f"dumps/{folder}/rank0"}))
        with ThreadPoolExecutor(1) as executor:
            command = (sys.executable, "-c", script)
            graphs = DumpGraphs(tmp_path, dumps, executor=executor, command=command)
            answers = []
            for key in keys:
                while (answer := await graphs.page(key)).state is GraphState.BUILDING:
                    await asyncio.sleep(0.01)
                answers.append(answer)
            await graphs.close()
        return answers

    return asyncio.run(main())


def test_dumps_of_the_last_attempt_are_steps_of_one_graph(tmp_path):
    folders = ("a/attempt1/step1", "b/attempt2/step1", "b/attempt2/step2")
    keys = [DumpKey("b", 2, 1), DumpKey("b", 2, 2), DumpKey("a", 1, 1)]

    answers = ask(tmp_path, folders, keys)

    assert [answer.page.decode() for answer in answers] == [
        f"{tmp_path}/dumps8",
        f"{tmp_path}/dumps8",
        f"{tmp_path}/dumps/a/attempt1/step18",
    ]
    assert {path.name for path in (tmp_path / "reports").iterdir()} == {"graph.html", "a-attempt1-step1-graph.html"}


def test_two_dumps_of_one_step_have_graphs_of_their_own(tmp_path):
    answers = ask(tmp_path, ("a/attempt1/step1", "b/attempt1/step1"), [DumpKey("b", 1, 1)])

    assert answers[0].page.decode() == f"{tmp_path}/dumps/b/attempt1/step18"


def test_a_dump_that_is_none_has_no_graph(tmp_path):
    (answer,) = ask(tmp_path, ("a/attempt1/step1",), [DumpKey("../../etc", 1, 1)])

    assert answer.state is GraphState.UNKNOWN
    assert not (tmp_path / "reports").exists()


def test_a_failed_build_says_why_and_is_tried_again_by_the_next_question(tmp_path):
    key = DumpKey("a", 1, 1)
    script = (
        "import pathlib, sys; tried = pathlib.Path(sys.argv[3] + '.tried')\n"
        "if not tried.exists(): tried.touch(); sys.exit('the dump is damaged')\n"
        "pathlib.Path(sys.argv[3]).write_text('page')"
    )

    failed, built = ask(tmp_path, ("a/attempt1/step1",), [key, key], script)

    assert failed.state is GraphState.FAILED
    assert "the dump is damaged" in failed.reason
    assert built.page == b"page"


def test_one_more_rank_has_it_built_again(tmp_path):
    async def main():
        dumps = RunDumps()
        dumps.record(replayed({**REPLAY, "dump": "dumps/a/attempt1/step1/rank0"}))
        states = []
        with ThreadPoolExecutor(1) as executor:
            graphs = DumpGraphs(tmp_path, dumps, executor=executor, command=(sys.executable, "-c", BUILD))
            for rank in (0, 1):
                dumps.record(replayed({**REPLAY, "dump": f"dumps/a/attempt1/step1/rank{rank}"}))
                states.append((await graphs.page(DumpKey("a", 1, 1))).state)
                while (answer := await graphs.page(DumpKey("a", 1, 1))).state is GraphState.BUILDING:
                    await asyncio.sleep(0.01)
                states.append(answer.state)
            await graphs.close()
        return states

    assert asyncio.run(main()) == [GraphState.BUILDING, GraphState.READY] * 2


def test_notes_are_kept_beside_the_dumps_of_the_graph(tmp_path):
    keys = DumpKey("b", 2, 1), DumpKey("a", 1, 1), DumpKey("../../etc", 1, 1)
    expected = {"notes": {"Module.fc.Linear.forward.0": "look here"}, "matches": []}
    content = json.dumps({"before": {}, "after": expected}).encode()

    async def main():
        dumps = RunDumps()
        for folder in ("a/attempt1/step1", "b/attempt2/step1"):
            (tmp_path / "dumps" / folder).mkdir(parents=True)
            dumps.record(replayed({**REPLAY, "dump": f"dumps/{folder}/rank0"}))
        with ThreadPoolExecutor(1) as executor:
            graphs = DumpGraphs(tmp_path, dumps, executor=executor)
            kept = [await graphs.keep_notes(key, content) for key in (keys[0], keys[2])]
            with pytest.raises(ValueError, match="expected an object with before and after"):
                await graphs.keep_notes(keys[0], b"[]")
            return kept, [await graphs.notes(key) for key in keys]

    kept, (ours, others, nothing) = asyncio.run(main())

    assert kept == [expected, None]
    assert ours == expected == json.loads((tmp_path / "dumps" / "graph_notes.json").read_text())
    assert others == {"notes": {}, "matches": []}  # the dumps of an earlier attempt have a folder of their own
    assert nothing is None


@pytest.mark.parametrize(("number", "found"), [(0, True), (1, False), (2, True), (3, False), (10**18, False)])
def test_details_are_read_from_their_places(tmp_path, number, found):
    script = f"import pathlib, sys; pathlib.Path(sys.argv[3][:-5] + '.details').write_bytes({PACKED!r}); " + BUILD[21:]
    key = DumpKey("a", 1, 1)

    async def main():
        dumps = RunDumps()
        dumps.record(replayed({**REPLAY, "dump": "dumps/a/attempt1/step1/rank0"}))
        with ThreadPoolExecutor(1) as executor:
            graphs = DumpGraphs(tmp_path, dumps, executor=executor, command=(sys.executable, "-c", script))
            before = await graphs.detail(key, 0)
            while (await graphs.page(key)).state is GraphState.BUILDING:
                await asyncio.sleep(0.01)
            detail = await graphs.detail(key, number)
            await graphs.close()
        return before, detail

    before, detail = asyncio.run(main())

    assert before is None
    assert (detail is not None) is found
