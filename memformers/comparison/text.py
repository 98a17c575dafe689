"""The comparison of models on a text: the same training for each arm, and a probe of how much their
memories help."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from memformers.common.errors import UserError
from memformers.common.fields import Count, Range, check_fields
from memformers.common.files import user_path
from memformers.common.machine import choose_device
from memformers.comparison.arms import Arm, keys_of_layers, read_arms, with_settings
from memformers.comparison.experiment import Experiment, run_experiment
from memformers.comparison.task import Task, train_alone
from memformers.data.dataset import DatasetInfo
from memformers.data.sources import BUILTIN, STAND_IN, TINY_SHAKESPEARE_URL, CorpusSpec
from memformers.evaluation.probe import probe
from memformers.models.config import SETTING_MODELS, ModelConfig, ModelName
from memformers.runs.folder import CONFIG
from memformers.runs.plan import PlannedArm, read_plan
from memformers.training.api import train_run
from memformers.training.config import TrainConfig, read_train_config
from memformers.training.resuming import check_same_config
from memformers.training.text import check_apart, check_corpus, find_text, spec_of

if TYPE_CHECKING:
    from memformers.report.rendering import Report

PROBED = 12_288
"""Tokens that are predicted with each part of the memory changed when a comparison ends, so that this takes
seconds."""

MEMORIES = ModelConfig(model="compressive", mem_len=32, c_mem_len=32)
"""Positions and slots that the Compressive Transformer has in a comparison if nothing else is asked for. With
equal keys, Transformer-XL then remembers 64 positions, which is better than 128 in the same time
(docs/recipes.md)."""


@dataclass(frozen=True)
class CompareConfig:
    """A comparison: the same training for each arm, from each seed."""

    train: TrainConfig = field(default_factory=lambda: TrainConfig(replace(MEMORIES, token_shift=True)))
    """What all arms share."""
    models: tuple[ModelName, ...] = ("transformer", "transformer-xl", "compressive")
    """The models to train, in this order; each is an arm with the name of the model."""
    arms: tuple[str, ...] = ()
    """Other arms in addition to the models: a name and the settings that differ, such as
    "long: model=transformer-xl mem_len=320"; or a file with one arm per line."""
    equal_keys: bool = True
    """Whether Transformer-XL's memory is as long as the others' memory and compressed memory, or kept
    positions, together, so that all attend to the same number of keys."""
    seeds: Count = 1
    """How many seeds each arm is trained with: seed, seed + 1 and so on. Claims need at least 3."""
    scale: Annotated[float, Range(above=0, below=math.inf)] = 1.0
    """Multiplies the number of tokens of each arm: 0.1 for a short trial, 10 for a long comparison."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.train.model.model != MEMORIES.model:  # which uses all settings that arms may share
            raise UserError("a comparison trains several models; name them with models, not model.")
        if self.train.step.parallel != "single":
            raise UserError(
                f"parallel={self.train.step.parallel!r} can't be used in a comparison, which starts its runs "
                f"one by one; train each with torchrun, and compare them with memformers report."
            )

    def experiment(self, planned: Sequence[PlannedArm] = ()) -> Experiment:
        """The experiment; ``planned`` are arms that its folder has already. UserError for an arm that can't
        be trained."""
        base = replace(self.train, max_tokens=max(round(self.train.max_tokens * self.scale), 1))
        described = read_arms(self.arms, base, model=ModelConfig().model)

        # Transformer-XL is as long as the others if one of those has slots.
        models = {*self.models, *(arm.config.model.model for arm in described)}
        models.update(arm.config["model"]["model"] for arm in planned)
        has_slots = not models.isdisjoint(SETTING_MODELS["c_mem_len"])
        arms = []
        for model in self.models:
            settings: dict[str, Any] = {"model": model}
            if model == "transformer-xl" and self.equal_keys and has_slots:
                settings["mem_len"] = keys_of_layers(base.model)
            arms.append(Arm(model, with_settings(base, **settings)))
        return Experiment(TEXT, base, (*arms, *described), seeds=self.seeds, scale=self.scale)


def compare(config: CompareConfig, folder: Path, dashboard: str = "", *, resume: bool = False) -> "Report":
    """Train every arm from every seed, each into a sub-folder of ``folder``, probe them, and write the
    report, as [`run_experiment`][memformers.comparison.experiment.run_experiment] does."""
    saved = read_plan(folder)
    experiment = config.experiment(saved.arms if saved else ())
    return run_experiment(experiment, folder, dashboard, resume=resume)


@dataclass(frozen=True)
class TextTask(Task[TrainConfig]):
    """Training runs on a text, which measure their loss on its held-out part."""

    probed: bool = True
    """Whether the trained models are probed."""
    name = "text"
    config = TrainConfig
    module = "memformers.comparison.text"

    def find_data(self, runs: Mapping[str, TrainConfig], folder: Path) -> dict[str, Any]:
        """The text, and UserError also for runs in ``folder`` of another text or of other settings."""
        # Arms may divide the text in other ways: each way is read once.
        corpora: dict[CorpusSpec, DatasetInfo] = {}
        for name, config in runs.items():
            spec = spec_of(config)
            if spec not in corpora:
                corpora[spec] = find_text(config, folder / name).info
                check_apart(folder, spec.data, corpora[spec].source)
            check_corpus(corpora[spec], config.data, folder / name)
            if (folder / name / CONFIG).exists():
                check_same_config(config, read_train_config(folder / name), folder / name)
        first = next(iter(runs.values()))
        return resolve_data(first, corpora[spec_of(first)])

    def train(self, folder: Path) -> None:
        config = read_train_config(folder)
        train_run(config, folder, resume=True, previous=config)

    def measure(self, base: TrainConfig, folder: Path) -> None:
        try:
            if self.probed:
                probe(folder, PROBED, choose_device(base.step.device))
        except ValueError as error:
            print(f"NOTE: not probed: {error}")


TEXT = TextTask()


def resolve_data(config: TrainConfig, corpus: DatasetInfo) -> dict[str, Any]:
    """The settings with which all runs read the same corpus, whatever the network, a cache or the current
    folder contains: a word for the built-in play, otherwise files."""
    if corpus.is_stand_in or config.data == BUILTIN:
        return {"data": STAND_IN if corpus.is_stand_in else BUILTIN}
    if corpus.source == TINY_SHAKESPEARE_URL:  # it can't be kept in the cache, so each run downloads it
        return {}
    text = config.text
    if "-" in (config.data, text.validation, text.test):
        raise UserError("several runs can't read standard input, -; write the text to a file, and name it.")
    names = {"data": config.data or corpus.source, "validation": text.validation, "test": text.test}
    resolved = {}
    for setting, name in names.items():
        if name:
            resolved[setting] = name if "://" in name else str(user_path(name).resolve())
    return resolved


if __name__ == "__main__":
    train_alone(TEXT)
