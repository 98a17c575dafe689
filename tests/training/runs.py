"""Small texts, checkpoints, runs and processes that the tests of resuming share."""

import json
import signal
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

from memformers.common.files import MANIFEST, checksum, read_json, write_json
from memformers.common.processes import Stopped, module_environment
from memformers.data.builtin import write_play
from memformers.data.sources import Part, Sources
from memformers.data.streams import training_segments
from memformers.data.tokenize_corpus import dataset_from
from memformers.training import api, job
from memformers.training.distributed import with_precision
from memformers.training.monitor import RunMonitor
from memformers.training.text import spec_of
from memformers.training.trainer import Monitor, Trainer


def train_run(config, folder, dashboard="", **options):
    """Train; returns the folder. The network may have lengths without use, as an experiment's arms do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "reject_unused", lambda config, model, lengths: None)
        return api.train(config, folder, dashboard=dashboard, **options).folder


# Four streams of seven segments of 16 and a shorter one.
TEXT = torch.arange(4 * 125 + 1) ** 2 % 7
# Lengths of documents in TEXT.
DOCUMENTS = (90, 13, 1, 40, 55, 7, 100, 2, 33, 60, 21, 79)


# A part of the built-in play that trains within seconds.
SHORT = write_play(30_000)


def dataset_with(text, config, documents=()):
    """``text``, or documents of these lengths in it, as a training of ``config`` finds it."""
    parts = [Part("", "some", part.encode(), True) for part in parts_of(text, documents)]
    sources = Sources("some", "some", parts or [Part("", "some", text.encode(), False)])
    return dataset_from(sources, spec_of(config))


def parts_of(text, lengths):
    """The beginning of ``text``, in parts of these ``lengths``."""
    ends = accumulate(lengths)
    return [text[end - length : end] for length, end in zip(lengths, ends, strict=True)]


def write_text_file(folder, text, documents=()):
    """A file of ``text``, or of documents of these lengths in it; returns its path, as ``data`` takes it."""
    path = folder / "text.txt"
    if documents:
        path = folder / "text.jsonl"
        lines = [json.dumps({"text": part}) for part in parts_of(text, documents)]
        text = "\n".join(lines) + "\n"
    path.write_text(text)
    return str(path)


def segments_of(config, position=0, documents=()):
    """TEXT, as ``config`` reads it."""
    S = config.model.segment_len
    return training_segments(TEXT, config.batch_size, S, (0, position), documents=documents)


def launch(module: str, *arguments: object, processes: int) -> "subprocess.Popen[str]":
    """Begin to run ``module``, in one process or, by torchrun, in several ``processes`` with a core each."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", module, *map(str, arguments)]
    return subprocess.Popen(
        command,
        env=module_environment() | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class Notes(Monitor):
    """A monitor that keeps each record's metrics, and calls ``at_checkpoint`` and ``at_evaluation``."""

    def __init__(self, at_checkpoint=None, at_evaluation=None):
        self.records = []
        self.steps = []
        self.at_checkpoint = at_checkpoint
        self.at_evaluation = at_evaluation

    def record(self, state, metrics):
        self.records.append(metrics)
        self.steps.append(state.step)

    def evaluate(self, state):
        self.steps.append(-state.step)
        if self.at_evaluation:
            self.at_evaluation(state)

    def checkpoint(self, state):
        if self.at_checkpoint:
            self.at_checkpoint(state)


def trainer_of(lm, config, segments=None, monitor=None, **options):
    """A trainer of ``lm``, by default on TEXT."""
    config = with_precision(config, lm.device)
    return Trainer(lm, segments or segments_of(config), config, monitor or Notes(), **options)


def train_here(lm, config, segments=None, at_checkpoint=None, **options):
    """Train ``lm``, by default on TEXT; returns the metrics of each record."""
    notes = Notes(at_checkpoint)
    trainer_of(lm, config, segments, notes, **options).fit()
    return notes.records


def stop(config, folder, step):
    """Train in ``folder`` until a signal comes after ``step``, which hasn't been kept before."""
    checkpoint = RunMonitor.checkpoint

    def stopped(self, state):
        checkpoint(self, state)
        if state.step == step:
            raise Stopped(signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunMonitor, "checkpoint", stopped)
        with pytest.raises(SystemExit) as end:
            train_run(config, folder, resume=True)
    assert end.value.code == 143


TIMES = {"seconds", "evaluation_seconds", "tokens_per_second", "peak_memory_bytes"}


def without_times(records):
    timeless = []
    for record in records:
        timeless.append({name: value for name, value in record.items() if name not in TIMES})
    return timeless


def reseal(folder: Path) -> None:
    """Make the manifest tell the files as they are now, as someone who meddles would."""
    files = {}
    for name in read_json(folder / MANIFEST)["files"]:
        path = folder / name
        files[name] = {"size": path.stat().st_size, "sha256": checksum(path)}
    write_json(folder / MANIFEST, {"format": 1, "files": files})
