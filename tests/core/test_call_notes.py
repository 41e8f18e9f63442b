"""Notes on the calls of each group: what a rank packs is what an agent reads, and nothing else is taken for notes."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainermon.core.call_notes import (
    IN_NO_CALL,
    MARK,
    MAX_NOTES,
    NOTES_BYTES,
    OPERATIONS,
    CallNote,
    as_failed,
    call_offset,
    check_sum,
    note_offset,
    pack_begun,
    pack_call,
    parse_notes,
)

COUNTS = st.integers(0, 2**64 - 1)
NOTES = st.builds(
    CallNote,
    group=st.integers(1, 2**32),
    collectives=COUNTS,
    p2p=COUNTS,
    operation=st.sampled_from(OPERATIONS),
    number=COUNTS,
    peer=st.integers(-1, 2**31),
    elements=COUNTS,
    failed=st.booleans(),
)


def page(*notes, mark=MARK):
    written = bytearray(NOTES_BYTES)
    written[: len(mark)] = mark
    for place, note in enumerate(notes):
        written[note_offset(place) : note_offset(place) + len(note)] = note
    return bytes(written)


def packed(note):
    call = pack_call(note.operation, note.number, peer=note.peer, elements=note.elements)
    begun = pack_begun(note.group, collectives=note.collectives, p2p=note.p2p)
    return begun + (as_failed(call) if note.failed else call)


@given(st.lists(NOTES, max_size=MAX_NOTES))
def test_what_is_packed_is_read_again(notes):
    assert parse_notes(page(*map(packed, notes))) == tuple(notes)


def test_a_note_is_written_as_described():
    """64 bytes from byte 64 on: three unsigned numbers, place of the operation from 1, number, peer, elements."""
    words = struct.pack("=6Q", zlib.crc32(b"dp") + 1, 7, 2, OPERATIONS.index("recv") + 1, 2, 5)
    content = bytearray(page())
    content[64 : 64 + 56] = words + struct.pack("=Q", 9)

    assert parse_notes(bytes(content)) == (CallNote(check_sum("dp"), 7, 2, "recv", 2, 5, 9),)


def test_after_a_call_only_its_second_part_is_cleared():
    content = bytearray(page(packed(CallNote(check_sum("dp"), 7, 2, "barrier", 7, -1, 0))))

    content[call_offset(0) : call_offset(0) + len(IN_NO_CALL)] = IN_NO_CALL

    assert parse_notes(bytes(content)) == (CallNote(check_sum("dp"), 7, 2, "", 0, 0, 0),)


@pytest.mark.parametrize("name", ["", "0", "world", "größe"])
def test_no_group_has_the_number_of_an_empty_place(name):
    assert 0 < check_sum(name) <= 2**32


def test_an_operation_of_a_later_version_is_left_out():
    known = CallNote(check_sum("dp"), 1, 0, "barrier", 1, -1, 0)
    later = pack_begun(check_sum("tp"), collectives=3, p2p=0) + struct.pack("=QQqQ", len(OPERATIONS) + 1, 3, -1, 0)

    assert parse_notes(page(later, packed(known))) == (known,)


@pytest.mark.parametrize("content", [b"", bytes(NOTES_BYTES), page(mark=b"TMONPAGE"), page()[:-1]])
def test_what_is_no_page_of_notes_is_not_read(content):
    assert parse_notes(content) is None


def test_the_last_note_ends_within_the_page():
    assert call_offset(MAX_NOTES - 1) + len(IN_NO_CALL) <= NOTES_BYTES
