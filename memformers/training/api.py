"""Training from Python in one call, for notebooks and other programs."""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from memformers.common.console import Progress, counted
from memformers.common.fields import check_arguments
from memformers.common.files import read_json, user_path
from memformers.common.machine import choose_device
from memformers.common.processes import StopSignals
from memformers.data.streams import training_segments
from memformers.data.tokenizer import Tokenizer
from memformers.models.language_model import MemoryLM
from memformers.models.registry import short_name
from memformers.runs.folder import RESULT, alone_in, check_named, new_folder
from memformers.runs.load import load_checkpoint
from memformers.runs.metrics import read_metrics
from memformers.tracking.discovery import find_dashboard
from memformers.tracking.recorder import Tracking
from memformers.tracking.trackers import find_trackers
from memformers.training.config import TrainConfig
from memformers.training.distributed import process_group
from memformers.training.job import Job, alone_in_this_process, resolve, write_run_files
from memformers.training.monitor import RunMonitor
from memformers.training.optimizers import build_optimizers
from memformers.training.resuming import restore_newest
from memformers.training.state import TrainingState
from memformers.training.trainer import Trainer


@dataclass(frozen=True)
class TrainedModel:
    """What [`train`][memformers.training.api.train] returns: a model, and what its training measured.

    Examples:
        >>> from memformers import ModelConfig, TrainConfig, generate, train
        >>> network = ModelConfig(d_model=32, n_layers=1, segment_len=16, mem_len=16)
        >>> config = TrainConfig(model=network, data="builtin", max_tokens=1_000, batch_size=8)
        >>> run = train(config, "runs/small")  # doctest: +ELLIPSIS
        transformer-xl: ...
        >>> tokens = run.tokenizer.encode("ROMEO:")[:, None]  # [P, 1]
        >>> len(list(generate(run.model, tokens, max_new_tokens=20)))
        20
    """

    folder: Path
    """The folder of the run, which the commands take too, as in ``memformers report FOLDER``."""
    device: str = "auto"
    """Where the model is loaded to; auto takes a GPU if there is one."""

    @cached_property
    def loaded(self) -> tuple[MemoryLM, Tokenizer]:
        """The model and its tokenizer."""
        return load_checkpoint(self.folder, choose_device(self.device))

    @property
    def model(self) -> MemoryLM:
        """The model of the newest checkpoint, in eval mode."""
        return self.loaded[0]

    @property
    def tokenizer(self) -> Tokenizer:
        """``encode`` gives the tokens of a text, ``decode`` the text of tokens."""
        return self.loaded[1]

    @cached_property
    def metrics(self) -> list[dict[str, float]]:
        """Every record, in order: ``tokens``, ``seconds``, ``loss.train`` or ``loss.valid`` in nats, …"""
        return read_metrics(self.folder)

    @cached_property
    def result(self) -> dict[str, Any]:
        """The last evaluation of the held-out text: ``loss`` in nats per token, ``bits_per_character``,
        ``accuracy`` and more, as in ``result.json``."""
        return read_json(self.folder / RESULT)


@check_arguments
def train(
    config: TrainConfig,
    folder: str | Path | None = None,
    *,
    resume: bool = False,
    init: MemoryLM | str | Path | None = None,
    dashboard: str = "",
    track: str = "",
) -> TrainedModel:
    """Train a model on a text, as ``memformers train`` does, with its checkpoints, records and dashboard. The
    command has a token shift by default; here, it is ``ModelConfig(token_shift=True)``.

    Ctrl-C, the stop button of a notebook, SIGTERM and SIGHUP end the training after the current step and its
    checkpoint, by KeyboardInterrupt or SystemExit. The global random state is restored afterwards.

    Args:
        config: What to train, on which text and for how long.
        folder: The folder of the run; by default a new one in ``runs/``.
        resume: Whether a run in ``folder`` continues from its newest checkpoint, as if it had never stopped.
            A finished run is only loaded, unless ``config`` asks for more tokens than it has seen: then it
            is extended. If there is no run, a new one starts.
        init: The initial weights, with a fresh optimizer: a model whose tokens are those of ``config``; or a
            folder or name as ``--init-from`` takes it, which has its tokenizer. Leave ``config.model`` at its
            default, or repeat the model's settings; the lengths of segments and memories, dropout and others
            that don't change the weights may differ.
        dashboard: The address of a labml server, or off; by default one that runs on this machine.
        track: Other trackers that show the run live, with commas between them: tensorboard, wandb, trackio.

    Returns:
        The trained model with its tokenizer and what was measured.

    Raises:
        ValueError: For a text, config or folder that can't be used, another training in this process, and
            divergence ([`memformers.training.state.NotFiniteError`][]).
        OSError: If the folder can't be written.

    Examples:
        >>> from memformers import ModelConfig, TrainConfig, train
        >>> network = ModelConfig(model="compressive", d_model=32, n_layers=2, segment_len=16, mem_len=16)
        >>> config = TrainConfig(model=network, data="builtin", max_tokens=5_000, batch_size=8)
        >>> run = train(config, "runs/first")  # doctest: +ELLIPSIS
        compressive: ... parameters, 5,000 tokens → runs/first
        corpus: ...
        >>> sorted(run.result)[:3]
        ['accuracy', 'bits_per_byte', 'bits_per_character']
    """
    folder = new_folder(short_name(config.model.model)) if folder is None else user_path(folder)
    return train_run(config, folder, resume=resume, init=init, dashboard=dashboard, track=track)


def train_run(
    config: TrainConfig,
    folder: Path,
    *,
    resume: bool = False,
    init: MemoryLM | str | Path | None = None,
    dashboard: str = "",
    track: str = "",
    previous: TrainConfig | None = None,
) -> TrainedModel:
    """[`train`][] in ``folder``, of whose run ``previous`` is the config, if that was read already."""
    # Checked before a text is prepared, which may take hours
    check_named(folder)
    find_dashboard(dashboard)
    find_trackers(track)
    with alone_in_this_process(), process_group(config) as ranks:
        folder = ranks.all_gather(folder)[0]  # of the first rank's time, if it is a new one
        job = resolve(config, folder, resume=resume, init=init, previous=previous, ranks=ranks)
        if job is None:
            ranks.say(f"{folder} is already finished; nothing is left to train.")
        else:
            with alone_in(folder) if ranks.first else nullcontext():
                run_job(job, dashboard, track)
    return TrainedModel(folder, config.step.device)


def run_job(job: Job, dashboard: str, track: str) -> None:
    """Train until the end, or until a signal."""
    config = job.config
    ranks = job.ranks
    name = short_name(config.model.model)
    with StopSignals(alone=ranks.size == 1) as signals:
        # What is trained
        text = job.text.info
        source = f" ({text.source})" if text.source != text.name else ""
        documents = f", {counted(text.documents, 'document')}" if text.documents else ""
        ranks.say(
            f"{name}: {job.facts['parameters']:,} parameters, {config.max_tokens:,} tokens → {job.folder}\n"
            f"corpus: {text.name}{source}{documents}"
        )

        # Where it starts
        state = TrainingState(build_optimizers(job.model, config))
        if job.resume:
            state = restore_newest(job.folder, job.model, state, config, ranks)
        if ranks.first:
            write_run_files(job, state)
        segments = training_segments(
            job.text.train.tokens,
            config.batch_size,
            config.model.segment_len,
            (state.epoch, state.position),
            chunk_len=config.chunk_len,
            seed=config.seed,
            documents=torch.from_numpy(job.text.train.documents),
        )

        # Who watches it
        tracking = Tracking(job.folder, name, asdict(config) | job.facts, dashboard, track)
        with (
            tracking if ranks.first else nullcontext(),
            Progress(
                hidden=not ranks.first,
                desc=name,
                unit="tok",
                unit_scale=True,
                total=config.max_tokens,
                initial=min(state.tokens, config.max_tokens),
            ) as bar,
        ):
            write = tracking.record if ranks.first else lambda record: None
            monitor = RunMonitor(job, state, write, signals, bar)
            with monitor.report_exit():
                Trainer(job.model, segments, config, monitor, state, ranks).fit()
                monitor.finish()
        ranks.barrier()  # until all is written
