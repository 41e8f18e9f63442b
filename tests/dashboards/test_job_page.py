"""The page of a whole job, in a real browser in front of a real controller."""

from __future__ import annotations

import socket
import time

import pytest

from tests.agent.controller.controllers import TOKEN, controllers_in
from tests.agent.controller.simulation import Job
from tests.agent.controller.test_end_to_end import address
from tests.agent.nodes import Run, wait_for
from tests.agent.notifications import alert, notification

pytestmark = pytest.mark.server


@pytest.fixture
def job():
    job = Job(4, 8).ready()
    yield job
    job.close()


@pytest.fixture
def make_controller(tmp_path):
    with controllers_in(tmp_path) as make:
        yield make


@pytest.fixture
def page(new_page):
    return new_page(viewport={"width": 1280, "height": 900})


def seen(page, selector, text):
    wait_for(
        lambda: page.locator(selector).first.is_visible() and text in page.locator(selector).first.inner_text(), text
    )


def test_charts_of_the_job_are_those_of_the_node_of_rank_0(job, make_controller, page):
    controller = make_controller(discovery={"agents": job.addresses}).ready()

    page.goto(controller.url)
    seen(page, ".headline", "All 32 ranks are training")

    link = page.get_by_role("link", name="Charts: loss, norms, layers")
    assert link.get_attribute("href") == "node/run/node000/"
    assert link.get_attribute("href") == page.locator("#nodes a", has_text="node000").get_attribute("href")


def test_a_nodes_page_lives_at_the_controllers_address(tmp_path, make_controller, page, monkeypatch):
    monkeypatch.setenv("TRAINERMON_TOKEN", TOKEN)
    node = Run(tmp_path / "node")
    try:
        rank = node.rank()
        node.launch_agent()
        rank.steps(0, 3)
        controller = make_controller(discovery={"agents": [address(node)]}).ready()
        page.goto(controller.url)
        page.get_by_role("link", name="Charts: loss, norms, layers").click()
        seen(page, "#state", "live")
        rank.steps(3, 5)

        seen(page, "#figure-step", "7")
        assert page.url.startswith(f"{controller.url}node/run/")
        page.get_by_role("link", name="Whole job").click()
        seen(page, ".headline", "The rank is training")
    finally:
        node.close()


def test_a_job_that_has_ended_is_the_same_on_its_page_and_on_its_nodes(tmp_path, make_controller, page, monkeypatch):
    monkeypatch.setenv("TRAINERMON_TOKEN", TOKEN)
    node = Run(tmp_path / "node", world_size=2, linger_s=3600)
    try:
        ranks = [node.rank(number) for number in (0, 1)]
        node.launch_agent()
        for rank in ranks:
            rank.steps(0, 12)
            rank.end()
        wait_for(lambda: node.get_json("api/run")["state"] == "finished", "the end of the run")
        controller = make_controller(discovery={"agents": [address(node)]}).ready()
        page.goto(controller.url)
        seen(page, ".headline", "Finished at step 11")

        told = {}
        for at, place in (("job", controller.url), ("node", f"{controller.url}node/run/{socket.gethostname()}/")):
            page.goto(place)
            seen(page, "#state", "finished")
            figures = [page.locator(f"#figure-{name}").inner_text().strip() for name in ("step", "ranks")]
            firing = page.locator("dt", has_text="Alerts firing").locator("xpath=following-sibling::dd").inner_text()
            told[at] = (*figures, firing.strip())
        assert told == {"job": ("11", "2", "0"), "node": ("11", "2", "0")}
        page.goto(controller.url)
        seen(page, ".headline", "Finished at step 11")
        assert page.locator("#ranks").inner_text().startswith("Every rank is fine. All have ended after step 11.")
        assert page.locator("#nodes .squares i.ended").count() == 2
        assert page.locator('.gone, [data-tone="bad"]').count() == 0
    finally:
        node.close()


def test_silenced_alerts_are_counted_apart_on_the_job_page_and_on_the_nodes(
    tmp_path, make_controller, page, monkeypatch
):
    monkeypatch.setenv("TRAINERMON_TOKEN", TOKEN)
    node = Run(tmp_path / "node")
    try:
        rank = node.rank()
        node.launch_agent()
        rank.steps(0, 3)
        rank.steps(3, 3, nan=True)
        wait_for(lambda: node.get_json("api/run")["step"] == 5, "the steps")
        rules = wait_for(lambda: sorted({alert["rule"] for alert in node.get_json("api/alerts")}), "an alert")
        for rule in rules:
            silence = {"rule": rule, "minutes": 5, "series": "", "by": "ada", "note": ""}
            assert node.post("api/silences", silence, token=TOKEN)[0] == 202
        controller = make_controller(discovery={"agents": [address(node)]}).ready()

        page.goto(controller.url)
        seen(page, "#figure-alerts", f"{len(rules)}, of these {len(rules)} silenced")
        seen(page, "#health", "No alert that is not silenced is firing on any node.")
        page.get_by_role("link", name="Charts: loss, norms, layers").click()
        seen(page, "#figure-firing", f"{len(rules)}, of these {len(rules)} silenced")
    finally:
        node.close()


@pytest.mark.parametrize("is_answering", [True, False])
def test_an_agent_that_has_left_a_finished_job_is_not_missed(page, job, make_controller, is_answering):
    controller = make_controller(discovery={"agents": job.addresses}).ready()
    page.goto(controller.url)
    seen(page, ".headline", "All 32 ranks are training")
    said = page.evaluate(
        """async (up) => {
            const { assess, readJob } = await import("/static/job_state.js");
            const rank = (number, phase) => ({ rank: number, alive: false, step: 60, phase, lag_s: 0, place: {} });
            const agent = (phase) => ({
                url: "http://a/", host: "n", up, problem: "refused", age_s: 9, run_id: "r", attempt: 1, world_size: 2,
                step: 59, steps_per_s: 2, alerts: [], ranks: [rank(0, "closed"), rank(1, phase)],
            });
            return ["closed", "step"].map((phase) => {
                const state = readJob({ runs: ["r"], agents: [agent(phase)], escalations: [] }, "r");
                return [assess(state, true).headline, state.isOver];
            });
        }""",
        is_answering,
    )

    lost = ["Rank 1 is gone", True] if is_answering else ["Node n does not answer", False]
    assert said == [["Finished at step 59", True], lost]


def test_alerts_of_several_ranks_count_as_on_a_nodes_page(job, make_controller, page):
    controller = make_controller(discovery={"agents": job.addresses}).ready()
    firing = [("loss-spike", 5, 0), ("loss-spike", 5, 1), ("gradient-nonfinite", 7, 1)]
    job.agents[0].alerts = [
        {"id": str(n), "rule": rule, "severity": "warning", "rank": rank, "step": step, "message": rule}
        for n, (rule, step, rank) in enumerate(firing)
    ]

    page.goto(controller.url)
    seen(page, "#figure-alerts", "2")


def test_a_healthy_job_is_said_to_be_healthy(job, make_controller, page):
    controller = make_controller(discovery={"agents": job.addresses}).ready()

    page.goto(controller.url)
    seen(page, ".headline", "All 32 ranks are training")

    page.get_by_role("button", name="dark").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 18, 22)"
    assert page.locator("#nodes tbody tr").count() == 4
    assert page.locator("#nodes .squares i").count() == 32
    assert "Every rank is fine." in page.locator("#ranks").inner_text()
    page.get_by_role("button", name="all", exact=True).click()
    assert page.locator("#ranks tbody tr").count() == 32
    assert page.locator("#ranks tbody tr").nth(9).inner_text().split("\t")[:3] == ["9", "node001", "dp 1 tp 1"]


def test_what_is_wrong_is_named_and_stands_on_top(job, make_controller, page):
    controller = make_controller(discovery={"agents": [*job.addresses, "127.0.0.1:9"]}).ready()
    message = '<img src=x onerror="document.title=1"> of h.3 is not finite'
    firing = {"id": "a", "rule": "gradient-nonfinite", "severity": "fatal", "rank": 12, "step": 99, "message": message}
    job.agents[1].alerts = [firing]
    job.agents[2].gone = {17}

    page.goto(controller.url)
    seen(page, ".headline", "does not answer")
    seen(page, "#health", "Rank 17 is gone")
    seen(page, "#health", "gradient-nonfinite on rank 12 since step 99")

    assert page.locator("#nodes tbody tr").first.inner_text().startswith("127.0.0.1:9")
    assert page.locator("#ranks tbody tr").count() == 2
    assert message in page.locator("#ranks").inner_text()
    assert page.locator("img").count() == 0


def test_an_escalation_is_followed_to_its_end(job, make_controller, page):
    controller = make_controller(discovery={"agents": job.addresses}).ready()
    page.goto(controller.url)
    seen(page, ".headline", "All 32 ranks are training")

    controller.post("api/v1/alerts", notification(alert(rank=9)))
    seen(page, "#escalations tbody tr", "done")

    row = page.locator("#escalations tbody tr").first.inner_text()
    assert "TrainermonGradSpike" in row
    assert "written: rank 9" in row
    assert time.strftime("%H:") in row


@pytest.fixture
def large_job():
    job = Job(60, 8).ready()
    yield job
    job.close()


def test_a_large_job_has_a_map_pages_and_a_search(large_job, make_controller, page):
    large_job.agents[51].gone = {415}
    controller = make_controller(discovery={"agents": large_job.addresses}).ready()

    page.goto(controller.url)
    seen(page, ".headline", "Rank 415 is gone")

    assert page.get_by_role("img", name="480 ranks, 1 of them need a look").is_visible()
    assert page.locator("#nodes tbody tr").count() == 50
    assert page.locator("#nodes tbody tr").first.inner_text().startswith("node051")
    page.get_by_role("button", name="Next nodes").click()
    assert page.locator("#nodes tbody tr").count() == 10
    page.get_by_role("searchbox", name="Node or rank").fill("415")
    assert page.locator("#nodes tbody tr").count() == page.locator("#ranks tbody tr").count() == 1
    page.get_by_role("searchbox", name="Node or rank").fill("node05")
    assert page.locator("#nodes tbody tr").count() == 10
    assert page.locator("#ranks tbody tr").count() == 50

    columns = page.locator("#map").bounding_box()["width"] // 7 // 8 * 8
    row, column = divmod(415, columns)
    page.locator("#map canvas").click(position={"x": 7 * column + 3, "y": 7 * row + 3})
    assert page.get_by_role("searchbox", name="Node or rank").input_value() == "node051"
    seen(page, ".tip", "rank 415")


def test_ranks_of_an_agent_that_was_asked_earlier_are_not_behind(page, job, make_controller):
    controller = make_controller(discovery={"agents": job.addresses}).ready()
    page.goto(controller.url)
    seen(page, ".headline", "All 32 ranks are training")

    behind = page.evaluate(
        """async () => {
            const { readJob } = await import("/static/job_state.js");
            const agent = (rank, step, age_s) => ({
                url: `http://${rank}/`, host: `n${rank}`, up: true, problem: "", age_s, run_id: "r", attempt: 1,
                world_size: 3, steps_per_s: 2, alerts: [],
                ranks: [{rank, alive: true, step, phase: "step", lag_s: 0, place: {}}],
            });
            const agents = [agent(0, 100, 0), agent(1, 90, 5), agent(2, 90, 0)];
            return readJob({runs: ["r"], agents, escalations: []}, "r").ranks.map((rank) => rank.behind);
        }"""
    )

    assert behind == [0, 0, 10]


def test_a_phone_has_no_sideways_scrolling(job, make_controller, page):
    controller = make_controller(discovery={"agents": job.addresses}).ready()
    page.set_viewport_size({"width": 390, "height": 800})

    page.goto(controller.url)
    seen(page, ".headline", "All 32 ranks are training")

    assert page.evaluate("document.documentElement.scrollWidth") <= 390
