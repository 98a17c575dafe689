"""``memformers train``: one model on one text."""

import os
import shlex
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from memformers.commands.options import FIRST_OF_TRAINING, TrackedCommand
from memformers.common.command_line import command_here, last_value, parse_arguments
from memformers.common.errors import UserError
from memformers.common.files import has_manifest
from memformers.common.processes import is_first
from memformers.models.config import ModelConfig
from memformers.models.registry import import_memory, lookup, path_from_here, short_name
from memformers.runs.folder import CONFIG, RUNS, new_folder
from memformers.training.api import train_run
from memformers.training.config import TrainConfig, read_preset, read_train_config
from memformers.training.distributed import end_rank
from memformers.training.initial_weights import load_initial


@dataclass(frozen=True)
class Train(TrackedCommand):
    """Train one model on a text.

    Example: memformers train --model compressive --data my_book.txt --tokenizer bpe --vocab-size 4096

    Example: memformers train --segment-len 32 --batch-size 32 --learning-rate 0.001

    Example: memformers train --resume

    Example: memformers train --resume runs/book --max-tokens 5000000
    """

    first: ClassVar = ("out", "resume", "preset", "init_from", "dashboard", *FIRST_OF_TRAINING)
    config: TrainConfig = field(default_factory=lambda: TrainConfig(ModelConfig(token_shift=True)))
    """What is trained, on which text and for how long."""
    preset: str = ""
    """The settings of a paper's benchmark, such as enwik8-12l, instead of the defaults; other options
    override them. An unknown name lists them all."""
    out: Path | None = None
    """The folder of the run; by default a new folder in runs/ with the date and the model in its name."""
    init_from: str = ""
    """The weights and the tokenizer to start from: the folder of a run, of a checkpoint, of save_pretrained
    or of Hugging Face's Transformer-XL; or compressive-shakespeare or transformer-xl-shakespeare, which come
    with the package; or OWNER/NAME on Hugging Face's hub. The optimizer starts fresh; the lengths of segments
    and memories may differ."""
    resume: Annotated[tuple[Path, ...] | None, tyro.conf.arg(metavar="[FOLDER]")] = None
    """Resume an interrupted run from its newest checkpoint, with its settings: the run in this folder, else
    in --out, else the newest run in runs/. With --out and --resume, a new run starts there if there is none.
    With a larger --max-tokens, it extends a finished run."""
    previous: Annotated[TrainConfig | None, tyro.conf.Suppress] = None
    """The config of the run that is resumed."""

    def folder(self) -> Path:
        if self.resume is None:
            return self.out or new_folder(short_name(self.config.model.model))
        if len(self.resume) + (self.out is not None) > 1:
            raise UserError("name one run to resume, after --resume or as --out.")
        if self.out:
            return self.out
        # The run that is named, or the newest one.
        newest = sorted(RUNS.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime)[-1:]
        runs = self.resume or [path.parent for path in newest]
        if not runs:
            raise UserError(f"{RUNS} holds no run to resume; name its folder after --resume.")
        if not (runs[0] / CONFIG).is_file() or has_manifest(runs[0]):
            raise UserError(f"{runs[0]} is not the folder of a run; name the run to resume.")
        return runs[0]

    def train(self) -> Path:
        folder = self.folder()
        try:
            train_run(
                self.config,
                folder,
                resume=self.resume is not None,
                init=self.init_from or None,
                dashboard=self.dashboard,
                track=self.track,
                previous=self.previous,
            )
        except (KeyboardInterrupt, SystemExit):
            if is_first() and (folder / CONFIG).exists():
                print(f"to continue: {self.resume_command(folder)}", file=sys.stderr)
            raise
        return folder

    def resume_command(self, folder: Path) -> str:
        # torchrun sets this variable, and its command is longer than ours.
        if "WORLD_SIZE" in os.environ:
            return f"the same command with --resume --out {shlex.quote(str(folder))}"
        words = ["train", "--resume", str(folder)]
        model = self.config.model.model
        if ":" in model:  # code, which runs only if it is named
            words += ["--model", path_from_here(lookup(model))]
        return command_here(shlex.join(words))

    def run(self) -> None:
        folder = self.train()
        if is_first():
            options = f"--checkpoint {shlex.quote(str(folder))}"
            model = self.config.model.model
            if ":" in model:
                options += f" --model {shlex.quote(path_from_here(lookup(model)))}"
            print(f"run: {folder}")
            print(f"next: {command_here(f'generate {options}')}\n      {command_here(f'evaluate {options}')}")
        end_rank()


def parse_train(arguments: list[str], default: Train | None = None, prog: str | None = None) -> Train:
    """The arguments of a training, on top of the preset that they name, or of the run that they resume."""
    default = default or Train()

    def parsed(config: TrainConfig) -> Train:
        named = replace(config, model=with_custom_memory(config.model, arguments))
        train: Train = parse_arguments(Train, arguments, prog=prog, default=replace(default, config=named))
        return train

    # Parsed twice, if it names something that has other defaults: a run that it resumes, or initial weights.
    preset = last_value("--preset", arguments)
    train = parsed(read_preset(preset)["config"] if preset else default.config)
    if train.resume is not None and (train.folder() / CONFIG).exists():
        folder = train.folder()
        if train.init_from or preset:
            raise UserError(f"{folder} resumes as it began; leave out --init-from and --preset.")
        previous = read_train_config(folder)
        return replace(parsed(previous), out=folder, resume=(), previous=previous)
    if train.init_from:
        return parsed(replace(train.config, model=load_initial(train.init_from)[0].config))
    return train


def with_custom_memory(config: ModelConfig, arguments: list[str]) -> ModelConfig:
    """``config`` with the custom memory that ``--model`` names, if any, whose settings then are options;
    without token shift if it reads or attends in its own way."""
    model = last_value("--model", arguments)
    if ":" not in model:
        return config
    name = import_memory(model)
    n_layers = last_value("--n-layers", arguments)  # it may allow one number only
    n = int(n_layers) if n_layers.isdecimal() else config.n_layers
    token_shift = config.token_shift and lookup(name).may_shift()
    return replace(config, model=name, n_layers=n, token_shift=token_shift)
