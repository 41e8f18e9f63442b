"""Agents are found where they are: a list, a name, a run directory, pods behind a stand-in for the Kubernetes API."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from types import SimpleNamespace

import pytest
from aiohttp import web

from tests.certificates import make_certificate
from trainermon.agent.controller.client import AgentAddress
from trainermon.agent.controller.discovery import DnsFinder, RunDirectoryFinder, StaticFinder, make_finders
from trainermon.agent.controller.kubernetes import KubernetesFinder
from trainermon.agent.controller.settings import ControllerSettings, DiscoverySettings, KubernetesSettings


def find(finder):
    return asyncio.run(finder.find())


def test_a_list_is_what_it_says():
    assert find(StaticFinder(("a:1", "b:2"), "https")) == [AgentAddress("https://a:1/"), AgentAddress("https://b:2/")]


def test_every_address_of_a_name_is_an_agent(monkeypatch):
    def getaddrinfo(host, port, *arguments, **options):
        assert (host, port) == ("agents.training.svc", 9461)
        ours = [(socket.AF_INET, 1, 6, "", (f"10.0.0.{n}", port)) for n in (2, 1, 2)]
        return [*ours, (socket.AF_INET6, 1, 6, "", ("fd00::1", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    found = find(DnsFinder("agents.training.svc:9461", "http"))

    assert [target.url for target in found] == [
        "http://10.0.0.1:9461/",
        "http://10.0.0.2:9461/",
        "http://[fd00::1]:9461/",
    ]


def test_a_name_without_an_address_has_no_agent_but_a_name_server_that_is_away_is_a_fault(monkeypatch):
    faults = iter([socket.gaierror(socket.EAI_NONAME, "unknown"), socket.gaierror(socket.EAI_AGAIN, "try again")])

    def getaddrinfo(*arguments, **options):
        raise next(faults)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    assert find(DnsFinder("agents:1", "http")) == []
    with pytest.raises(OSError, match="try again"):
        find(DnsFinder("agents:1", "http"))


def test_agents_of_a_run_directory_bring_their_own_token(tmp_path):
    for host, targets in (("n1", ["n1:4711"]), ("n2", ["n2:4712"]), ("ended", [])):
        folder = tmp_path / "nodes" / host
        folder.mkdir(parents=True)
        groups = [{"targets": targets, "labels": {}}] if targets else []
        (folder / "prometheus_sd.json").write_text(json.dumps(groups))
        (folder / "token").write_text(f"secret-of-{host}\n")

    found = find(RunDirectoryFinder(tmp_path, "http"))

    assert found == [AgentAddress("http://n1:4711/", "secret-of-n1"), AgentAddress("http://n2:4712/", "secret-of-n2")]
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"targets": 1}', '[{"targets": [7]}]', '[{"labels": {}}]', "[" * 9999]
)
def test_a_broken_file_of_one_node_leaves_out_that_node_only_and_is_told_once(tmp_path, caplog, content):
    for host, text in (("bad", content), ("good", '[{"targets": ["good:1"]}]')):
        (tmp_path / "nodes" / host).mkdir(parents=True)
        (tmp_path / "nodes" / host / "prometheus_sd.json").write_text(text)
    finder = RunDirectoryFinder(tmp_path, "http")

    found = [find(finder), find(finder)]

    assert found == [[AgentAddress("http://good:1/", "")]] * 2  # and nobody has vouched for it
    assert [record.getMessage().count("nodes/bad/") for record in caplog.records] == [1]


def pod(name, *, phase="Running", ip="10.0.0.1", ports=(), init_ports=(), leaving=False):
    """A pod as the API returns it, cut down to some more than what is read."""
    metadata = {"name": name, "namespace": "training", "labels": {"app": "gpt"}}
    return {
        "metadata": metadata | ({"deletionTimestamp": "2026-01-01T00:00:00Z"} if leaving else {}),
        "spec": {
            "containers": [{"name": "trainer", "ports": [{"name": n, "containerPort": p} for n, p in ports]}],
            "initContainers": [
                {"name": "agent", "restartPolicy": "Always", "ports": [{"name": n, "containerPort": p}]}
                for n, p in init_ports
            ],
        },
        "status": {"phase": phase, **({"podIP": ip, "podIPs": [{"ip": ip}]} if ip else {})},
    }


class ApiServer:
    """Answers like a kube-apiserver what this client may ask: lists of pods in chunks, over TLS, to a bearer token."""

    def __init__(self, certificate, pods):
        self.pods = pods
        self.requests = []
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate.chain, certificate.key)

    async def __aenter__(self):
        application = web.Application()
        application.add_routes([web.get("/api/v1/namespaces/{namespace}/pods", self.list)])
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=self._context).start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exception):
        await self._runner.cleanup()

    async def list(self, request):
        self.requests.append(SimpleNamespace(path=request.path, query=dict(request.query), headers=request.headers))
        if request.headers.get("Authorization") != "Bearer of-the-account":
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Forbidden", "code": 403}
            return web.json_response({**status, "message": "pods is forbidden"}, status=403)
        start = int(request.query.get("continue", 0))
        end = min(start + 2, start + int(request.query["limit"]))  # a server may give less than the limit
        more = {"continue": str(end), "remainingItemCount": len(self.pods) - end} if end < len(self.pods) else {}
        body = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7", **more}}
        return web.json_response({**body, "items": self.pods[start:end]})


@pytest.fixture
def account(tmp_path):
    certificate = make_certificate(tmp_path)
    (tmp_path / "token").write_text("of-the-account")
    (tmp_path / "namespace").write_text("training")
    (tmp_path / "ca.crt").write_bytes((tmp_path / "cert.pem").read_bytes())
    return SimpleNamespace(folder=tmp_path, certificate=certificate)


def ask_api(account, monkeypatch, pods, **settings):
    """Return what is found, and the requests for it."""

    async def scenario():
        async with ApiServer(account.certificate, pods) as server:
            monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
            monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
            wanted = KubernetesSettings(label_selector="app=gpt,role in (worker)", **settings)
            return await KubernetesFinder(wanted, "http", account.folder).find(), server.requests

    return asyncio.run(scenario())


def test_running_pods_with_the_port_are_agents(account, monkeypatch):
    ports = [("http", 80), ("metrics", 9461)]
    pods = [
        pod("a", ports=ports),
        pod("b", ip="10.0.0.2", init_ports=[("metrics", 9462)]),
        pod("v6", ip="fd00::7", ports=ports),
        pod("pending", phase="Pending", ip=None, ports=ports),
        pod("done", phase="Succeeded", ip="10.0.0.4", ports=ports),
        pod("leaving", ip="10.0.0.5", ports=ports, leaving=True),
        pod("other", ip="10.0.0.6", ports=[("http", 80)]),
    ]

    found, requests = ask_api(account, monkeypatch, pods)

    assert [target.url for target in found] == [
        "http://10.0.0.1:9461/",
        "http://10.0.0.2:9462/",
        "http://[fd00::7]:9461/",
    ]
    assert len(requests) == 4  # in chunks, each continuing the last
    assert {request.path for request in requests} == {"/api/v1/namespaces/training/pods"}
    assert {request.query["labelSelector"] for request in requests} == {"app=gpt,role in (worker)"}


def test_a_port_may_be_a_number_and_the_namespace_another(account, monkeypatch):
    found, requests = ask_api(account, monkeypatch, [pod("a")], port="9000", namespace="elsewhere")

    assert [target.url for target in found] == ["http://10.0.0.1:9000/"]
    assert requests[0].path == "/api/v1/namespaces/elsewhere/pods"


def test_missing_rights_are_told_in_the_words_of_the_api(account, monkeypatch):
    (account.folder / "token").write_text("of-somebody-else")

    with pytest.raises(ValueError, match=r"answers 403.*pods is forbidden"):
        ask_api(account, monkeypatch, [])


def test_a_server_with_another_certificate_is_not_spoken_to(account, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    make_certificate(other)
    (account.folder / "ca.crt").write_bytes((other / "cert.pem").read_bytes())

    with pytest.raises(OSError, match="certificate verify failed"):
        ask_api(account, monkeypatch, [pod("a")])


def test_every_way_that_is_set_is_used():
    wanted = DiscoverySettings(
        agents=("a:1",), dns=("b:2",), run_directory="/r", kubernetes=KubernetesSettings(label_selector="x")
    )
    finders = make_finders(ControllerSettings(discovery=wanted, state_dir="/s"))

    kinds = [type(finder) for finder in finders]
    assert kinds == [StaticFinder, DnsFinder, RunDirectoryFinder, KubernetesFinder]
