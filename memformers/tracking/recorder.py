"""Metrics of a run: written to its folder, and shown by labml and other trackers.

``metrics.jsonl`` is the source of truth: one JSON object per line, flushed when it is recorded. Unless the
dashboard is off, a second process, the relay, copies it to labml's own files and to a labml server. Whatever
these do, no training stops, slows down or crashes. The relay ends when the training is killed.
"""

import contextlib
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memformers.common.command_line import command_here
from memformers.common.console import printable
from memformers.runs.card import RunCard, close_card, open_card
from memformers.runs.folder import EXPERIMENT, LOG, METRICS, flatten
from memformers.tracking.discovery import (
    AUTO,
    OFF,
    check_dashboard,
    find_dashboard,
    page_address,
    sent_to,
    show_comparison,
)
from memformers.tracking.relay import DRAIN_SECONDS, UNSENT, start_relay, stop_relay
from memformers.tracking.trackers import TRACKERS, Tracker, find_trackers, split_record


@dataclass
class Tracking:
    """Records a run's metrics, as a context around its first and last step: ``name`` is what labml calls it,
    ``config`` its hyper-parameters as nested dicts, ``dashboard`` what
    [`find_dashboard`][memformers.tracking.discovery.find_dashboard] takes, and ``track`` names other trackers
    (by default those in $MEMFORMERS_TRACK). An address may contain a token, so it is never written to a
    file."""

    folder: Path
    name: str
    config: Mapping[str, Any]
    dashboard: str = ""
    track: str = ""

    def __post_init__(self) -> None:
        self.dashboard = find_dashboard(self.dashboard)
        self.tracker_names = find_trackers(self.track)
        self.trackers: dict[str, Tracker] = {}
        self.relay: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Tracking":
        settings = dict(flatten(self.config))
        self.file = open(self.folder / METRICS, "a", encoding="utf-8")
        card = open_card(self.folder, self.name, settings)
        self.start_trackers(card)
        if self.dashboard != OFF:
            self.say_where(card)
            try:
                self.relay = start_relay(self.folder, self.dashboard)
            except OSError as error:  # there may be no process left for this user
                warn(f"labml gets nothing, since no process could be started for it: {error}.")
        return self

    def record(self, values: Mapping[str, float]) -> None:
        """Write one record; its ``tokens`` is the step at which trackers draw it."""
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        self.call_trackers(lambda tracker: tracker.log(*split_record(values)))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with contextlib.suppress(OSError):  # record() has raised the error of a full disk already
            self.file.close()
        with contextlib.suppress(OSError, ValueError):
            status = "completed" if error is None else f"crashed: {type(error).__name__} {error}"
            close_card(self.folder, status)
        self.call_trackers(lambda tracker: tracker.finish())
        if self.relay:
            self.stop_relay()

    def start_trackers(self, card: RunCard) -> None:
        """Start all other trackers, in which the sessions of a run are one curve if they have its id."""
        run = self.folder.resolve()
        for name in self.tracker_names:
            folder = self.folder / name
            try:
                tracker = TRACKERS[name](run.name, run.parent.name, card.run, card.config, folder)
            except Exception as error:  # a tracker or its server may raise anything
                warn(f"{name} can't start ({error}); the training continues without it.")
                continue
            self.trackers[name] = tracker
            place = folder if folder.exists() else f"project memformers, run {run.name}"
            print(printable(f"{name}: {place}"), flush=True)

    def call_trackers(self, call: Callable[[Tracker], object]) -> None:
        """Call each tracker, and do without it if it fails: it must not end a training."""
        for name, tracker in list(self.trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # a tracker or its server may raise anything
                del self.trackers[name]
                warn(f"{name} stopped ({error}); the training continues without it.")

    def say_where(self, card: RunCard) -> None:
        """Print where the run is shown, or why it can't be."""
        problem = "" if self.dashboard == AUTO else check_dashboard(self.dashboard)
        if problem:
            warn(f"{page_address(self.dashboard)} {problem}; the training continues without it.")
            return
        is_alone = not (self.folder.parent / EXPERIMENT).exists()
        if is_alone and show_comparison(self.folder, self.dashboard):
            return
        api = sent_to(self.dashboard)
        if api:
            print(f"dashboard: {page_address(api)}/run/{card.run}", flush=True)

    def stop_relay(self) -> None:
        """End the relay, and say if it lost something."""
        assert self.relay
        exit_code = stop_relay(self.relay, DRAIN_SECONDS + 1.0)
        if exit_code == UNSENT:
            again = command_here(f"dashboard --import {shlex.quote(str(self.folder))}")
            warn(f"not all metrics reached the dashboard; all are in {self.file.name}. Send them: {again}")
        elif exit_code:
            warn(f"labml stopped with exit code {exit_code}; see {self.folder / LOG}. No metric is lost.")


def warn(message: str) -> None:
    print(printable(f"tracking: {message}"), file=sys.stderr)
