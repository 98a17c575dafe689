"""``memformers train``: one model on one text."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from memformers.commands.options import GROUPS, TrackedCommand, given_to, with_own_memory
from memformers.common.atomic_dir import has_manifest
from memformers.common.command_line import parse_arguments
from memformers.common.errors import UserError
from memformers.common.processes import is_first
from memformers.models.registry import short_name
from memformers.runs.folder import CONFIG, RUNS, new_folder
from memformers.training.api import train
from memformers.training.config import TrainConfig, read_preset, read_train_config
from memformers.training.distributed import end_rank
from memformers.training.run import load_initial


@dataclass(frozen=True)
class Train(TrackedCommand):
    """Train one model on a text.

    Example: memformers train --model compressive --data my_book.txt

    Example: memformers train --resume
    """

    first: ClassVar = (
        "model", "data", "tokenizer", "tokens", "n_layers", "d_model", "mem_len",
        "preset", "init_from", "out", "resume",
    )  # fmt: skip
    groups: ClassVar = GROUPS
    config: TrainConfig = field(default_factory=TrainConfig)
    preset: str = ""
    """The settings of a paper's benchmark, such as enwik8-12l, in place of the defaults; other options change
    them. An unknown name gets the list of all."""
    out: Path | None = None
    """The folder of the run; by default a new folder in runs/ with the date and the model in its name."""
    init_from: str = ""
    """The weights and the tokenizer to begin with: the folder of a run, of a checkpoint, of save_pretrained
    or of Hugging Face's Transformer-XL; or compressive-shakespeare or transformer-xl-shakespeare, which come
    with the package. The optimizer is a fresh one; the lengths of segments and memories may differ."""
    resume: Annotated[tuple[Path, ...] | None, tyro.conf.arg(metavar="[FOLDER]")] = None
    """Continue a stopped run from its newest checkpoint and with its settings: the run in this folder, else
    in --out, else the newest run in runs/. With --out, a new run starts there if there is none. A finished
    run trains on if --tokens is more than before."""

    def folder(self) -> Path:
        """Where the run goes, or is."""
        if self.resume is None:
            return self.out or new_folder(short_name(self.config.model.model))
        if len(self.resume) + (self.out is not None) > 1:
            raise UserError("name one run to resume, after --resume or as --out.")
        if self.out:
            return self.out
        begun = sorted(RUNS.glob(f"*/{CONFIG}"), key=lambda path: path.stat().st_mtime)
        runs = self.resume or [path.parent for path in begun]
        if not runs:
            raise UserError(f"{RUNS} holds no run to resume; name its folder after --resume.")
        if not (runs[-1] / CONFIG).is_file() or has_manifest(runs[-1]):
            raise UserError(f"{runs[-1]} is not the folder of a run; name the run to resume.")
        return runs[-1]

    def train(self) -> Path:
        """Train; returns the run's folder."""
        folder, init, resume = self.folder(), self.init_from or None, self.resume is not None
        return train(self.config, folder, resume=resume, init=init, dashboard=self.dashboard).folder

    def run(self) -> None:
        """Train, say where the run is, and end the process if it is one of several ranks."""
        folder = self.train()
        if is_first():
            print(f"run: {folder}")
        end_rank()


def parse_train(arguments: list[str], default: Train, prog: str | None = None) -> Train:
    """The arguments of a training run, on top of ``default`` or of the preset that they name; where it
    resumes a run, on top of that run's config, so that only what is named can differ from it."""

    def parsed(config: TrainConfig) -> Train:
        named = replace(config, model=with_own_memory(config.model, arguments))
        train: Train = parse_arguments(Train, arguments, prog=prog, default=replace(default, config=named))
        return train

    preset = given_to("--preset", arguments)
    train = parsed(read_preset(preset).config if preset else default.config)
    if train.resume is not None and ((folder := train.folder()) / CONFIG).exists():
        if train.init_from:
            raise UserError(f"{folder} is resumed with its own weights; leave out --init-from.")
        return replace(parsed(read_train_config(folder)), out=folder, resume=())
    if train.init_from:
        return parsed(replace(train.config, model=load_initial(train.init_from)[0].config))
    return train
