"""The earlier place of the signals that stop a training."""

from memformers.common.processes import Stopped, StopSignals

__all__ = ["StopSignals", "Stopped"]
