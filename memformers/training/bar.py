"""The progress bar of a training."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from tqdm import tqdm

from memformers.training.config import TrainConfig
from memformers.training.state import Progress


class Bar:
    """A context with a progress bar of the tokens of ``config``, from ``progress`` on. Its time, and so its
    speed, is that of training steps only. Nothing is printed unless it is ``shown``."""

    def __init__(self, config: TrainConfig, progress: Progress, shown: bool = True):
        self.shown = shown
        self.tqdm = tqdm(
            total=config.tokens,
            initial=progress.tokens,
            unit="tok",
            unit_scale=True,
            desc=config.model.model,
            disable=not shown,
        )
        self.training = ""
        """What stands behind the bar while steps are taken."""

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.tqdm.close()

    def show(self, progress: Progress, loss: float) -> None:
        """Show how far the training has come, and its loss in nats."""
        self.training = f"loss {loss:.3f} nats"
        self.tqdm.update(progress.tokens - self.tqdm.n)
        self.tqdm.set_postfix_str(self.training, refresh=False)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if self.shown:
            self.tqdm.write(line, file=sys.stderr)

    @contextmanager
    def standing(self) -> Iterator[Callable[[str], None]]:
        """A block whose time doesn't count as training time. It gives a function that shows, a few times a
        second, what is being done."""
        if not self.shown:
            yield lambda doing: None
            return
        stood, said = time.time(), 0.0

        def stand() -> None:
            nonlocal stood
            now = time.time()
            self.tqdm.start_t += now - stood
            self.tqdm.last_print_t += now - stood
            stood = now

        def say(doing: str) -> None:
            nonlocal said
            stand()
            if stood - said >= self.tqdm.mininterval:
                self.tqdm.set_postfix_str(doing)
                said = stood

        try:
            yield say
        finally:
            stand()
            self.tqdm.set_postfix_str(self.training, refresh=False)
