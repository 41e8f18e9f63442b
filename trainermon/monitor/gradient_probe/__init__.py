"""Signs and numbers of the gradients that optimizers use, in files that two runs are compared by."""

from trainermon.monitor.gradient_probe.gradient_monitor import GradientMonitor

__all__ = ["GradientMonitor"]
