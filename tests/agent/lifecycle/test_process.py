"""The log of a node is kept, and shown on its page: what its lines quote of servers and libraries has no secrets."""

import logging

from tests.full_disk import room_for
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


def test_what_the_disk_of_the_run_has_no_room_for_is_logged_in_the_spool(tmp_path):
    full = tmp_path / "run" / "nodes" / "node0" / "agent.log"
    full.parent.mkdir(parents=True, mode=0o700)
    full.write_bytes(b"x" * 4096)
    logger = logging.getLogger("trainermon")
    before = (logger.handlers, logger.level, logger.propagate)
    with room_for(4096):
        listener = open_log(tmp_path / "run", "node0", tmp_path)
        try:
            logger.warning("5 records are not stored")
        finally:
            listener.stop()
            logger.handlers, logger.level, logger.propagate = before
    listener.handlers[0].close()

    assert "WARNING 5 records are not stored" in (tmp_path / "agent.log").read_text()
