"""The book of orders that the version before has written is still read, and is written on."""

import shutil
from pathlib import Path

import pytest

from trainermon.agent.orders.commands import BOOK_FILE, CommandBook, DuplicateError
from trainermon.core.values import Action, Command, DumpTask

BOOK = Path(__file__).parents[2] / "recorded" / "ledgers" / BOOK_FILE
DUMP = Command(
    id="a",
    action=Action.DUMP,
    first_step=10,
    num_steps=3,
    task=DumpTask.TENSOR,
    scope=("Größe.层",),
    reason="half \\ud800",
    max_bytes=5,
)
EDIT = Command(id="b", action=Action.CONFIGURE, first_step=12, config='{"step_interval": 2}')


def test_the_orders_of_the_version_before_are_known(tmp_path):
    shutil.copy(BOOK, tmp_path)

    book = CommandBook(tmp_path, lambda rank, commands: None)

    assert book.outstanding(0, attempt=2, step=0) == [DUMP, EDIT]
    assert book.outstanding(1, attempt=2, step=0) == [DUMP]
    assert not book.submit(EDIT, [0], attempt=2, steps={})
    with pytest.raises(DuplicateError):
        book.submit(Command(id="a", action=Action.DUMP, first_step=11), [0], attempt=2, steps={})


def test_a_book_of_the_version_before_is_appended_to(tmp_path):
    shutil.copy(BOOK, tmp_path)
    torn = (tmp_path / BOOK_FILE).read_bytes() + b'{"command": {"id": "torn'
    (tmp_path / BOOK_FILE).write_bytes(torn)
    another = Command(id="c", action=Action.DUMP, first_step=20)

    CommandBook(tmp_path, lambda rank, commands: None).submit(another, [0], attempt=2, steps={})

    assert (tmp_path / BOOK_FILE).read_bytes().startswith(torn + b"\n{")
    again = CommandBook(tmp_path, lambda rank, commands: None)
    assert again.outstanding(0, attempt=2, step=0) == [DUMP, EDIT, another]
