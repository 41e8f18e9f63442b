"""Orders: checked, remembered by id, bounded, and handed to the ranks concerned."""

from __future__ import annotations

import pytest

from trainermon.agent.orders.commands import (
    MAX_AHEAD,
    MAX_OUTSTANDING,
    CommandBook,
    ConflictError,
    DuplicateError,
    parse_command,
    require_possible,
)
from trainermon.core.errors import ConfigError
from trainermon.core.values import Action, Command


class Ranks:
    """Keeps the last set that each rank was handed."""

    def __init__(self) -> None:
        self.sets: dict[int, list[str]] = {}

    def __call__(self, rank, commands):
        self.sets[rank] = [command.id for command in commands]


def dump(identity, first_step, **options):
    return Command(id=identity, action=Action.DUMP, first_step=first_step, **options)


def test_a_second_command_keeps_the_first_one_outstanding(tmp_path):
    ranks = Ranks()
    book = CommandBook(tmp_path, ranks)

    book.submit(dump("a", 10), [0, 1], attempt=1, steps={0: 8, 1: 8})
    book.submit(dump("b", 11), [1], attempt=1, steps={0: 8, 1: 8})

    assert ranks.sets == {0: ["a"], 1: ["a", "b"]}


def test_expired_commands_are_left_out(tmp_path):
    ranks = Ranks()
    book = CommandBook(tmp_path, ranks)

    book.submit(dump("a", 10, num_steps=2), [0], attempt=1, steps={0: 8})
    book.submit(dump("b", 20), [0], attempt=1, steps={0: 12})

    assert ranks.sets == {0: ["b"]}


def test_a_command_is_given_once_over_restarts_of_the_agent(tmp_path):
    assert CommandBook(tmp_path, Ranks()).submit(dump("a", 10), [0], attempt=1, steps={})
    again = Ranks()

    assert not CommandBook(tmp_path, again).submit(dump("a", 10), [0], attempt=1, steps={})

    assert again.sets == {}
    with pytest.raises(DuplicateError, match="'a' was used before"):
        CommandBook(tmp_path, again).submit(dump("a", 11), [0], attempt=1, steps={})


def test_a_torn_book_loses_only_the_torn_order(tmp_path):
    CommandBook(tmp_path, Ranks()).submit(dump("a", 10), [0], attempt=1, steps={})
    file = tmp_path / "agent.commands.jsonl"
    file.write_text(file.read_text() + '{"command": {"id": "b"')

    book = CommandBook(tmp_path, Ranks())
    book.submit(dump("c", 10), [0], attempt=1, steps={})

    assert [item.id for item in CommandBook(tmp_path, Ranks()).outstanding(0, attempt=1, step=0)] == ["a", "c"]


def test_lines_that_are_no_orders_are_passed_over_and_counted(tmp_path, caplog):
    book = CommandBook(tmp_path, Ranks())
    file = tmp_path / "agent.commands.jsonl"
    for name, rubbish in (("a", b"\xff\n"), ("b", b"[" * 500_000), ("c", b'{"command": "\xff"}\n[]\n')):
        book.submit(dump(name, 10), [0], attempt=1, steps={})
        with file.open("ab") as stream:
            stream.write(rubbish)

    again = CommandBook(tmp_path, Ranks())

    assert [item.id for item in again.outstanding(0, attempt=1, step=0)] == ["a", "b", "c"]
    assert f"4 lines of {file} cannot be read" in caplog.text


def test_what_is_accepted_fits_what_a_rank_reads(tmp_path):
    ranks = Ranks()
    book = CommandBook(tmp_path, ranks)
    scope = tuple(f"{'m' * 900}{place}" for place in range(600))

    assert book.submit(dump("first", 5, scope=scope), [0, 0, 0], attempt=1, steps={0: 0})
    with pytest.raises(ConflictError, match="reads at most 1048576"):
        book.submit(dump("second", 6, scope=scope), [0], attempt=1, steps={0: 0})
    assert book.submit(dump("third", 6), [0], attempt=1, steps={0: 0})
    assert book.submit(dump("second", 7, scope=scope), [0], attempt=1, steps={0: 6}), "the first one has expired"

    assert ranks.sets[0] == ["third", "second"]


def test_orders_that_wait_are_bounded_and_none_of_them_is_forgotten(tmp_path):
    book = CommandBook(tmp_path, Ranks())
    for number in range(MAX_OUTSTANDING):
        book.submit(dump(f"c{number}", 100), [0], attempt=1, steps={0: 0})

    with pytest.raises(ConflictError, match="try again when it has passed step 101"):
        book.submit(dump("late", 100), [0], attempt=1, steps={0: 0})

    assert len(book.outstanding(0, attempt=1, step=0)) == MAX_OUTSTANDING


@pytest.mark.parametrize("first_step", [7 + MAX_AHEAD + 1, 1 << 62])
def test_an_order_for_a_step_that_never_comes_is_refused(first_step):
    with pytest.raises(ConflictError, match="too far: rank 3 is at step 7"):
        require_possible(dump("far", first_step), [3], {3: 7})
    require_possible(dump("near", 7 + MAX_AHEAD), [3], {3: 7})


def test_a_new_attempt_takes_back_the_commands_of_the_old_one(tmp_path):
    ranks = Ranks()
    book = CommandBook(tmp_path, ranks)
    book.submit(dump("a", 10), [0], attempt=1, steps={})

    book.resend(0, attempt=2, step=0)

    assert ranks.sets == {0: []}


def test_parse_command_reports_what_was_found_and_expected():
    with pytest.raises(ConfigError, match="num_steps: found 'x', expected a whole number from 1 to 1000"):
        parse_command({"id": "a", "action": "dump", "num_steps": "x"}, next_step=0)
