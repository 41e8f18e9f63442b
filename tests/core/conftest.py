"""What several tests of the rank's side open, closed again after each."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainermon.core.journal import START, Cursor, JournalReader


@pytest.fixture
def open_reader(tmp_path):
    opened = []

    def open_at(cursor: Cursor = START, directory: Path = tmp_path, **options) -> JournalReader:
        opened.append(JournalReader(directory, 0, cursor, **options))
        return opened[-1]

    yield open_at
    for reader in opened:
        reader.close()
