"""Metrics of a run: written to its folder, and shown by labml.

``metrics.jsonl`` is the source of truth: one JSON object per line, flushed when it is recorded. A separate
process sends the same records to labml and its dashboard ([`memformers.tracking.relay`][]).
"""

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memformers.runs.folder import EXPERIMENT, LOG, METRICS, close_card, flatten, open_card
from memformers.tracking import discovery
from memformers.tracking.discovery import ANSWER_SECONDS, AUTO, OFF, page_address
from memformers.tracking.feeding import introduction, post
from memformers.tracking.relay import UNSENT, start_relay, stop_relay


@dataclass
class Tracking:
    """Records a run's metrics, as a context: entered before the first step, left after the last.

    ``folder`` is the run's, ``name`` what labml calls it, ``config`` its hyper-parameters as nested dicts,
    ``dashboard`` what [`find_dashboard`][memformers.tracking.discovery.find_dashboard] takes. An address may
    contain a token, so it is never written to a file. ``given`` are the dotted names of the hyper-parameters
    that the user chose, which labml's page shows first.
    """

    folder: Path
    name: str
    config: Mapping[str, Any]
    dashboard: str = ""
    given: Sequence[str] = ()

    def __post_init__(self) -> None:
        self.dashboard = discovery.find_dashboard(self.dashboard)

    def __enter__(self) -> "Tracking":
        trouble = "" if self.dashboard in (AUTO, OFF) else discovery.check_dashboard(self.dashboard)
        if trouble:
            host = page_address(self.dashboard).partition("://")[2]
            _say(f"the dashboard at {host} {trouble}; the training continues without it.")
        self._file = open(self.folder / METRICS, "a", encoding="utf-8")
        card = open_card(self.folder, self.name, dict(flatten(self.config)), self.given)
        is_alone = not (self.folder.parent / EXPERIMENT).exists()
        is_shown = is_alone and not trouble and discovery.show_comparison(self.folder, self.dashboard)
        if not trouble and (api := discovery.sent_to(self.dashboard)):
            with contextlib.suppress(OSError):  # no link, unless it leads somewhere
                post(api.rstrip("/"), card.run, introduction(card), ANSWER_SECONDS)
                if not is_shown:
                    print(f"dashboard: {page_address(api)}/run/{card.run}", flush=True)
        self._relay = None
        try:
            self._relay = start_relay(self.folder, self.dashboard)
        except OSError as error:  # there may be no process left for this user
            _say(f"labml gets nothing, since no process could be started for it: {error}.")
        return self

    def record(self, values: Mapping[str, float]) -> None:
        """Write one record; its ``tokens`` is the step at which labml draws it."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was said when the record was written
            self._file.close()
        status = "completed" if error is None else f"crashed: {type(error).__name__} {error}"
        with contextlib.suppress(OSError, ValueError):
            close_card(self.folder, status)
        exit_code = stop_relay(self._relay, status) if self._relay else 0
        if exit_code == UNSENT and self.dashboard != OFF:
            _say(
                f"not all metrics reached the dashboard; all are in {self._file.name}, and "
                f"memformers dashboard --import {self.folder} brings them there."
            )
        elif exit_code not in (0, UNSENT):
            why = f"exit code {exit_code} (see {self.folder / LOG})"
            _say(f"labml stopped with {why}; all metrics are in {self._file.name}.")


def _say(message: str) -> None:
    print(f"tracking: {message}", file=sys.stderr)
