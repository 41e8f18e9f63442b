"""Stores that cannot be read: each command says so in a sentence of its own, never in the database's."""

import json
import re

import duckdb
import pytest

from tests.exporters.store.test_query import make_run
from trainermon import cli
from trainermon.core.errors import QueryError
from trainermon.exporters.store.query import run_query
from trainermon.exporters.store.segments import FORMAT_VERSION, connect

RULES = "trainermon/alerts/default_rules.yaml"
COMMANDS = {
    "query": ["query", "RUN", "FROM stats"],
    "tables": ["query", "RUN"],
    "diagnose": ["diagnose", "RUN"],
    "alerts": ["alerts", "RUN"],
    "export": ["export", "--format", "csv", "RUN"],
    "test": ["rules", "test", RULES, "RUN"],
}
INTERNAL = re.compile(r"LINE \d|SELECT|parquet_kv|Error:|Exception|Traceback|Possible solutions")


def segment_of(run):
    (path,) = run.glob("nodes/*/segments/*.parquet")
    return path


def rewritten(path, key, value):
    """Write the segment's rows anew, with this metadata."""
    new = path.with_suffix(".new")
    with duckdb.connect() as connection:
        connection.execute(
            f"COPY (FROM read_parquet('{path}')) TO '{new}' (FORMAT parquet, KV_METADATA {{{key}: '{value}'}})"
        )
    new.rename(path)


def empty(path):
    path.write_bytes(b"")


def truncated(path):
    path.write_bytes(path.read_bytes()[:-30])


def no_footer(path):
    path.write_bytes(b"PAR1" + bytes(200) + b"\x10\0\0\0PAR1")


def bad_page(path):
    content = bytearray(path.read_bytes())
    content[8:400] = bytes(byte ^ 0xA5 for byte in content[8:400])
    path.write_bytes(content)


def folder(path):
    path.unlink()
    path.mkdir()


def another_version(path):
    rewritten(path, "trainermon", json.dumps({"format": FORMAT_VERSION + 1}))


def foreign(path):
    rewritten(path, "somebody", "else")


@pytest.fixture
def told(tmp_path, capsys, monkeypatch):
    """Return a function that gives a command a run with a spoilt segment: exit status, and the error without paths."""
    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))

    def tell(spoil, command):
        run = make_run(tmp_path / "run")
        (run / "run.json").write_text(json.dumps({"run_id": "run", "attempt": 1, "world_size": 1, "config": {}}))
        spoil(segment_of(run))
        status = cli.main([str(run) if word == "RUN" else word for word in COMMANDS[command]])
        return status, capsys.readouterr().err.replace(str(tmp_path), "")

    return tell


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("spoil", [empty, truncated, no_footer, bad_page, folder, another_version, foreign])
def test_no_word_of_the_database_reaches_the_user(told, spoil, command):
    status, error = told(spoil, command)

    assert status in (0, 1)
    assert not INTERNAL.search(error), error
    assert len(error.splitlines()) <= 1, error


@pytest.mark.parametrize("command", ["query", "diagnose", "export", "test"])
def test_the_damaged_segment_is_named_with_what_to_do(told, command):
    status, error = told(bad_page, command)

    assert status == 1
    assert re.search(r"/run/nodes/node/segments/0000000001-0000000001\.parquet: .*; rename it to .*\.damaged", error)


@pytest.mark.parametrize("command", ["query", "diagnose", "export", "test"])
def test_a_store_of_another_version_is_not_called_damaged(told, command):
    status, error = told(another_version, command)

    assert status == 1
    assert f"another version of trainermon wrote this segment (found format {FORMAT_VERSION + 1}" in error
    assert "damaged" not in error


@pytest.mark.parametrize("spoil", [empty, truncated, folder])
def test_a_run_whose_only_segment_is_damaged_has_no_rows(tmp_path, caplog, spoil):
    run = make_run(tmp_path / "run")
    spoil(segment_of(run))

    assert run_query(run, "SELECT count(*) FROM stats").rows == [(0,)]
    assert "0000000001-0000000001.parquet is damaged and left out" in caplog.text


def test_a_query_that_is_too_large_says_what_to_do(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setattr(
        "trainermon.exporters.store.tables.connect", lambda **_given: connect(memory_bytes=20 << 20, spill=None)
    )

    with pytest.raises(QueryError, match=r"does not fit into memory.*fewer rows.*TMPDIR") as error:
        run_query(run, "SELECT list(i ORDER BY random()) FROM range(5000000) AS numbers(i)")
    assert not INTERNAL.search(str(error.value))


def test_a_wrong_query_is_answered_by_its_place_and_the_tables(tmp_path):
    run = make_run(tmp_path / "run")

    with pytest.raises(QueryError) as error:
        run_query(run, "bad sql")
    first, *_, last = str(error.value).splitlines()
    assert first == 'the query is refused: syntax error at or near "bad"'
    assert last.startswith("Tables: alerts")


def test_what_no_command_has_put_into_words_is_one_line(monkeypatch, capsys):
    def fail(*_arguments):
        raise duckdb.Error("TProtocolException: Invalid data\n\nLINE 1: SELECT")

    monkeypatch.setattr(cli, "_run", fail)

    assert cli.main(["query"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
