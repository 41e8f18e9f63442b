"""The stack that stands with a call, against that of the standard library."""

import threading
import traceback

import pytest

from trainermon.dump.facts import stacks
from trainermon.dump.facts.stacks import call_stack


@pytest.fixture(params=["compiled", "walked"], autouse=True)
def way(request, monkeypatch):
    if request.param == "walked":
        monkeypatch.setattr(stacks, "_PLACES", None)
    elif stacks._PLACES is None:
        pytest.skip("the library was not built, or the interpreter does not tell its instructions")


def expected():
    """Return the frames of this file and of pytest that lead to the caller, innermost first."""
    found = traceback.extract_stack()[:-1]
    return [f"File {one.filename}, line {one.lineno}, in {one.name}, \n {one.line}" for one in reversed(found)]


def nested(depth):
    return (call_stack(), expected()) if depth == 0 else nested(depth - 1)


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_frames_are_those_that_lead_to_the_call(depth):
    for _ in range(2):  # the second time it is remembered
        found, frames = nested(depth)
        assert len(found) >= min(len(frames), stacks.MAX_FRAMES)
        assert [*found] == frames[: len(found)]


def test_two_calls_on_two_lines_of_one_function_have_two_stacks():
    first = call_stack()
    second = call_stack()

    assert first[1:] == second[1:]
    assert "first = call_stack()" in first[0]
    assert "second = call_stack()" in second[0]


def test_what_is_too_deep_to_be_looked_up_is_walked(monkeypatch):
    monkeypatch.setattr(stacks, "_STACKS", {})

    found, _ = nested(stacks.MAX_WALKED)

    assert len(found) == stacks.MAX_FRAMES
    assert not stacks._STACKS


def test_the_longest_stacks_are_cut():
    found, _ = nested(stacks.MAX_FRAMES)

    assert len(found) == stacks.MAX_FRAMES


def test_threads_have_their_own():
    found = {}

    def work(name):
        for _ in range(200):
            found.setdefault(name, set()).add(call_stack())

    threads = [threading.Thread(target=work, args=(name,), name=name) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert {len(stacks_of) for stacks_of in found.values()} == {1}
