"""A large operation on elements, judged in chunks, has the verdict that it has as a whole."""

import dataclasses
import math

import pytest
import torch
from torch.nn import functional

from trainermon.accuracy import chunks
from trainermon.accuracy.calls import OperationCall
from trainermon.accuracy.judge import Status, judge_call
from trainermon.accuracy.large import judge_any_call


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    monkeypatch.setattr(chunks, "MAX_ELEMENTS", 256)


def result(shape, *others):
    torch.manual_seed(0)
    return [torch.randn(shape), *(torch.randn(other) for other in others)]


CALLS = [
    ("gelu", functional.gelu, result((40, 25)), {}),
    ("gelu", functional.gelu, result((1, 40, 25)), {"approximate": "tanh"}),
    ("mul", torch.mul, result((40, 25), (40, 1)), {}),
    ("add", torch.add, result((40, 25), (25,)), {"alpha": 2}),
    ("masked_fill", torch.masked_fill, [torch.randn(40, 25), torch.randn(25) > 0, -math.inf], {}),
    ("prelu", functional.prelu, result((1, 40, 5, 5), (40,)), {}),
]


@pytest.mark.parametrize(("name", "function", "args", "kwargs"), CALLS)
@pytest.mark.parametrize("wrong", [(), (123,), (0, 999), range(300, 900)], ids=["sound", "one", "two", "many"])
def test_verdict_and_places_are_those_of_the_whole(name, function, args, kwargs, wrong):
    call = OperationCall(function, args, kwargs)
    given = function(*args, **kwargs).clone()
    given.view(-1)[list(wrong)] += 1

    [whole], [found] = judge_call(name, call, given), judge_any_call(name, call, given)

    assert found.status is whole.status is (Status.ERROR if wrong else Status.PASS)
    assert (found.reason, found.index if wrong else (), found.shape) == (
        whole.reason,
        whole.index if wrong else (),
        given.shape,
    )
    assert found.share_above == pytest.approx(whole.share_above)
    assert (found.place and (found.place.begin, found.place.number)) == (
        whole.place and (whole.place.begin, whole.place.number)
    )


def test_it_is_never_run_as_a_whole_and_a_review_has_the_whole(monkeypatch):
    sizes, seen = [], []

    def noted(x):
        sizes.append(x.numel())
        return functional.gelu(x)

    def review(judgement, given, golden):
        seen.append((given.shape, golden))
        return dataclasses.replace(judgement, reason="seen")

    [x] = result((40, 25))

    [found] = judge_any_call("gelu", OperationCall(noted, [x], {}), functional.gelu(x), review=review)

    assert max(sizes) <= 256
    assert found.reason == "seen"
    [(shape, golden)] = seen
    assert shape == (40, 25)
    # the last elements of a chunk may be computed one by one, and then round otherwise than in a vector
    torch.testing.assert_close(golden, functional.gelu(x.double()), rtol=1e-14, atol=1e-16)
