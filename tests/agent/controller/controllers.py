"""A controller process under a test's control."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request

from tests.agent.nodes import DEADLINE_S, wait_for

TOKEN = "shared-by-agents-and-controller"


class ControllerProcess:
    """`trainermon controller` on a free port of loopback, with its state in `folder`."""

    def __init__(self, folder, *, token=None, **settings):
        """`token` opens reading, where that is closed."""
        self._token = token
        self._log = folder / "controller.log"
        config = folder / "controller.json"
        plain = {"state_dir": str(folder / "state"), "port": 0, "agents": {"poll_s": 0.1}, **settings}
        config.write_text(json.dumps(plain))
        offset = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainermon", "controller", "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "TRAINERMON_TOKEN": TOKEN},
            )

        def page():
            assert self.process.poll() is None, self.log()
            return re.search(r"page (http\S+)", self.log()[offset:])

        self.url = wait_for(page, "the controller's page")[1]

    def log(self):
        return self._log.read_text()

    def get(self, path):
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        request = urllib.request.Request(self.url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return answer.read()

    def get_json(self, path):
        return json.loads(self.get(path))

    def post(self, path, body, *, token=TOKEN):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(self.url + path, data=content, headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def ready(self):
        wait_for(lambda: self._is_ready(), "the controller is ready")
        return self

    def _is_ready(self):
        try:
            return self.get_json("readyz")["status"] == "ready"
        except urllib.error.HTTPError as error:
            error.close()
            return False

    def escalation(self, number=0):
        """Return the escalation, the newest being number 0, or None."""
        found = self.get_json("api/v1/escalations")
        return found[number] if number < len(found) else None

    def kill(self):
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def terminate(self):
        self.process.terminate()
        return self.process.wait(DEADLINE_S)


@contextlib.contextmanager
def controllers_in(folder):
    """Give a maker of controllers in `folder`; all are ended with the block."""
    started = []

    def make(**settings):
        started.append(ControllerProcess(folder, **settings))
        return started[-1]

    try:
        yield make
    finally:
        for controller in started:
            controller.kill()
