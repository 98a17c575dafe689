"""The earlier place of what people read."""

from memformers.common.text import counted, duration, fitting, printable

__all__ = ["counted", "duration", "fitting", "printable"]
