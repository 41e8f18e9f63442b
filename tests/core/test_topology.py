"""What a run is called, and which attempt it is."""

import datetime
import itertools
import json
import re
import types

import pytest

from trainermon.core import topology
from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.spool import spool_of
from trainermon.core.topology import RunIdentity, find_coordinates, name_run
from trainermon.core.values import Coordinates


@pytest.fixture(autouse=True)
def first_monitor_of_its_process(monkeypatch):
    monkeypatch.setattr(topology, "_monitors_of_this_process", itertools.count())


@pytest.mark.parametrize(
    ("run_id", "environ", "expected"),
    [
        ("mine", {"TRAINERMON_RUN_ID": "other", "SLURM_JOB_ID": "7"}, "mine"),
        (None, {"TRAINERMON_RUN_ID": "other", "SLURM_JOB_ID": "7"}, "other"),
        (None, {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "x"}, "job-7"),
        (None, {"TORCHELASTIC_RUN_ID": "0123456789abcdef"}, "run-01234567"),
    ],
)
def test_the_explicit_name_comes_before_the_schedulers(tmp_path, run_id, environ, expected):
    run = name_run(Coordinates(), run_id=run_id, output_dir=str(tmp_path), environ=environ)

    assert run.run_id == expected
    assert run.directory == tmp_path / expected


def test_several_monitors_of_one_process_have_runs_of_their_own(tmp_path):
    environ = {"TRAINERMON_RUN_ID": "job"}

    names = [name_run(Coordinates(), output_dir=str(tmp_path), environ=environ).run_id for _ in range(3)]

    assert names == ["job", "job-2", "job-3"]


@pytest.mark.parametrize("environ", [{}, {"TORCHELASTIC_RUN_ID": "none"}])
def test_names_made_up_are_different(tmp_path, environ):
    names = {name_run(Coordinates(), output_dir=str(tmp_path), environ=environ).run_id for _ in range(5)}

    assert len(names) == 5


def test_output_directory_comes_from_argument_then_environment(tmp_path):
    ours = {"TRAINERMON_OUTPUT": str(tmp_path / "ours"), "MONITOR_OUTPUT_DIR": str(tmp_path / "theirs")}
    theirs = {"MONITOR_OUTPUT_DIR": str(tmp_path / "theirs")}

    assert name_run(Coordinates(), run_id="r", output_dir="/o", environ=ours).directory.as_posix() == "/o/r"
    assert name_run(Coordinates(), run_id="r", environ=ours).directory == tmp_path / "ours" / "r"
    assert name_run(Coordinates(), run_id="r", environ=theirs).directory == tmp_path / "theirs" / "r"


def test_a_restart_under_the_same_name_is_the_next_attempt(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text(json.dumps({"attempt": 4}))

    assert name_run(Coordinates(), run_id="r", output_dir=str(tmp_path), environ={}).attempt == 5


def test_a_foreign_run_file_is_refused(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text("[]")

    with pytest.raises(ConfigError, match="choose another run_id"):
        name_run(Coordinates(), run_id="r", output_dir=str(tmp_path), environ={})


@pytest.mark.extras
def test_several_ranks_agree_on_a_given_name_and_take_the_attempt_from_the_launcher(tmp_path):
    environ = {"TRAINERMON_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "2"}

    found = name_run(Coordinates(rank=1, world_size=2), output_dir=str(tmp_path), environ=environ)

    assert found == RunIdentity(run_id="r", attempt=3, directory=tmp_path / "r")


def test_a_run_file_that_others_may_write_is_not_believed(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text(json.dumps({"attempt": 4}))
    (tmp_path / "r").chmod(0o777)

    assert name_run(Coordinates(), run_id="r", output_dir=str(tmp_path), environ={}).attempt == 1


@pytest.mark.extras
def test_several_ranks_without_anything_to_agree_through_are_refused(tmp_path):
    with pytest.raises(AttachError, match="init_process_group before set_monitor, or set TRAINERMON_RUN_ID"):
        name_run(Coordinates(world_size=2), output_dir=str(tmp_path), environ={})
    with pytest.raises(AttachError, match=r"no store.* cannot agree on a run id: set TRAINERMON_RUN_ID"):
        name_run(Coordinates(world_size=2), output_dir=str(tmp_path), environ={}, has_store=False)


@pytest.mark.extras
def test_coordinates_come_from_the_launcher_where_nothing_is_initialised():
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}

    found = find_coordinates(environ)

    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (5, 8, 1, 4)
    assert (found.dp, found.dp_size) == (5, 8)


def with_process_group(monkeypatch, **functions):
    monkeypatch.setattr(topology, "_initialised_distributed", lambda: types.SimpleNamespace(**functions))


def test_the_rank_and_its_place_on_each_axis_come_from_the_process_groups(monkeypatch):
    ranks, sizes = {None: 5, "of tp": 1, "of dp": 2}, {None: 8, "of tp": 2, "of dp": 4}
    with_process_group(
        monkeypatch,
        get_rank=lambda group=None: ranks[group],
        get_world_size=lambda group=None: sizes[group],
    )

    found = find_coordinates({"LOCAL_RANK": "1", "RANK": "99"}, {"tp": "of tp", "dp": "of dp", "pp": None})

    assert found == Coordinates(
        rank=5, world_size=8, local_rank=1, local_world_size=8, tp=1, tp_size=2, dp=2, dp_size=4
    )


@pytest.fixture
def shared_store(monkeypatch):
    """Give every rank of a test the one store of a job."""
    dist = pytest.importorskip("torch.distributed", reason="the light tests run without torch")
    store = dist.HashStore()
    with_process_group(monkeypatch, distributed_c10d=types.SimpleNamespace(_get_default_store=lambda: store))
    monkeypatch.setattr(topology, "STORE_TIMEOUT", datetime.timedelta(milliseconds=10))


@pytest.mark.extras
def test_every_rank_has_the_name_that_rank_0_made(shared_store, monkeypatch, tmp_path):
    found = []
    for rank in range(3):
        monkeypatch.setattr(topology, "_monitors_of_this_process", itertools.count())
        coordinates = Coordinates(rank=rank, world_size=3)
        found.append(name_run(coordinates, output_dir=str(tmp_path / str(min(rank, 1))), environ={}))

    assert found[0] == found[1] == found[2]
    assert found[0].directory.parent == tmp_path / "0"


@pytest.mark.extras
def test_a_rank_that_rank_0_leaves_alone_says_what_to_do(shared_store, tmp_path):
    with pytest.raises(AttachError, match=r"rank 1 waited 0 s for rank 0 .*: call set_monitor on every rank"):
        name_run(Coordinates(rank=1, world_size=2), output_dir=str(tmp_path), environ={})


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("/work/train_gpt.py", "train_gpt"),
        ("train.py", "train"),
        ("/lib/package/__main__.py", "package"),
        ("-c", ""),
        ("", ""),
        ("/lib/ipykernel_launcher.py", ""),
        ("/bin/pytest", ""),
        ("a b/finé tune!.py", "fin-tune"),
        (f"{'x' * 300}.py", "x" * 40),
    ],
)
def test_a_run_without_a_name_is_called_after_its_script(tmp_path, monkeypatch, script, expected):
    monkeypatch.setattr("sys.argv", [script, "--lr", "1"])

    name = name_run(Coordinates(), output_dir=str(tmp_path), environ={}).run_id

    assert re.fullmatch(rf"\d{{8}}-\d{{6}}-{expected}{'-' if expected else ''}[0-9a-f]{{4}}", name)
    spool_of(name, tmp_path / name)  # a name that a spool can have
