"""A pickle that memorises less is the same value, and has what Python's own disassembler finds."""

import argparse
import io
import pickle
import pickletools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.analysis.checkpoint.formats import slim
from trainermon.analysis.checkpoint.formats.slim import slimmed

pytestmark = pytest.mark.skipif(slim._compiled() is None, reason="the compiled library is not there, or an old one")

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=300)
KEYS = st.text() | st.integers() | st.tuples(st.text(), st.integers())
NESTED = st.recursive(
    PLAIN | st.just(10**400),
    lambda inside: st.lists(inside) | st.dictionaries(KEYS, inside) | st.tuples(inside, inside) | st.sets(KEYS),
    max_leaves=60,
)
OBJECTS = {"]", "}", "l", "d", "t", "R", "i", "o", "\x81", "\x85", "\x86", "\x87", "\x8f", "\x91", "\x92"}
FAULTS = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    MemoryError,
    OverflowError,
)
PUTS = {"MEMOIZE", "BINPUT", "LONG_BINPUT"}


def repeated(value, times):
    """Return a value in which one object comes several times, and many others once."""
    return {"first": value, "again": [value] * times, "others": [(number, [number]) for number in range(times)]}


@given(NESTED, st.integers(0, 400), st.sampled_from([1, 2, 3, 4, 5]))
def test_a_slim_pickle_is_the_same_value_and_memorises_what_comes_again(value, times, protocol):
    before = repeated([value, argparse.Namespace(value=value)], times)
    data = pickle.dumps(before, protocol)

    found = slimmed(data)

    if found is None:  # places as text, of the first protocols
        assert protocol == 1
        return
    content = found[0].read()
    after = pickle.loads(content)
    assert after == before
    assert all(one is after["first"] for one in after["again"])
    codes = [(code.name, argument) for code, argument, _ in pickletools.genops(content)]
    asked = {argument for name, argument in codes if name in ("BINGET", "LONG_BINGET")}
    assert len(asked) == sum(name in PUTS for name, _ in codes)


@given(NESTED, st.integers(0, 400), st.sampled_from([2, 3, 4, 5]))
def test_what_a_pickle_has_is_what_pythons_disassembler_finds(value, times, protocol):
    data = pickle.dumps(repeated(value, times), protocol)
    codes = Counter(code.code for code, _, _ in pickletools.genops(data))

    found = slimmed(data)

    assert found is not None
    assert found[1].tuples == sum(codes[code] for code in "t\x85\x86\x87")
    assert found[1].sets == sum(codes[code] for code in "\x8f\x91")
    assert found[1].objects == sum(codes[code] for code in OBJECTS)


def test_damaged_pickles_that_can_be_loaded_are_the_same_value():
    chance = random.Random(3)
    data = pickle.dumps(repeated({"key": [1.5, b"bytes", "text"]}, 30), 4)
    num_slim = 0
    for _ in range(3_000):
        damaged = bytearray(data)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.choice(
                b"hjqr\x94\x95XB\x8c.()]}" + bytes([chance.randrange(256)])
            )
        found = slimmed(bytes(damaged))
        if found is not None:
            expected = outcome(bytes(damaged))
            num_slim += expected is not None
            assert expected in {None, outcome(found[0].read())}
    assert num_slim > 100


def outcome(data):
    """Return what a pickle holds, or that it holds nothing."""
    try:
        return repr(_Nothing(io.BytesIO(data)).load())
    except FAULTS:
        return None


class _Nothing(pickle.Unpickler):
    def find_class(self, module, name):
        raise pickle.UnpicklingError(name)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04",
        b"\x80\x04]\x94h\x07.",
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\xff.",
        b"\x80\x04X\xff\xff\xff\xff.",
        b"\x80\x04\x82\x01.",
        b"cos\nsystem",
        b"\x80\x04j\x01",
    ],
)
def test_what_is_cut_or_odd_is_left_to_python(data):
    assert slimmed(data) is None
