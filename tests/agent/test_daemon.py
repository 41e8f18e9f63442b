"""What a running agent shows, obeys and survives; with real processes, and in this one where something is broken."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import duckdb
import psutil
import pytest

from tests.agent.nodes import expected, is_agent, wait_for
from tests.agent.orders.test_dumps import FOLDER, REPLAY
from trainermon.agent import commits as commits_module
from trainermon.agent import pipeline as pipeline_module
from trainermon.agent.alerting import AlertBook
from trainermon.agent.assembly import assemble, read_token
from trainermon.agent.loop import NodeAgent
from trainermon.agent.settings import load_settings
from trainermon.alerts.log import AlertLog
from trainermon.core.launcher import start_agent


def follow_in_this_process(run, talk, *, stop=True):
    """Run the agent of `run` on this thread's loop while `talk(agent)` runs on another; return what `talk` returns."""

    async def main():
        with ThreadPoolExecutor(1) as executor:
            parts = assemble(run.spool, load_settings(run.spool), run.node_dir, executor)
            agent = NodeAgent(parts, executor, host="node")
            following = asyncio.create_task(agent.run())
            try:
                return await asyncio.to_thread(talk, agent)
            finally:
                if stop:
                    agent.stop()
                await following

    return asyncio.run(main())


def test_the_run_is_described_as_agreed_with_the_page(make_run):
    run = make_run(world_size=1)
    (run.output / "ranks").mkdir()
    about = {"parameters": 1000, "bytes_per_step": 288}
    (run.output / "ranks" / "rank00000.json").write_text(json.dumps(about))
    rank = run.rank(start_agent=True)
    rank.steps(0, 6)

    found = wait_for(lambda: (r := run.get_json("api/run"))["step"] == 5 and r["model"] and r, "step 5")

    assert set(found) >= {
        "run_id", "attempt", "host", "state", "step", "started_s", "world_size", "output", "ranks", "loss", "grad_norm",
        "step_time_s", "alerts_firing", "bytes_per_step", "skipped_records", "lag_s", "version", "model", "heatmaps",
    }  # fmt: skip
    assert (found["run_id"], found["attempt"], found["state"], found["world_size"]) == ("run", 1, "running", 1)
    assert found["loss"] == pytest.approx(10 / 6)
    assert found["grad_norm"] == pytest.approx((4 * 5001) ** 0.5)
    assert found["model"] == {"parameters": 1000, "is_whole": True}
    assert found["bytes_per_step"] == 288
    assert [entry["kind"] for entry in found["heatmaps"]] == ["grad_reduced"]
    (state,) = found["ranks"]
    assert set(state) == {"rank", "place", "alive", "step", "phase", "lag_s"}
    assert (state["alive"], state["step"], state["phase"]) == (True, 5, "step")
    lines = run.get_json("api/lines?names=loss,grad_norm,step_time")
    assert lines["steps"] == list(range(6))
    assert lines["series"]["step_time"] == pytest.approx([0.1] * 6)
    grid = run.get("api/heatmap?kind=grad_reduced&statistic=rms")
    header = json.loads(grid[4 : 4 + int.from_bytes(grid[:4], "little")])
    assert header["rows"] == [f"h.{layer}.weight" for layer in range(4)]


def test_alerts_reach_an_open_page(run):
    rank = run.rank(start_agent=True)
    with urllib.request.urlopen(run.running()["url"] + "events", timeout=900) as stream:
        assert stream.readline() == b"retry: 1000\n"
        rank.steps(0, 1, nan=True)
        rank.steps(1, 1)
        lines = [stream.readline()]
        while sum(line in (b"event: step\n", b"event: alert\n") for line in lines) < 2 or lines[-1] != b"\n":
            lines.append(stream.readline())

    alert = next(json.loads(line[6:]) for line in lines if b"gradient-nonfinite" in line)
    assert (alert["rank"], alert["step"], alert["value"]) == (0, 0, 3.0)
    assert alert["statistic"] == "nonfinite"


def test_no_series_of_a_rank_is_exposed_after_its_end(make_run):
    run = make_run(linger_s=60, world_size=2)
    first, second = run.rank(0, start_agent=True), run.rank(1)
    first.steps(0, 3)
    second.steps(0, 3)
    both = {b'rank="0"', b'rank="1"'}
    wait_for(lambda: all(name in run.get("metrics") for name in both), "series of both ranks")

    first.kill()
    wait_for(lambda: b'rank="0"' not in run.get("metrics"), "the end of rank 0's series")
    assert b'rank="1"' in run.get("metrics")
    second.end()
    wait_for(lambda: run.status()["state"] == "finished", "a finished run")

    assert not any(name in run.get("metrics") for name in both)
    assert b"trainermon_commits_total" in run.get("metrics")


def test_a_rank_that_closes_hears_soon_that_all_is_stored(make_run):
    run = make_run(flush_s=1000, world_size=2)
    rank = run.rank(start_agent=True)
    run.rank(1)  # is still there: it is not the end of the run that makes the agent store
    run.running()
    rank.steps(0, 5)

    position = rank.end()

    wait_for(lambda: run.status()["flushed"].get("0") == position, "the acknowledgement")
    assert run.stored() == expected(0, range(5))


def test_files_are_private_and_prometheus_finds_the_agent(make_run):
    run = make_run(linger_s=60)
    run.rank(start_agent=True).steps(0, 2)
    url = run.running()["url"]
    targets = run.node_dir / "prometheus_sd.json"

    (group,) = wait_for(lambda: targets.exists() and json.loads(targets.read_text()), "the target file")

    assert f"http://{group['targets'][0]}/" == url
    wait_for(lambda: list(run.node_dir.glob("segments/*.parquet")), "a segment")
    for path in [*run.node_dir.rglob("*"), *run.spool.iterdir()]:
        assert path.stat().st_mode & 0o077 == 0 or path.name == "agent.json", path  # the test's own
    run.post("api/stop")
    wait_for(lambda: json.loads(targets.read_text()) == [], "an empty target list")


def test_a_posted_command_reaches_the_ranks_once(make_run):
    run = make_run(world_size=2)
    first, second = run.rank(0, start_agent=True), run.rank(1)
    first.steps(0, 10)
    second.steps(0, 12)
    wait_for(lambda: [r["step"] for r in run.get_json("api/run")["ranks"]] == [9, 11], "both heartbeats")

    status, accepted = run.post("api/commands", {"id": "m1", "action": "dump"})
    assert (status, accepted["status"], accepted["ranks"]) == (202, "accepted", [0, 1])
    assert accepted["command"]["first_step"] >= 13  # ahead of the fastest rank
    assert run.post("api/commands", {"id": "m2", "action": "dump", "ranks": [1]})[0] == 202
    many = {"id": "m5", "action": "dump", "ranks": [1] * 100_000}
    assert run.post("api/commands", many)[1]["ranks"] == [1]
    assert first.commands() == [1, ["m1"]]
    assert second.commands() == [3, ["m1", "m2", "m5"]]

    second.steps(12, 1)
    assert run.post("api/commands", {"id": "m1", "action": "dump"}) == (200, {"status": "duplicate"})
    assert run.post("api/commands", {"id": "m1", "action": "dump", "num_steps": 2})[0] == 409
    assert run.post("api/commands", {"id": "m3", "action": "dump", "ranks": [7]})[0] == 400
    assert run.post("api/commands", {"id": "m4", "action": "dump"}, token="wrong")[0] == 401
    assert run.post("api/commands", {"id": "m6", "action": "dump", "first_step": 1 << 60})[0] == 409
    assert second.commands() == [3, ["m1", "m2", "m5"]]


def test_a_command_that_can_do_nothing_is_refused(make_run):
    run = make_run(world_size=2, linger_s=60)
    ranks = first, second = run.rank(0, start_agent=True), run.rank(1)
    first.steps(0, 13)
    second.steps(0, 10)
    wait_for(lambda: [r["step"] for r in run.get_json("api/run")["ranks"]] == [12, 9], "both heartbeats")

    status, answer = run.post("api/commands", {"id": "past", "action": "dump", "first_step": 11})
    assert status == 409
    assert answer["detail"] == ("step 11 is past: rank 0 is at step 12; leave first_step out for the next possible one")
    assert first.commands()[1] == []
    just = {"id": "just", "action": "dump", "first_step": 12}
    assert run.post("api/commands", just)[0] == 202
    assert run.post("api/commands", {**just, "id": "ahead", "first_step": 11, "ranks": [1]})[0] == 202

    for rank in ranks:
        rank.end()
    wait_for(lambda: run.get_json("api/run")["state"] == "finished", "the end of the run")
    assert run.post("api/commands", {"id": "late", "action": "dump"}) == (409, {"detail": "the run has ended"})
    assert run.post("api/commands", just) == (200, {"status": "duplicate"})


def test_a_command_is_remembered_by_the_next_agent(run):
    rank = run.rank(start_agent=True)
    rank.steps(0, 1)
    pid = run.running()["pid"]
    wait_for(lambda: run.get_json("api/run")["attempt"] == 1, "the journal's header")
    run.post("api/commands", {"id": "m1", "action": "dump", "first_step": 50})
    run.post("api/stop")
    wait_for(lambda: not is_agent(pid), "the end of the first agent")

    start_agent(run.spool)
    run.running(other_than=pid)

    assert run.post("api/commands", {"id": "m1", "action": "dump", "first_step": 50})[1]["status"] == "duplicate"
    assert rank.commands()[1] == ["m1"]
    attempt_2 = json.loads((run.spool / "agent.commands.jsonl").read_text().strip())
    assert attempt_2["ranks"] == [0]


def test_flush_stores_now(make_run):
    run = make_run(flush_s=1000)
    rank = run.rank(start_agent=True)
    rank.steps(0, 3)
    wait_for(lambda: run.get_json("api/run")["step"] == 2, "step 2")

    assert run.post("api/flush") == (200, {"status": "flushed"})

    assert run.stored() == expected(0, range(3))


def test_an_alert_that_escalates_orders_a_dump(make_run, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "rules:\n"
        "  - name: loss-low\n"
        "    severity: warning\n"
        "    on: {kind: loss, statistic: mean}\n"
        "    when: {threshold: {below: 4.0}}\n"
        "    for: 1\n"
        "    escalate: {action: dump, task: statistics, steps: 2}\n"
        "    summary: loss is low\n"
    )
    run = make_run(rules=str(rules))
    rank = run.rank(start_agent=True)
    run.running()
    rank.steps(0, 3)

    wait_for(lambda: rank.commands()[0], "a command")

    (identity,) = rank.commands()[1]
    assert identity == run.get_json("api/alerts")[0]["id"]


def test_a_fault_of_one_consumer_costs_neither_the_store_nor_the_others(run, monkeypatch):
    def broken(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr("trainermon.exporters.prometheus.exposition.Exposition.update", broken)
    rank = run.rank()

    def talk(_agent):
        run.running()
        rank.steps(0, 5, nan=True)
        wait_for(lambda: run.get_json("api/alerts"), "an alert")
        wait_for(lambda: len(run.stored()) == 5, "five stored steps")
        return run.get("metrics").decode()

    metrics = follow_in_this_process(run, talk)

    assert run.stored() == expected(0, range(5))
    assert 'trainermon_errors_total{run="run"} 5.0' in metrics


def test_a_fault_of_a_turn_is_survived_and_counted(run, monkeypatch):
    monkeypatch.setattr("trainermon.agent.loop.FAULT_PAUSE_S", 0.01)
    faults = iter([True] * 5)
    step = pipeline_module.RecordPipeline.step

    def sometimes(self):
        if next(faults, False):
            raise RuntimeError("planted")
        return step(self)

    monkeypatch.setattr(pipeline_module.RecordPipeline, "step", sometimes)
    rank = run.rank()
    rank.steps(0, 5)

    def talk(agent):
        wait_for(lambda: len(run.stored()) == 5, "five stored steps")
        return run.get("metrics").decode()

    assert 'trainermon_errors_total{run="run"} 5.0' in follow_in_this_process(run, talk)


def test_a_worker_thread_that_hangs_in_a_commit_holds_up_neither_rules_nor_metrics_nor_page(run, monkeypatch):
    """A file system whose server does not answer, as seen from here: the commit does not return."""
    answers = threading.Event()
    commit = commits_module.commit

    def hanging(*arguments):
        answers.wait()
        return commit(*arguments)

    monkeypatch.setattr(commits_module, "commit", hanging)
    rank = run.rank()

    def talk(_agent):
        try:
            run.running()
            rank.steps(0, 5)
            wait_for(lambda: run.get_json("api/run")["step"] == 4, "step 4")
            rank.steps(5, 5, nan=True)
            wait_for(lambda: run.get_json("api/alerts"), "an alert")
            wait_for(lambda: b'trainermon_step{run="run",rank="0"} 9.0' in run.get("metrics"), "step 9 in /metrics")
            assert run.stored() == []
            assert len(list(run.spool.glob("*.jnl"))) == 1
        finally:
            answers.set()
        wait_for(lambda: len(run.stored()) == 10, "ten stored steps")
        wait_for(run.alerts, "the alert in the log")

    follow_in_this_process(run, talk)

    assert run.stored() == expected(0, range(10))


def test_an_alert_is_handed_to_the_disk_before_the_segment_with_its_records(run, monkeypatch):
    """Killed between the two, the next agent sees the records again; the other way round the alert would be lost."""
    jobs = []
    submit = ThreadPoolExecutor.submit

    def noted(self, function, *arguments, **options):
        jobs.append(getattr(function, "__qualname__", repr(function)))
        return submit(self, function, *arguments, **options)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", noted)
    run.write_settings(flush_s=0.001)
    rank = run.rank()

    def talk(_agent):
        run.running()
        rank.steps(0, 3, nan=True)
        wait_for(lambda: len(run.stored()) == 3, "three stored steps")

    follow_in_this_process(run, talk)

    assert jobs.index("AlertLog.append") < jobs.index("commit")


def test_alerts_wait_for_a_disk_that_takes_nothing(tmp_path, monkeypatch, run):
    log = AlertLog(tmp_path / "missing" / "alerts.jsonl")
    rank = run.rank()
    rank.steps(0, 1, nan=True)
    monkeypatch.setattr("trainermon.agent.alerting.RETRY_S", 0)

    def talk(agent):
        return wait_for(lambda: list(agent._parts.alerting.book.latest.values()), "an alert")

    (alert,) = follow_in_this_process(run, talk)
    with ThreadPoolExecutor(1) as executor:
        book = AlertBook(executor, log)
        assert book.add(alert)
        assert not book.add(alert)
        wait_for(lambda: book.poll() or book._jobs, "a second try")
        assert not book.written
        (tmp_path / "missing").mkdir()
        wait_for(lambda: book.poll() or book.written, "the alert written")

    assert [written.id for written in log.read()] == [alert.id]


def test_rules_get_back_from_the_store_what_they_had_seen(run, monkeypatch):
    """The store sorts series its own way; the rules must find each under its number in the rank's own table."""
    rank = run.rank()
    rank.steps(0, 5)
    follow_in_this_process(run, lambda _: wait_for(lambda: len(run.stored()) == 5, "five stored steps"))
    primed = {}

    def prime(_self, header, keys, blocks):
        for block in blocks:
            primed[header.attempt, block.step] = {
                keys[number].name: block.values[4, place] for place, number in enumerate(block.series)
            }

    monkeypatch.setattr("trainermon.alerts.engine.RuleEngine.prime", prime)
    follow_in_this_process(run, lambda _: None)

    assert list(primed) == [(1, step) for step in range(5)]
    gradients = dict.fromkeys([f"h.{layer}.weight" for layer in range(4)], 3001.0)
    assert primed[1, 3] == pytest.approx({"loss": (10 / 4) ** 2, "duration_seconds": 0.01, **gradients})


def test_an_alert_that_goes_on_is_not_announced_again_by_the_next_agent(run):
    rank = run.rank(start_agent=True)
    rank.steps(0, 3, nan=True)
    wait_for(run.alerts, "the alert in the log")
    pid = run.running()["pid"]
    wait_for(lambda: len(run.stored()) == 3, "three stored steps")
    os.kill(pid, signal.SIGKILL)

    start_agent(run.spool)
    run.running(other_than=pid)
    rank.steps(3, 3, nan=True)
    wait_for(lambda: run.get_json("api/run")["step"] == 5, "step 5")

    (alert,) = run.get_json("api/alerts")
    assert (alert["state"], alert["first_step"]) == ("firing", 0)
    assert len(run.alerts()) == 1


def test_segments_are_kept_within_their_budget(make_run, monkeypatch):
    monkeypatch.setattr("trainermon.agent.turn.compaction.COMPACT_S", 0.2)
    run = make_run(flush_s=0.01, retention={"full_detail_hours": 0})
    rank = run.rank()

    def has_merged():
        with contextlib.suppress(duckdb.IOException):  # a segment was merged away while it was read
            return len(run.stored()) < 40

    def talk(_agent):
        for first in range(0, 40, 10):
            rank.steps(first, 10)
            wait_for(lambda n=first + 10: run.get_json("api/run")["step"] == n - 1, "ten more steps")
        assert run.post("api/flush")[0] == 200
        wait_for(has_merged, "rows that were merged over steps")

    follow_in_this_process(run, talk)

    assert run.stored()[-1][:3] == (1, 0, 39)


def test_merging_that_fails_is_logged_and_ends_with_the_agent(run, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr("trainermon.agent.turn.compaction.COMPACT_S", 0.1)
    monkeypatch.setattr("trainermon.agent.turn.compaction.COMPACT_MODULE", "nonexistent")
    run.rank()

    def talk(_agent):
        wait_for(lambda: "segments were not merged: it ended with status 1" in caplog.text, "a failure")
        (tmp_path / "endless.py").write_text("import signal; signal.pause()")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr("trainermon.agent.turn.compaction.COMPACT_MODULE", "endless")
        return wait_for(lambda: find_process("endless"), "a process that merges")

    merging = follow_in_this_process(run, talk)

    assert not merging.is_running()


def find_process(word):
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if word in child.cmdline():
                return child
    return None


def test_a_token_is_made_once_and_private(tmp_path):
    token = read_token(tmp_path / "token")

    assert len(token) >= 32
    assert read_token(tmp_path / "token") == token
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_a_reported_dump_gets_a_diagnosis_that_is_served(run, monkeypatch):
    monkeypatch.setattr("trainermon.agent.orders.dumps.SETTLE_S", 0.1)
    rank = run.rank()

    def talk(agent):
        agent._dumps._diagnoser._command = (sys.executable, "-c", "print('{\"verdict\": 1}')")
        run.running()
        rank.steps(7, 1, nan=True)
        rank.event(**REPLAY, dump=f"{FOLDER}0")
        (alert,) = wait_for(lambda: [a for a in run.get_json("api/alerts") if a["diagnosis"]], "a diagnosis")
        (dump,) = run.get_json("api/dumps")
        return alert, dump, run.get_json(dump["diagnosis"][1:])

    with contextlib.suppress(TimeoutError):
        alert, dump, report = follow_in_this_process(run, talk)

    assert alert["dump"] == dump["id"] == "a1"
    assert dump["status"] == "nonfinite"
    assert report == {"verdict": 1}
