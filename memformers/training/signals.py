"""The signals that stop a training at the next step."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

from memformers.common.processes import handling
from memformers.training.distributed import SINGLE_PROCESS, Distributed


class Stopped(BaseException):
    """A signal stops the training, at a moment when its state is consistent."""

    def __init__(self, signal_number: signal.Signals):
        super().__init__(f"stopped by {signal_number.name}")
        self.signal = signal_number

    def conventional(self) -> BaseException:
        """What Python raises at this signal: its exit code is 128 and the signal's number."""
        return KeyboardInterrupt() if self.signal == signal.SIGINT else SystemExit(128 + self.signal)


class StopSignals(ExitStack):
    """A context that notes the signals that end a process: Ctrl-C, kill, and a terminal that was closed. A
    second Ctrl-C ends it at once. A signal that is ignored stays so. Outside of the main thread, which alone
    gets signals, it does nothing."""

    def __init__(self, alone: bool = True) -> None:
        super().__init__()
        self.alone = alone
        """Whether this process trains by itself."""
        self.received: signal.Signals | None = None
        self._at_once = False

    def __enter__(self) -> "StopSignals":
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            if number := signal.Signals.__members__.get(name):
                self.enter_context(handling(number, self._note))
        return self

    def check(self, ranks: Distributed = SINGLE_PROCESS) -> None:
        """Raise [`Stopped`][] if a signal has come to any of ``ranks``, all of which must call this.

        Only what the ranks have told each other counts: a signal that comes while they do waits for the next
        call, since a rank that stopped by itself would leave the others waiting for it.
        """
        if number := ranks.highest(self.received or 0):
            raise Stopped(signal.Signals(number))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """A block that a signal may end anywhere, by [`Stopped`][]; but not on several ranks, which can
        only stop together, where they call [`check`][]."""
        self._at_once = self.alone
        try:
            if self.alone:
                self.check()
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received == signal.SIGINT == number:
            raise KeyboardInterrupt
        self.received = self.received or signal.Signals(number)
        if self._at_once:
            raise Stopped(self.received)
