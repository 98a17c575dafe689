"""Several models trained alike, one after the other, and the report that sets them side by side."""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from labml import monit

from memformers.common.devices import choose_device
from memformers.common.errors import UserError
from memformers.common.files import read_json, replacing, write_json
from memformers.common.processes import run_module
from memformers.data.corpora import BUILTIN, STAND_IN, Corpus, load_corpus
from memformers.data.text_files import bytes_of
from memformers.evaluation.probe import ProbeConfig, probe
from memformers.models.config import ModelName
from memformers.report.document import write_report
from memformers.runs.card import new_run_id, plan_run
from memformers.runs.folder import (
    CARD,
    CONFIG,
    OF_A_COMPARISON,
    RESULT,
    check_named,
    check_nothing_is_lost,
)
from memformers.tracking.discovery import DASHBOARD, dashboard_page, find_dashboard
from memformers.training.config import TrainConfig
from memformers.training.resume import check_same_config, check_same_corpus

PROBED = 500
"""Tokens that are predicted with each context when a comparison is probed, so that it takes seconds."""


@dataclass(frozen=True)
class CompareConfig:
    """A comparison: the same training for each model."""

    train: TrainConfig = field(default_factory=TrainConfig)
    """What all models share."""
    models: tuple[ModelName, ...] = ("transformer", "transformer-xl", "compressive")
    """Which models to train, in this order."""
    scale: float = 1.0
    """Multiplies the token budget of each model: 0.1 for a glimpse, 10 for a long comparison."""

    def __post_init__(self) -> None:
        """Raise ValueError, saying what doesn't fit."""
        if not 0.0 < self.scale < math.inf:
            raise UserError(f"scale={self.scale} must be above 0, and finite.")
        if not self.models or len(set(self.models)) < len(self.models):
            raise UserError(f"models={self.models} must name each model once, and at least one.")
        if self.train.model.model != TrainConfig().model.model:
            raise UserError("a comparison trains several models; name them with models, not model.")
        if self.train.parallel != "single":
            raise UserError(
                f"parallel={self.train.parallel!r} can't be used in a comparison, which starts its trainings "
                f"one by one; train each with torchrun, and let memformers report set them side by side."
            )

    def run_config(self, model: ModelName) -> TrainConfig:
        """The training of one of the models."""
        network = replace(self.train.model, model=model)
        return replace(self.train, model=network, tokens=max(round(self.train.tokens * self.scale), 1))


def compare(config: CompareConfig, folder: Path, dashboard: str = "", *, resume: bool = False) -> Path:
    """Train every model into a sub-folder of ``folder``, probe them and write the report; returns its
    page.

    With ``resume``, trainings that were stopped go on, and finished ones are left alone.

    A model whose training fails doesn't stop the others: the report is written, and says so. Raises
    ValueError for a folder that already holds runs (with ``resume``: of other settings), for what no
    training could start from, and when a training failed.
    """
    if not resume and next(folder.glob(f"*/{CONFIG}"), None):
        raise UserError(f"{folder} already holds runs; name a new folder for this comparison, or resume it.")
    check_named(folder)
    if not resume:
        check_nothing_is_lost(folder, OF_A_COMPARISON)
    dashboard = find_dashboard(dashboard)
    corpus = load_corpus(config.train.data)
    for model in config.models:
        check_same_corpus(corpus, folder / model)
    folder.mkdir(parents=True, exist_ok=True)
    data = pin_corpus(corpus, folder)
    trainings = {model: replace(config.run_config(model), data=data) for model in config.models}
    for model, training in trainings.items():
        check_same_config(training, folder / model)
    ids = plan_runs(config.models, folder)
    failed = []
    print_links(ids, dashboard)
    for i, model in enumerate(config.models, 1):
        print(f"\n── {i} of {len(config.models)} ──", flush=True)
        run = folder / model
        if not (run / RESULT).exists():
            write_json(run / CONFIG, asdict(trainings[model]))
        arguments = [str(run), *(["--resume"] if resume else [])]
        if run_module("memformers.training", *arguments, environment={DASHBOARD: dashboard}):
            failed.append(model)
    if len(failed) == len(config.models):
        raise UserError(f"no training ended well, so there is nothing to report; see {folder}.")
    with monit.section("Report"):
        report = write_report(folder)  # before the probe too, whatever that meets
    try:
        probe(folder, ProbeConfig(positions=PROBED), choose_device(config.train.device))
        report = write_report(folder)
    except ValueError as error:
        print(f"NOTE: not probed: {error}")
    if failed:
        raise UserError(f"the training of {', '.join(failed)} failed; the others are in {report}.")
    print_links(ids, dashboard)
    return report


def plan_runs(models: tuple[ModelName, ...], folder: Path) -> dict[ModelName, str]:
    """Folders for the runs, and the ids by which a dashboard will know them as one group: under one
    comment, the first model compared with the second, and each other one with the first."""
    cards = {model: folder / model / CARD for model in models}
    ids = {m: read_json(card)["run"] if card.exists() else new_run_id() for m, card in cards.items()}
    for model in models:
        (folder / model).mkdir(exist_ok=True)
        other = next((ids[m] for m in models if m != model), "")
        if not cards[model].exists():  # one that is resumed keeps its own
            plan_run(folder / model, ids[model], f"comparison {folder.resolve().name}", other)
    return ids


def print_links(ids: dict[ModelName, str], dashboard: str) -> None:
    """Say where labml's comparison shows the runs, each beside the first, if a dashboard runs."""
    page = dashboard_page(dashboard)
    first, *others = ids
    for model in others if page else ():
        print(f"dashboard: {page}/run/{ids[model]}/compare  ({model} beside {first})", flush=True)


def pin_corpus(corpus: Corpus, folder: Path) -> str:
    """What each training is to load so that all get this very corpus, whatever the network or a
    cache would give them: a word for the built-in play, else a file."""
    if corpus.is_stand_in:
        return STAND_IN
    if corpus.is_builtin:
        return BUILTIN
    if not Path(corpus.source).is_file():
        with replacing(folder / "corpus.txt") as temporary:
            temporary.write_bytes(bytes_of(corpus.text))  # as text, some systems would change its lines
        return str((folder / "corpus.txt").resolve())
    return str(Path(corpus.source).resolve())
