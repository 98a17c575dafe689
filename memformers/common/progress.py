"""The earlier place of progress."""

from memformers.common.text import Progress, stream

__all__ = ["Progress", "stream"]
