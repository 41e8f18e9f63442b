"""Alertmanager's post → controller → the agents of two nodes → every rank is told one and the same step."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request

import pytest

from tests.agent.controller.controllers import TOKEN
from tests.agent.nodes import wait_for
from tests.agent.notifications import alert, notification
from tests.certificates import make_certificate
from trainermon.exporters.store.query import flush_agents


def address(run):
    return run.running()["url"].partition("://")[2].rstrip("/")


def commands(run):
    """Return the run's book of orders."""
    path = run.spool / "agent.commands.jsonl"
    lines = path.read_text().split("\n") if path.exists() else []
    return [json.loads(line) for line in lines if line]


@pytest.fixture
def job(make_node, make_controller, monkeypatch):
    """Two nodes with two ranks each at step 10, and their controller."""
    monkeypatch.setenv("TRAINERMON_TOKEN", TOKEN)
    nodes = [make_node(name, ranks, world_size=4) for name, ranks in (("a", (0, 1)), ("b", (2, 3)))]
    for node in nodes:
        for rank in node.ranks:
            rank.steps(0, 11)
    controller = make_controller(discovery={"agents": [address(node) for node in nodes]}).ready()

    def steps():
        agents = controller.get_json("api/v1/job")["agents"]
        return [rank["step"] for agent in agents for rank in agent.get("ranks", [])]

    wait_for(lambda: steps() == [10] * 4, "all ranks at step 10")
    return controller, nodes


def test_all_ranks_of_all_nodes_are_told_one_common_step(job):
    controller, nodes = job

    status, answer = controller.post("api/v1/alerts", notification(alert()))
    wait_for(lambda: all(commands(node) for node in nodes), "both agents have the order")

    assert (status, answer["status"]) == (202, "accepted")
    orders = [order for node in nodes for order in commands(node)]
    assert [order["ranks"] for order in orders] == [[0, 1], [2, 3]]
    assert orders[0]["command"] == orders[1]["command"]
    assert orders[0]["command"]["first_step"] > 10
    for node in nodes:
        for rank in node.ranks:
            wait_for(lambda rank=rank: rank.commands()[1] == [orders[0]["command"]["id"]], "the rank is told")


def test_only_the_rank_that_is_named_is_told_and_its_report_closes_the_escalation(job):
    controller, nodes = job
    controller.post("api/v1/alerts", notification(alert(rank=3)))
    order = wait_for(lambda: commands(nodes[1]), "the order")[0]
    command = order["command"]
    assert controller.escalation()["outcome"] is None

    nodes[1].ranks[1].event(type="dump", command=command["id"], step=command["first_step"], status="written", bytes=1)
    wait_for(lambda: controller.escalation()["outcome"], "the end of the escalation")

    assert order["ranks"] == [3]
    assert controller.escalation()["outcome"] == "done"
    assert controller.escalation()["coverage"] == {"3": "written"}
    assert not commands(nodes[0])


def test_the_rank_whose_replica_differs_from_those_of_other_nodes_is_told_to_dump(job):
    controller, nodes = job
    sound = 0x9E3779B97F4A7C15
    for node in nodes:
        for rank in node.ranks:
            rank.checksum(11, sound)
            rank.checksum(12, sound ^ (1 << 63 if rank is nodes[1].ranks[1] else 0))

    order = wait_for(lambda: commands(nodes[1]), "the order")[0]
    [found] = controller.get_json("api/v1/job")["divergences"]["run"]

    assert order["ranks"] == [3]
    assert found["text"] == "1 parameter of rank 3 differs from the copies on ranks 0–2, found at step 12: h.0.weight"
    assert not commands(nodes[0])
    with urllib.request.urlopen(controller.url + "metrics") as answer:
        assert "trainermon_controller_diverged_ranks 1.0" in answer.read().decode()


def test_a_reduction_over_nodes_that_keeps_to_each_node_is_told_and_one_over_all_is_not(job):
    controller, nodes = job

    def reduce_over(step, *, all_ranks):
        for node in nodes:
            own = [rank.number + 1 for rank in node.ranks]
            for rank, given in zip(node.ranks, own, strict=True):
                rank.gradient(step, given, 2.5 if all_ranks else sum(own) / 2)

    def laws():
        return controller.get_json("api/v1/job")["broken_laws"].get("run", [])

    reduce_over(20, all_ranks=True)
    for step in (40, 60):
        reduce_over(step, all_ranks=False)
    found = wait_for(laws, "the law that is broken")

    assert [(each["step"], each["ranks"]) for each in found] == [(40, [0, 1, 2, 3])]
    assert "Ranks that hold copies of a parameter got different reduced gradients" in found[0]["text"]
    reduce_over(80, all_ranks=True)
    wait_for(lambda: not laws(), "that it holds again")


def test_a_run_directory_tells_where_agents_are_and_what_opens_them(make_node, make_controller):
    node = make_node("a", (0,), world_size=1)
    node.ranks[0].steps(0, 11)
    controller = make_controller(discovery={"run_directory": str(node.output), "refresh_s": 0.1}).ready()
    wait_for(lambda: controller.get_json("api/v1/job")["agents"], "the agent is found")

    controller.post("api/v1/alerts", notification(alert()))
    wait_for(lambda: commands(node), "the order")

    assert commands(node)[0]["ranks"] == [0]


def test_agents_and_controller_speak_tls_and_close_reading(make_node, make_controller, monkeypatch, tmp_path):
    certificate = make_certificate(tmp_path)
    (tmp_path / "secret").write_text(TOKEN)
    monkeypatch.setenv("TRAINERMON_TLS_CERT_FILE", certificate.chain)
    monkeypatch.setenv("TRAINERMON_TLS_KEY_FILE", certificate.key)
    monkeypatch.setenv("TRAINERMON_TOKEN_FILE", str(tmp_path / "secret"))
    monkeypatch.setenv("TRAINERMON_READ_TOKEN", "reading")
    trusting = ssl.create_default_context(cafile=certificate.chain)
    monkeypatch.setattr("ssl._create_default_https_context", lambda: trusting)
    node = make_node("a", (0,), world_size=1)
    node.ranks[0].steps(0, 11)
    url = node.running()["url"]
    with pytest.raises(urllib.error.HTTPError, match="401") as refused:
        urllib.request.urlopen(f"{url}metrics")
    refused.value.close()

    https = {"https": True, "ca_file": certificate.chain, "poll_s": 0.1}
    controller = make_controller(discovery={"agents": [address(node)]}, agents=https, token=TOKEN).ready()
    controller.post("api/v1/alerts", notification(alert()))
    wait_for(lambda: commands(node), "the order")

    assert url.startswith("https://")
    assert controller.url.startswith("https://")
    request = urllib.request.Request(f"{url}metrics", headers={"Authorization": "Bearer reading"})
    with urllib.request.urlopen(request) as answer:
        assert b"trainermon_ranks" in answer.read()
    assert TOKEN not in controller.log() + node.log()
    monkeypatch.setenv("TRAINERMON_SPOOL", str(node.spool.parent))
    assert flush_agents(node.output)  # a query on this node still gets what the agent holds
