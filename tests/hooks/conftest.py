"""The same places as for whole sessions: what a test's monitor writes stays in the test's own directory."""

from tests.monitor.session.conftest import no_thread_is_left, places

__all__ = ["no_thread_is_left", "places"]
