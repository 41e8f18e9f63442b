"""Kills a controller between any two things it does to disk or network, starts the next, and counts what agents took.

Run as a program of its own: `kill_points.py WORKDIR VARIANT [NUM_RANDOM_KILLS]` prints one JSON object. Each controller
is a forked child of this process, which never starts a thread. `VARIANT` is `correct`, or a deliberately broken
controller, of which the count must find something wrong.

This process is the Alertmanager: it posts a notification, and posts it again as long as it has had no answer.
"""

import asyncio
import contextlib
import functools
import http.client
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from pathlib import Path
from typing import Any

from tests.agent.notifications import alert, notification
from trainermon.agent.controller import client, controller, dispatch, journal
from trainermon.agent.controller import http as _http  # noqa: F401  (imported before the fork: each child starts quickly)
from trainermon.agent.controller.command import serve
from trainermon.agent.controller.settings import load_settings

# A broken controller has other functions in these modules.
client_module: Any = client
controller_module: Any = controller
dispatch_module: Any = dispatch
journal_module: Any = journal

NUM_AGENTS = 3
TOKEN = "t"
DEADLINE_S = 240.0


class Agents:
    """Simulated agents in a process of their own, which outlive every controller. A step takes them two seconds."""

    def __init__(self, path):
        command = [sys.executable, "-m", "benchmarks.simulated_agents", str(NUM_AGENTS), "2", "0.5"]
        with path.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output)
        self._lines = path.open()
        self.addresses = json.loads(wait(self._lines.readline, "the simulated agents"))

    def taken(self):
        """Return the orders taken since the last call."""
        return [json.loads(line) for line in self._lines.read().splitlines()]

    def close(self):
        self.process.kill()
        self.process.wait()
        self._lines.close()


class Points:
    """Counts what the controller does to its journal and to agents, and kills it before or after the chosen deed."""

    def __init__(self, kill_at):
        self.names = []
        self.kill_at = kill_at
        self._lock = threading.Lock()
        self._one_by_one = asyncio.Lock()  # so that a kill comes between one agent's order and the next one's
        for name in ("write", "fsync", "replace", "rename"):
            setattr(os, name, functools.partial(self._call, name, getattr(os, name)))
        agent_client = client_module.AgentClient
        agent_client.post = self._around("post", agent_client.post)
        whole = controller_module.Controller
        whole.take_alerts = self._around("answer", whole.take_alerts)

    def _call(self, name, call, *arguments, **options):
        self._pass(f"before {name}")
        try:
            return call(*arguments, **options)
        finally:
            self._pass(f"after {name}")

    def _around(self, name, method):
        async def call(*arguments):
            async with self._one_by_one if name == "post" else contextlib.nullcontext():
                self._pass(f"before {name}")
                try:
                    return await method(*arguments)
                finally:
                    self._pass(f"after {name}")

        return call

    def _pass(self, name):
        with self._lock:
            self.names.append(name)
            if len(self.names) - 1 == self.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)


def start_controller(root, addresses, variant, kill_at=-1):
    """Fork a controller; return its process id. Its address is in `root/url`, the points it passed in `root/points`."""
    (root / "url").unlink(missing_ok=True)
    child = os.fork()
    if child:
        return child
    try:
        os.environ["TRAINERMON_TOKEN"] = TOKEN
        VARIANTS[variant]()
        points = Points(kill_at)
        settings = load_settings(
            None,
            {
                "state_dir": str(root / "state"),
                "port": 0,
                "discovery": {"agents": addresses},
                "agents": {"poll_s": 0.02},
            },
        )
        _publish_url(root / "url")
        asyncio.run(serve(settings))
        if not (root / "points").exists():  # the first one's
            (root / "points").write_text(json.dumps(points.names))
        os._exit(0)
    except BaseException:  # noqa: BLE001  (the child must never return into the parent's code)
        traceback.print_exc()
        os._exit(1)


def _publish_url(path):
    from trainermon.agent.web import server

    web_server: Any = server.WebServer
    original = web_server.__init__

    def init(self, *arguments, **options):
        original(self, *arguments, **options)
        path.with_suffix(".new").write_text(self.url)
        os.link(path.with_suffix(".new"), path)

    web_server.__init__ = init


def request(root, method, path, body=None):
    """Return the status and JSON of the controller's answer, or None if there is none."""
    try:
        host = (root / "url").read_text().removeprefix("http://").rstrip("/")
        connection = http.client.HTTPConnection(host, timeout=900)
        with contextlib.closing(connection):
            headers = {"Authorization": f"Bearer {TOKEN}"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError):
        return None


def wait(condition, what, deadline_s=DEADLINE_S):
    deadline = time.monotonic() + deadline_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(what)
        time.sleep(0.005)
    return value


def play(root, agents, variant, kill_at, *, kill_after_s=None):
    """Return what went wrong when the controller was killed once, or None if it was not killed."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    body = notification(alert("Spike" + uuid.uuid4().hex[:8]))
    agents.taken()
    first = start_controller(root, agents.addresses, variant, kill_at)
    wait(lambda: (root / "url").exists() or _gone(first), "the first controller")
    answered = False
    if (root / "url").exists():
        answered = request(root, "POST", "/api/v1/alerts", body) is not None
    began_s, is_alive = time.monotonic(), True
    while is_alive and not is_done(root) and time.monotonic() - began_s < (kill_after_s or DEADLINE_S):
        is_alive = not _gone(first)
        time.sleep(0.002)
    if kill_after_s is not None and is_alive:
        os.kill(first, signal.SIGKILL)
    was_killed = _end(first)
    second = start_controller(root, agents.addresses, variant)
    wait(lambda: (root / "url").exists(), "the second controller")
    if not answered:
        wait(lambda: request(root, "POST", "/api/v1/alerts", body), "an answer")
    with contextlib.suppress(AssertionError):
        wait(lambda: is_done(root), "the end of the escalation", deadline_s=4.0)
    request(root, "POST", "/api/v1/alerts", body)  # Alertmanager repeats by design
    time.sleep(0.05)
    _end(second, signal.SIGKILL)
    return judge(agents.taken()) if was_killed else None


def is_done(root):
    answer = request(root, "GET", "/api/v1/escalations")
    return bool(answer and answer[1] and all(entry["outcome"] for entry in answer[1]))


def judge(taken):
    """Return how many agents were told nothing, how many twice, and whether they were told different steps."""
    by_agent = [[order for order in taken if order["agent"] == number] for number in range(NUM_AGENTS)]
    return {
        "lost": sum(not orders for orders in by_agent),
        "twice": sum(len(orders) > 1 for orders in by_agent),
        "mixed": int(len({order["first_step"] for order in taken}) > 1),
    }


def _gone(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(pid, number=signal.SIGTERM):
    """End a controller; return whether it had been killed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    _, status = os.waitpid(pid, 0)
    return os.WIFSIGNALED(status)


# --- controllers that are wrong ------------------------------------------------------------------------------------


def correct():
    pass


def answers_before_it_is_on_disk():
    accept = journal_module.EscalationJournal.accept

    async def lazy(self, requests):
        now_s = time.time()
        for request in requests:
            escalation = journal_module.EscalationRecord(request=request, accepted_s=now_s)
            self.journal.escalations[request.id] = escalation

        async def later():
            await asyncio.sleep(0.05)
            for request in requests:
                del self.journal.escalations[request.id]
                self.dispatcher.start(accept(self.journal, request, now_s=now_s))

        self.later = asyncio.ensure_future(later())
        return ["accepted"] * len(requests)

    controller_module.Controller._accept = lazy


def keeps_its_plan_in_memory():
    def plan(self, escalation, plan):
        self._apply({"planned": {**journal_module.as_plain(plan), "escalation": escalation.request.id}})

    journal_module.EscalationJournal.plan = plan
    make_plan = dispatch_module.make_plan

    def other_step(*arguments, **options):  # as when training has gone on meanwhile
        plan = make_plan(*arguments, **options)
        return plan and journal_module.dataclasses.replace(plan, first_step=plan.first_step + os.getpid() % 1000)

    dispatch_module.make_plan = other_step


def names_each_plan_anew():
    make_plan = dispatch_module.make_plan

    def renamed(*arguments, **options):
        plan = make_plan(*arguments, **options)
        return plan and journal_module.dataclasses.replace(plan, id=f"x-{uuid.uuid4().hex}")

    dispatch_module.make_plan = renamed
    journal_module.EscalationJournal.plan = lambda self, escalation, plan: setattr(escalation, "plan", plan)


def forgets_what_it_followed():
    journal_module.EscalationJournal.knows = lambda self, key: False
    make_requests = controller_module.make_requests

    def renamed(*arguments, **options):
        found = make_requests(*arguments, **options)
        return [journal_module.dataclasses.replace(each, id=f"x-{uuid.uuid4().hex}") for each in found]

    controller_module.make_requests = renamed


VARIANTS = {
    "correct": correct,
    "answers_before_it_is_on_disk": answers_before_it_is_on_disk,
    "keeps_its_plan_in_memory": keeps_its_plan_in_memory,
    "names_each_plan_anew": names_each_plan_anew,
    "forgets_what_it_followed": forgets_what_it_followed,
}


def main():
    workdir, variant = Path(sys.argv[1]), sys.argv[2]
    num_random = int(sys.argv[3]) if sys.argv[3:] else 0
    agents = Agents(workdir / "agents")
    root = workdir / "case"
    names, wrong, kills = [], [], 0
    try:
        play(root, agents, variant, -1)
        names = json.loads((root / "points").read_text())
        first = 0 if variant == "correct" else names.index("after answer")  # what is broken comes after that
        for point in range(first, len(names)):
            found = play(root, agents, variant, point)
            kills += found is not None
            if found and any(found.values()):
                wrong.append({"point": point, **found})
                if variant != "correct":
                    break
        for seed in range(num_random):
            found = play(root, agents, variant, -1, kill_after_s=random.Random(seed).uniform(0.0, 0.15))
            if found and any(found.values()):
                wrong.append({"random": seed, **found})
    finally:
        agents.close()
    print(json.dumps({"kills": kills, "points": names, "wrong": wrong}))


if __name__ == "__main__":
    main()
