"""The process that scripts are forked from."""

import os
import signal

from tests import fork_server


def test_scripts_start_also_after_somebody_has_killed_the_process_they_are_forked_from(tmp_path, monkeypatch):
    monkeypatch.setattr(fork_server, "_servers", {})
    script, printed = tmp_path / "script.py", tmp_path / "printed.txt"
    script.write_text("import os, sys\nprint(os.getppid())\nsys.exit(3)\n")

    def parent():
        assert fork_server.start_script(script, output=printed, environment=os.environ).wait(60) == 3
        return int(printed.read_text())

    first = parent()
    assert parent() == first
    os.kill(first, signal.SIGKILL)
    [server] = fork_server._servers.values()
    server._process.wait(60)

    assert parent() != first
