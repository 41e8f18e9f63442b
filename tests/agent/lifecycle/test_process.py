"""The log of a node is kept, and shown on its page: what its lines quote of servers and libraries has no secrets."""

import logging

from trainermon.agent.lifecycle.process import open_log


def test_a_line_and_a_traceback_are_logged_without_secrets(tmp_path):
    logger = logging.getLogger("trainermon")
    before = (logger.handlers, logger.level, logger.propagate)
    listener = open_log(tmp_path / "run", "node0", tmp_path)
    try:
        error = OSError("no answer of https://anne:kumquat1@example.org/?token=kumquat1")
        logger.error("export failed: %s", error, exc_info=error)
    finally:
        listener.stop()
        listener.handlers[0].close()
        logger.handlers, logger.level, logger.propagate = before

    text = (tmp_path / "run" / "nodes" / "node0" / "agent.log").read_text()
    assert "ERROR export failed: no answer of https://<redacted>@example.org/?token=<redacted>" in text
    assert "OSError: no answer of" in text
    assert "kumquat1" not in text
