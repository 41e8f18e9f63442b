"""A run in object storage answers as the run on disk, of which a query reads only what it needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.dashboards.stored_runs import StoredCurves, alert_of, store_run
from tests.exporters.object_storage import BUCKET, KEY, SECRET, ObjectStorage, serving_objects, trainermon
from tests.package_programs import find_wheels
from trainermon.cli import main
from trainermon.core.errors import QueryError, StoreError
from trainermon.core.values import as_plain
from trainermon.exporters.store.buckets import BucketPath, find_bucket_run
from trainermon.exporters.store.query import describe, find_run, run_query
from trainermon.exporters.store.retention import RetentionPolicy, compact
from trainermon.exporters.store.tables import open_run

pytestmark = pytest.mark.extras

QUERIES = (
    "FROM stats ORDER BY ALL",
    "FROM steps ORDER BY step",
    "SELECT step, rank, loss FROM step_values WHERE rank = 1 ORDER BY step",
    "SELECT host, id, rule, message FROM alerts",
    "FROM alerts_handled",
)
ADDRESS = "memory://runs/run"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return store_run(tmp_path / "run", StoredCurves.made(90, seed=2), segments=3, alerts=(alert_of(),))


@pytest.fixture
def bucket(run: Path) -> Iterator[fsspec.AbstractFileSystem]:
    """Object storage in this process, with a copy of the run."""
    storage = fsspec.filesystem("memory")
    put(storage, run)
    yield storage
    storage.rm("/runs", recursive=True)


def put(storage: fsspec.AbstractFileSystem, run: Path, name: str = "run") -> None:
    for path in run.rglob("*"):
        if path.is_file():
            storage.pipe_file(f"/runs/{name}/{path.relative_to(run).as_posix()}", path.read_bytes())


@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("query", QUERIES)
def test_answers_are_those_of_the_run_on_disk(run: Path, query: str) -> None:
    assert run_query(find_bucket_run(ADDRESS), query) == run_query(run, query)


@pytest.mark.usefixtures("bucket")
def test_tables_are_those_of_the_run_on_disk(run: Path) -> None:
    def lines(path: Path | BucketPath) -> list[str]:
        return describe(path).splitlines()[1:]

    assert lines(find_bucket_run(ADDRESS)) == lines(run)


@pytest.mark.usefixtures("bucket")
def test_paths_say_what_those_on_disk_say(run: Path) -> None:
    found = find_bucket_run(f"{ADDRESS}/")

    for pattern in (
        "*",
        "nodes/*",
        "nodes/*/segments",
        "nodes/*/segments/*.parquet",
        "ranks/rank0000[1-9].json",
        "no/*",
    ):
        names = [path.relative_to(run).as_posix() for path in run.glob(pattern)]
        assert sorted(map(str, found.glob(pattern))) == sorted(f"memory:///runs/run/{name}" for name in names)
    for name in ("run.json", "nodes", "nodes/node-a/alerts.jsonl", "nothing"):
        one, other = found / name, run / name
        assert (one.is_file(), one.is_dir(), one.exists()) == (other.is_file(), other.is_dir(), other.exists())
        assert (one.name, one.parent.name) == (other.name, other.parent.name)
    assert (found / "run.json").read_bytes() == (run / "run.json").read_bytes()
    assert {path.name for path in (found / "ranks").iterdir()} == {path.name for path in (run / "ranks").iterdir()}
    with pytest.raises(FileNotFoundError):
        (found / "nothing").read_bytes()


def test_a_query_reads_the_footers_and_the_columns_that_it_needs(tmp_path: Path) -> None:
    storage = fsspec.filesystem("memory")
    run = store_run(tmp_path / "run", StoredCurves.made(20_000), segments=1)
    put(storage, run)
    found = find_bucket_run(ADDRESS)
    (segment,) = run.glob("nodes/*/segments/*.parquet")
    query = "SELECT max(step), avg(sum) FROM stats WHERE kind = 'grad_reduced' AND name = 'ln_f.weight' AND rank = 1"

    with open_run(found) as connection:
        assert connection.execute(query).fetchall() == run_query(run, query).rows
        first = found.objects.num_bytes
        assert connection.execute(query).fetchall() == run_query(run, query).rows

    assert 0 < first < segment.stat().st_size / 3
    assert found.objects.num_bytes == first  # what was read is kept
    storage.rm("/runs", recursive=True)


def test_what_was_merged_since_the_run_was_listed_is_found(
    run: Path, bucket: fsspec.AbstractFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    found = find_bucket_run(ADDRESS)
    (segments,) = run.glob("nodes/*/segments")
    assert compact(segments, RetentionPolicy(max_bytes=1 << 40, full_detail_s=0.0), now_s=2e9) > 0
    bucket.rm("/runs/run/nodes/node-a/segments", recursive=True)
    put(bucket, run)

    assert run_query(found, QUERIES[0]) == run_query(run, QUERIES[0])
    assert "damaged" not in caplog.text


@pytest.mark.parametrize("name", ["team [1]", "what?*", "a#b&c=%20", "größe"])
def test_a_key_is_never_a_pattern(run: Path, name: str) -> None:
    storage = fsspec.filesystem("memory")
    put(storage, run, name)

    try:
        assert run_query(find_bucket_run(f"memory://runs/{name}"), QUERIES[3]) == run_query(run, QUERIES[3])
    finally:
        for path in storage.find(f"/runs/{name}"):
            storage.rm_file(path)  # `rm` takes a path for a pattern


def test_a_damaged_object_is_left_out(
    run: Path, bucket: fsspec.AbstractFileSystem, caplog: pytest.LogCaptureFixture
) -> None:
    bad = "nodes/node-a/segments/0000000002-0000000002.parquet"
    bucket.pipe_file(f"/runs/run/{bad}", b"PAR1 no segment PAR1")
    (run / bad).unlink()

    assert run_query(find_bucket_run(ADDRESS), QUERIES[0]) == run_query(run, QUERIES[0])
    assert f"{bad} is damaged and left out" in caplog.text


def test_storage_that_fails_is_told_from_damage(
    bucket: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(key: str, **_: int) -> bytes:
        asked.append(key)
        raise PermissionError("Access Denied")

    found = find_bucket_run(ADDRESS)
    monkeypatch.setattr(bucket, "cat_file", refuse)

    with (
        pytest.raises(StoreError, match=r"memory:///runs/run/nodes/.*parquet cannot be read: Access Denied"),
        open_run(found),
    ):
        pass
    assert len(asked) <= 16  # as many as were asked for at once: none after the first fault


@pytest.mark.usefixtures("bucket")
def test_nothing_is_written() -> None:
    with pytest.raises(QueryError, match="only read"):
        run_query(find_bucket_run(ADDRESS), f"COPY (SELECT 1) TO '{ADDRESS}/new.csv' (USE_TMP_FILE false)")


@pytest.mark.usefixtures("bucket")
def test_what_is_no_run_is_refused() -> None:
    with pytest.raises(QueryError, match=r"memory://runs: found run; expected those of a run directory"):
        find_bucket_run("memory://runs")
    with pytest.raises(QueryError, match="found no object below it"):
        find_bucket_run("memory://runs/none")
    with pytest.raises(QueryError, match="Protocol not known: nowhere"):
        find_bucket_run("nowhere://runs/run")
    with pytest.raises(QueryError, match=r"ftp://127.0.0.1:1/run cannot be listed: .*refused"):
        find_bucket_run("ftp://127.0.0.1:1/run")
    with pytest.raises(QueryError, match="only `trainermon query` reads runs in object storage"):
        find_run(ADDRESS)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStorage]:
    with serving_objects(tmp_path_factory.mktemp("storage")) as storage:
        yield storage


@pytest.mark.server
def test_a_run_is_queried_where_its_nodes_have_copied_it(
    run: Path, storage: ObjectStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    (segments,) = run.glob("nodes/node-a/segments")
    (segments / ".0000000004-0000000004.parquet.tmp").write_bytes(b"half")
    (run / "nodes/node-b").mkdir()
    (run / "nodes/node-b/token").write_text("secret")
    (run / "nodes/node-b/alerts.jsonl").write_text(json.dumps(as_plain(alert_of(id="alert-2"))))

    for host in ("node-a", "node-b"):
        address = storage.sync(run, host=host)
    assert _same_answers(run, address, storage, capsys)

    assert compact(segments, RetentionPolicy(max_bytes=1 << 40, full_detail_s=0.0), now_s=2e9) > 0
    for host in ("node-a", "node-b"):
        storage.sync(run, host=host)
    assert _same_answers(run, address, storage, capsys)
    listed = storage.rclone("lsf", "--recursive", "--files-only", f"store:{BUCKET}/run").splitlines()
    kept = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    assert set(listed) == {name for name in kept if not name.endswith((".tmp", ".compact.lock", "/token"))}


def _same_answers(run: Path, address: str, storage: ObjectStorage, capsys: pytest.CaptureFixture[str]) -> bool:
    """Return whether all queries are answered by the bucket as by the disk, without any remark.

    The disk is asked in this process, which has imported already what a command would.
    """
    for query in QUERIES:
        found = trainermon("query", address, query, "--format", "csv", environment=storage.environment)
        assert main(["query", str(run), query, "--format", "csv"]) == 0
        assert (found.stdout, found.stderr) == (capsys.readouterr().out, "")
    return True


@pytest.mark.server
def test_plain_duckdb_reads_the_segments_with_httpfs(run: Path, storage: ObjectStorage) -> None:
    address = storage.sync(run)
    text = (Path(__file__).parents[3] / "docs/scale.md").read_text()
    query = re.search(r"```sql\n(.*httpfs.*?)```", text, re.DOTALL)[1].replace("s3://bucket/runs/a", address)
    settings = f"(TYPE s3, KEY_ID '{KEY}', SECRET '{SECRET}', ENDPOINT '{storage.url.removeprefix('http://')}',"
    query = query.replace("(TYPE s3, PROVIDER credential_chain)", f"{settings} USE_SSL false, URL_STYLE path)")
    query = query.replace("INSTALL httpfs;", "")
    program = (
        "import sys, duckdb; from duckdb_extensions import import_extension; import_extension('httpfs');"
        "print(duckdb.connect().execute(sys.argv[1]).fetchall())"
    )
    environment = {**os.environ, "PYTHONPATH": str(find_wheels("duckdb-httpfs")), "HOME": str(run)}

    done = subprocess.run([sys.executable, "-c", program, query], env=environment, text=True, capture_output=True)

    expected = run_query(run, "SELECT rank, count(*) FROM all_stats WHERE kind = 'loss' GROUP BY rank ORDER BY rank")
    assert done.stdout.strip() == str(expected.rows), done.stderr


@pytest.mark.server
@pytest.mark.parametrize(
    ("address", "changed", "said"),
    [
        (f"s3://{BUCKET}/none", {}, "found no object below it"),
        ("s3://no-such-bucket/run", {}, "The specified bucket does not exist"),
        (f"s3://{BUCKET}/run", {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "Unable to locate credentials"),
        (f"s3://{BUCKET}/run", {"AWS_SECRET_ACCESS_KEY": "another"}, "signature"),
        (f"s3://{BUCKET}/run", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "Could not connect"),
        (f"s3://{BUCKET}/run", {"PYTHONPATH": ""}, "`pip install s3fs`"),
    ],
)
def test_what_is_wrong_is_said(storage: ObjectStorage, address: str, changed: dict[str, str], said: str) -> None:
    done = trainermon("query", address, "FROM steps", environment={**storage.environment, **changed})

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"trainermon query: {address}")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
