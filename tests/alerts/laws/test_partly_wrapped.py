"""What lies beside the wrapper of DDP is held by all ranks, too: copies that nobody reduces are told."""

from pathlib import Path

from tests.alerts.laws import partly_wrapped
from tests.alerts.laws.test_trainings import judged
from tests.ranks import run_ranks


def test_copies_beside_the_wrapper_are_compared(tmp_path: Path) -> None:
    run_ranks(Path(partly_wrapped.__file__), str(tmp_path), *partly_wrapped.SOUND, *partly_wrapped.UNREDUCED)

    for name in partly_wrapped.SOUND:
        assert judged(tmp_path / name, partly_wrapped.STEPS) == [], name
    for name in partly_wrapped.UNREDUCED:
        alerts = {alert.rule: alert for alert in judged(tmp_path / name, partly_wrapped.STEPS)}
        assert alerts["reduced-gradients-differ"].first_step == 0, name
        assert alerts["replica-norms-differ"].first_step <= 1, name
        assert alerts["replica-divergence"].first_step == 20, name
        for rule in ("reduced-gradients-differ", "replica-norms-differ", "replica-divergence"):
            assert {finding.series.name for finding in alerts[rule].findings} == partly_wrapped.OUTSIDE, (name, rule)
