"""However the files are damaged and polled, the reader returns the intact records in order, each once."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.journals import make_block, make_header, make_keys
from trainermon.core.events import WarningEvent
from trainermon.core.journal import (
    BlockRecord,
    EventRecord,
    HeaderRecord,
    JournalReader,
    JournalWriter,
    SeriesRecord,
    list_files,
)
from trainermon.core.journal.files import file_path

NUM_SERIES = 3


@dataclasses.dataclass
class Frame:
    """What the test wrote at a place of a file.

    `content` begins with the type, then: header: attempt, series known; series: first id, count; block: step, series
    known; event: number.
    """

    begin: int
    end: int
    content: tuple


@dataclasses.dataclass
class Image:
    """A file of the journal as it will have become, with the frames that are still intact in it."""

    number: int
    content: bytes
    frames: list[Frame]


class Rank:
    """Writes attempts one after another, and notes where each frame lies."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._frames: dict[int, list[Frame]] = {}
        self._attempt = self._known = self._step = self._event = 0
        self.begin()

    def begin(self) -> None:
        self._attempt, self._known = self._attempt + 1, 0
        header = make_header(attempt=self._attempt)
        self._writer = JournalWriter(self._directory, header, file_bytes=1500, budget_bytes=1 << 30)
        self._note(())

    def do(self, action: str) -> None:
        if action == "attempt":
            self.end()
            self.begin()
        elif action == "series":
            self._writer.add_series(make_keys(NUM_SERIES, f"{self._known}."), [None] * NUM_SERIES)
            self._note(("series", self._known, NUM_SERIES))
            self._known += NUM_SERIES
        elif action == "block":
            self._step += 1
            self._writer.append_block(make_block(self._step, self._known))
            self._note(("block", self._step, self._known))
        else:
            self._event += 1
            self._writer.append_event(WarningEvent(message=f"{self._event} {'x' * (self._event % 50)}"))
            self._note(("event", self._event))

    def end(self) -> None:
        self._writer.close()
        self._note(("end",))

    def images(self) -> list[Image]:
        numbers = list_files(self._directory, 0)
        return [Image(n, file_path(self._directory, 0, n).read_bytes(), self._frames[n]) for n in numbers]

    def _note(self, content: tuple) -> None:
        cursor = self._writer.cursor
        frames = self._frames.setdefault(cursor.file, [])
        if not frames:
            head = file_path(self._directory, 0, cursor.file).read_bytes()[:32]
            end = 32 + int.from_bytes(head[16:20], "little")
            frames.append(Frame(0, end, ("header", self._attempt, self._known)))
        if content:
            frames.append(Frame(frames[-1].end, cursor.offset, content))


def damaged(content: bytes, kind: str, source: random.Random) -> bytes:
    begin = source.randrange(len(content))
    if kind == "cut":
        return content[:begin]
    if kind == "flip":
        return content[:begin] + bytes([content[begin] ^ 0xFF]) + content[begin + 1 :]
    if kind == "remove":
        return content[:begin] + content[begin + source.randrange(1, 600) :]
    noise = source.randbytes(source.randrange(1, 300))
    garbage = source.choice([noise, b"\xb1TMJ" * 9, content[:20], content[:31], b"\0" * 64])
    return content[:begin] + garbage + content[begin:] if kind == "insert" else content + garbage


def damage(image: Image, kind: str, source: random.Random) -> None:
    """Damage a file; a frame is intact if all its bytes still stand together, after those of the one before it."""
    before = image.content
    image.content = damaged(before, kind, source)
    frames, position = image.frames, 0
    image.frames = []
    for frame in frames:
        found = image.content.find(before[frame.begin : frame.end], position)
        if found >= 0:
            image.frames.append(frame)
            position = found + frame.end - frame.begin


def expected(images: list[Image]) -> list[object]:
    """Return what may be given out: what is intact, and whose ids are known from the same file."""
    found: list[object] = []
    for image in images:
        known = None
        for frame in image.frames:
            kind = frame.content[0]
            if kind == "header":
                known = frame.content[2]
            elif known is None:
                continue
            elif kind == "series":
                if frame.content[1] != known:
                    continue
                known += frame.content[2]
            elif kind == "block" and known < frame.content[2]:
                continue
            found.append(frame.content)
    return found


def content_of(record) -> object:
    if isinstance(record, HeaderRecord):
        return ("header", record.header.attempt, len(record.header.series))
    if isinstance(record, SeriesRecord):
        return ("series", record.first_id, len(record.keys))
    if isinstance(record, BlockRecord):
        assert (record.block.values[0] == range(record.block.step, record.block.step + len(record.block.series))).all()
        return ("block", record.block.step, len(record.block.series))
    if isinstance(record, EventRecord):
        return ("event", int(record.event.message.split()[0]))
    return ("end",)


class Follower:
    """Polls with random windows, and begins again from its cursor now and then."""

    def __init__(self, directory: Path, source: random.Random) -> None:
        self.found: list[object] = []
        self._directory = directory
        self._source = source
        self._reader = JournalReader(directory, 0)

    def poll(self) -> int:
        records = self._reader.poll(self._source.choice([1, 100, 2000, 1 << 20]))
        self.found += [content_of(record) for record in records]
        cursor = self._reader.cursor
        if self._source.random() < 0.3:
            self._reader.close()
            self._reader = JournalReader(
                self._directory, 0, cursor, window_bytes=self._source.choice([1, 7, 100, 5000])
            )
            again = self._reader.poll(1) if cursor.offset else []
            if again and again[0].cursor == cursor:
                assert isinstance(again[0], HeaderRecord)
                again = again[1:]
            self.found += [content_of(record) for record in again]
        return len(records)

    def close(self) -> None:
        self._reader.close()


@settings(max_examples=100, deadline=None)
@given(
    actions=st.lists(st.sampled_from(["block", "block", "block", "event", "series", "attempt"]), max_size=40),
    damages=st.lists(st.sampled_from(["cut", "flip", "remove", "insert", "append"]), max_size=4),
    seed=st.integers(0, 2**32),
)
def test_the_intact_records_come_in_order_once_each(tmp_path_factory, actions, damages, seed):
    source = random.Random(seed)
    written, live = tmp_path_factory.mktemp("written"), tmp_path_factory.mktemp("live")
    # The last file is a whole one, so that what lies in front of it is finished.
    rank = Rank(written)
    for action in [*actions, "attempt"]:
        rank.do(action)
    rank.end()
    images = rank.images()
    victims = source.sample(images[:-1], min(len(damages), len(images) - 1))
    for kind, image in zip(damages, victims, strict=False):
        damage(image, kind, source)
    follower = Follower(live, source)

    for image in images:  # the files grow as a rank writes them, and are polled meanwhile
        with file_path(live, 0, image.number).open("wb", buffering=0) as file:
            position = 0
            while position < len(image.content):
                count = source.choice([1, 31, 300, 5000])
                file.write(image.content[position : position + count])
                position += count
                if source.random() < 0.5:
                    follower.poll()
    while follower.poll():
        pass
    follower.close()

    assert follower.found == expected(images)
    assert not set(os.listdir(live)) - set(os.listdir(written))
