import argparse
import csv
import http.server
import io
import json
import math
import os
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from trainermon.core.errors import QueryError, StoreError
from trainermon.core.journal import Header
from trainermon.core.values import Coordinates, Kind, SeriesKey, StatBlock
from trainermon.exporters.store import query as subject
from trainermon.exporters.store.query import describe, find_run, flush_agents, path_or_run, run_query
from trainermon.exporters.store.store import SegmentWriter, open_run

KEYS = (SeriesKey(Kind.LOSS, "loss"), SeriesKey(Kind.ACTV, "h.0", "output.0"))


def make_run(run_dir, *, num_steps=3, loss=2.5):
    writer = SegmentWriter(run_dir / "nodes" / "node" / "segments")
    header = Header(
        run_id=run_dir.name,
        attempt=1,
        coordinates=Coordinates(),
        host="node",
        pid=1,
        started_s=0.0,
        series=KEYS,
        placements=(None, None),
    )
    for step in range(num_steps):
        values = np.array([[1, loss, loss, loss, loss**2, 0, 0, 0], [4, 0.0, 1.0, 2.0, 2.0, 2, 1, 0]]).T
        series = np.arange(2, dtype=np.uint32)
        block = StatBlock(step=step, time_s=float(step), series=series, values=np.ascontiguousarray(values))
        writer.add(header, KEYS, block)
    writer.commit({})
    return run_dir


def query(capsys, *words):
    parser = argparse.ArgumentParser()
    subject.add_arguments(parser)
    assert subject.main(parser.parse_args([str(word) for word in words])) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINERMON_SPOOL", str(tmp_path / "spool"))


def test_a_table_is_aligned_and_says_how_many_rows_there_are(tmp_path, capsys):
    run = make_run(tmp_path / "run")

    out = query(
        capsys,
        run,
        "SELECT step, kind, max AS largest, 1.8e9 + step AS time_s, micro_step FROM stats WHERE step < 2 ORDER BY ALL",
    )

    assert out.splitlines() == [
        "step  kind  largest        time_s  micro_step",
        "----  ----  -------  ------------  ----------",
        "   0  actv        1  1800000000.0",
        "   0  loss      2.5  1800000000.0",
        "   1  actv        1  1800000001.0",
        "   1  loss      2.5  1800000001.0",
        "(4 rows)",
    ]


def test_lists_and_maps_are_as_short_as_numbers(tmp_path, capsys):
    run = make_run(tmp_path / "run")

    out = query(capsys, run, "SELECT [1 / 3, NULL] AS list, MAP {'lr': 2e-5 / 3, 'x': 1} AS map")

    assert out.splitlines()[2].split("  ") == ["[0.333333, ]", "{lr: 6.66667e-06, x: 1}"]


def test_a_terminal_is_told_nothing_by_values_and_names(tmp_path, capsys):
    run = make_run(tmp_path / "run")

    out = query(capsys, run, "SELECT 'a' || chr(27) || '[2J' || chr(10) AS \"b\x1b[31m\", [chr(7)] AS list")

    assert out.splitlines()[::2] == [r"b\x1b[31m   list", r"a\x1b[2J\n  [\x07]"]


def test_csv_and_json_hold_the_same_values(tmp_path, capsys):
    run = make_run(tmp_path / "run", loss=math.inf)
    sql = "SELECT step, name, sum, micro_step FROM stats WHERE kind = 'loss' ORDER BY step"

    as_csv = list(csv.DictReader(io.StringIO(query(capsys, run, sql, "--format", "csv"))))
    as_json = json.loads(query(capsys, run, sql, "--format", "json"))

    assert as_json[0] == {"step": 0, "name": "loss", "sum": "Infinity", "micro_step": None}
    assert as_csv[0] == {"step": "0", "name": "loss", "sum": "inf", "micro_step": ""}
    assert len(as_csv) == len(as_json) == 3


def test_a_limit_is_kept_and_told(tmp_path, capsys):
    run = make_run(tmp_path / "run")

    out = query(capsys, run, "SELECT step FROM stats", "--limit", "2")
    exact = query(capsys, run, "SELECT step FROM stats LIMIT 2", "--limit", "2")

    assert out.endswith("... only the first 2 rows; --limit or LIMIT shows others\n")
    assert exact.endswith("(2 rows)\n")


def test_without_sql_the_tables_and_examples_are_shown_and_the_examples_work(tmp_path, capsys):
    run = make_run(tmp_path / "run")

    out = query(capsys, run)

    for text in (
        "all_stats, stats (kind varchar",
        "steps (attempt",
        "alerts (host",
        "alerts_handled (host",
        "are NaN",
        "Examples:",
    ):
        assert text in out
    examples = out.split("Examples:\n")[1].split(";")[:-1]
    assert len(examples) == 8
    for example in examples:
        run_query(run, example)


@pytest.mark.parametrize("width", [72, 100])
def test_what_is_listed_is_as_wide_as_the_terminal_and_whole(tmp_path, monkeypatch, capsys, width):
    run = make_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))

    lines = query(capsys, "run").splitlines()

    assert width - 20 < max(map(len, lines)) <= width
    with open_run(run) as connection:
        for table in ("stats", "steps", "step_values", "alerts", "alerts_handled"):
            for column, kind in connection.execute(
                f"SELECT column_name, column_type FROM (DESCRIBE {table})"
            ).fetchall():
                assert any(f"{column} {kind.lower()}" in line for line in lines)


def test_a_run_is_a_path_an_id_or_the_newest(tmp_path, capsys):
    root = tmp_path / "trainermon_output"
    for age, name in ((5, "new"), (9, "old")):
        make_run(root / name)
        os.utime(root / name, (1e9 - age, 1e9 - age))
    (root / "notes").mkdir()

    assert find_run(str(root / "old")) == root / "old"
    assert find_run("old").resolve() == root / "old"
    assert find_run(None).resolve() == root / "new"
    assert query(capsys, "SELECT count(*) AS n FROM stats", "--format", "csv") == "n\n6\n"
    with pytest.raises(
        QueryError, match=r"no run 'other': neither it nor .*trainermon_output/other is a run directory"
    ):
        find_run("other")
    with pytest.raises(QueryError, match="no run under"):
        find_run(None, tmp_path / "empty")


NAMES = "alerts, alerts_handled, all_stats, histograms, stats, step_values, steps"
TABLES = f"Tables: {NAMES} (`trainermon query RUN` lists their columns)"


@pytest.mark.parametrize(
    ("sql", "reason", "nearest"),
    [
        ("SELECT nme FROM stats", 'Referenced column "nme" not found', "histograms.name, stats.name"),
        ("SELECT S.NonFinit FROM stats S", 'does not have a column named "NonFinit"', "stats.nonfinite, stats.finite"),
        (
            "SELECT grad_nrm FROM stats",
            '"grad_nrm" not found',
            "step_values.grad_norm, steps.grad_norm, step_values.local_grad_norm, step_values.global_grad_norm",
        ),
        (
            "FROM stats JOIN steps USING (los)",
            'Column "los" does not exist on left side',
            "step_values.loss, steps.loss, histograms.low",
        ),
        (
            "SELECT * EXCLUDE (los) FROM steps",
            'Column "los" in EXCLUDE list not found',
            "step_values.loss, steps.loss, histograms.low",
        ),
        ("SELECT zzzz FROM stats", '"zzzz" not found', None),
        ("SELECT name, sum(step) FROM stats", "must appear in the GROUP BY clause", None),
        ("SELEC 1", "syntax error", None),
        ("FROM stat", 'Did you mean "stats"?', None),
        (" -- nothing", "the query is empty", None),
    ],
)
def test_a_wrong_query_is_told_why_and_what_there_is(tmp_path, sql, reason, nearest):
    run = make_run(tmp_path / "run")

    with pytest.raises(QueryError) as refused:
        run_query(run, sql)

    message, hint = str(refused.value).rsplit("\n", 1)
    assert reason in message
    assert hint == (f"{TABLES}; nearest columns: {nearest}" if nearest else TABLES)


def test_a_wrong_query_is_marked_where_it_is_wrong(tmp_path):
    with pytest.raises(QueryError) as refused:
        run_query(make_run(tmp_path / "run"), "SELECT nme FROM stats")

    *_, line, caret, _ = str(refused.value).split("\n")
    assert line[caret.index("^") :].startswith("nme ")


def test_a_run_without_segments_can_be_queried(tmp_path):
    (tmp_path / "run" / "nodes").mkdir(parents=True)

    assert run_query(tmp_path / "run", "FROM steps").rows == []
    assert "stats (" in describe(tmp_path / "run")


def test_a_segment_that_is_merged_away_during_the_query_does_not_matter(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    open_run, calls = vars(subject)["open_run"], []

    def open_and_replace(run_dir):
        connection = open_run(run_dir)
        calls.append(run_dir)
        if len(calls) < 3:  # what this connection is about to read goes away
            (segment,) = run_dir.glob("nodes/node/segments/*.parquet")
            segment.rename(segment.with_name(f"0000000001-{len(calls) + 1:010d}.parquet"))
        return connection

    monkeypatch.setattr(subject, "open_run", open_and_replace)

    assert run_query(run, "SELECT count(*) FROM stats").rows == [(6,)]
    assert len(calls) == 3


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    run = make_run(tmp_path / "run")

    with pytest.raises(StoreError, match="No files found"):
        run_query(run, "FROM 'nothing.parquet'")


@pytest.fixture
def agent():
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append((self.path, self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    thread.join()
    server.server_close()


def write_status(tmp_path, run, **status):
    spool = tmp_path / "spool" / run.name
    spool.mkdir(parents=True)
    (spool / "agent.status.json").write_text(json.dumps({"output": str(run), **status}))
    token = run / "nodes" / socket.gethostname() / "token"
    token.parent.mkdir(parents=True)
    token.write_text("secret\n")


def test_the_agent_of_a_running_run_is_asked_to_store_what_it_holds(tmp_path, agent, capsys):
    url, requests = agent
    run = make_run(tmp_path / "run")
    write_status(tmp_path, run, url=url)

    query(capsys, run, "SELECT 1")

    assert requests == [("/api/flush", "Bearer secret")]


@pytest.mark.parametrize("changes", [{"output": "/somewhere/else/run"}, {"url": None}, {"url": "file:///etc/passwd"}])
def test_nobody_else_is_given_the_token(tmp_path, agent, changes):
    url, requests = agent
    run = make_run(tmp_path / "run")
    write_status(tmp_path, run, **{"url": url, **changes})

    assert not flush_agents(run)
    assert requests == []


def test_an_agent_that_is_gone_or_silent_costs_little_and_no_error(tmp_path):
    run = make_run(tmp_path / "run")
    assert not flush_agents(run)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write_status(tmp_path, run, url=f"http://127.0.0.1:{silent.getsockname()[1]}")

        assert not flush_agents(run, timeout_s=0.1)


def test_neither_home_nor_working_directory_need_be_writable(tmp_path, monkeypatch):
    run = make_run(tmp_path / "run")
    monkeypatch.setenv("HOME", "/nonexistent")
    monkeypatch.chdir("/proc")

    assert run_query(run, "SELECT count(*) FROM stats").rows == [(6,)]


def test_a_name_is_that_of_a_run_where_no_path_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINERMON_OUTPUT", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/named/nodes").mkdir(parents=True)
    (tmp_path / "runs/pack.zip/nodes").mkdir(parents=True)
    (tmp_path / "pack.zip").touch()
    assert path_or_run("named") == tmp_path / "runs/named"
    assert path_or_run("pack.zip") == Path("pack.zip")  # what lies here comes first
    assert path_or_run("neither") == Path("neither")
