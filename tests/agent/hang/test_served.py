"""What a running agent tells of a hang and of a death: page, files, `trainermon run`'s last words."""

import urllib.error

import pytest

from tests.agent.nodes import wait_for
from trainermon.agent.hang.evidence import parse_evidence
from trainermon.agent.lifecycle.summary import summarise

# Without rungs: this rank is no Python that trains, and nothing is asked of it.
HANG = {"step_s": 1.0, "py_spy": False}


def alert(run, rule, state):
    return wait_for(lambda: next((a for a in run.alerts() if (a["rule"], a["state"]) == (rule, state)), None), rule)


def test_hang_is_told_handed_out_and_over(make_run):
    run = make_run(hang=HANG)
    rank = run.rank(start_agent=True)
    rank.steps(0, 5)

    told = alert(run, "hang", "firing")
    name = f"post-mortem-hang-{run.node_dir.name}-attempt1-step4"
    text = wait_for((run.output / "reports" / f"{name}.md").exists, "the post-mortem") and run.get(
        f"api/reports/{name}"
    )
    assert text.decode().startswith("# Hang of run run at step 4\n")
    (shown,) = run.get_json("api/alerts")
    assert (shown["id"], shown["report"]) == (told["id"], f"api/reports/{name}")
    evidence = run.get_json("api/v1/evidence")
    assert evidence["looked_into"] is True
    (one,) = map(parse_evidence, evidence["ranks"])
    assert (one.rank, one.pid, one.step, one.process_state) == (0, rank.process.pid, 4, "S")
    assert [rung.name for rung in one.rungs] == ["control page", "/proc", "own notes", "flight recorder"]
    shown = b'trainermon_rank_hung{run="run",rank="0"} 1.0\n'
    wait_for(lambda: shown in run.get("metrics"), "the rank in /metrics")

    rank.steps(5, 1)
    assert alert(run, "hang", "resolved")["step"] == 5
    assert run.get_json("api/v1/evidence")["looked_into"] is False
    rank.end()
    run.gone()


@pytest.mark.parametrize("name", ["token", "../nodes/node/token", "post-mortem-hang-node-attempt1-step4"])
def test_no_other_file_is_handed_out(run, name):
    run.rank(start_agent=True).steps(0, 1)

    with pytest.raises(urllib.error.HTTPError, match="404"):
        run.get(f"api/reports/{name}")


def test_death_is_told_also_when_nobody_is_left(make_run):
    run = make_run(hang=HANG)
    rank = run.rank(start_agent=True)
    rank.steps(0, 5)
    run.running()
    rank.kill()

    run.gone()

    (told,) = run.alerts()
    assert (told["rule"], told["rank"], told["step"]) == ("rank-dead", 0, 4)
    said = summarise(run.output)
    assert "rank-dead: rank 0 was killed by SIGKILL at step 4 (phase step)" in said
    assert f"reports    reports/post-mortem-rank-dead-{run.node_dir.name}-attempt1-step4.md" in said


def test_end_in_good_order_is_no_death(run):
    rank = run.rank(start_agent=True)
    rank.steps(0, 5)
    rank.end()

    run.gone()

    assert run.alerts() == []
