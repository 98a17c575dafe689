"""Several arms trained alike, one after the other, and the report that sets them side by side."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from labml import monit

from memformers.common.command_line import command_as_given
from memformers.common.errors import TrainingsFailed, UserError
from memformers.common.files import config_from_dict, read_json, replacing, write_json
from memformers.common.machine import choose_device
from memformers.common.processes import run_module
from memformers.data.corpora import BUILTIN, STAND_IN, Corpus, load_corpus
from memformers.data.texts import bytes_of
from memformers.evaluation.probe import ProbeConfig, probe
from memformers.models.config import ModelConfig, ModelName
from memformers.report.document import write_report
from memformers.runs.folder import (
    CARD,
    COMPARISON,
    CONFIG,
    OF_A_COMPARISON,
    RESULT,
    check_named,
    check_nothing_is_lost,
    new_run_id,
    plan_run,
)
from memformers.runs.plan import Plan, Planned, PlannedArm, baseline_of, compared_with, read_plan, runs_of
from memformers.tracking.discovery import (
    DASHBOARD,
    find_dashboard,
    has_run,
    page_address,
    sent_to,
    show_comparison,
)
from memformers.training.arms import arms_of_models, check_arms, read_arms, training_of
from memformers.training.config import TrainConfig
from memformers.training.distributed import with_precision
from memformers.training.resume import alone_in, check_same_config, check_same_corpus, differences

PROBED, LONGEST, WITH_CHANGES = 200, 192, 12_288
"""Tokens that are predicted with each context when a comparison is probed, the longest context, and tokens
that are predicted with each part of the memory changed, so that it takes seconds."""


MEMORIES = ModelConfig(mem_len=32, c_mem_len=32)
"""Positions and slots that the Compressive Transformer has in a comparison if nothing else is asked for. With
equal keys, Transformer-XL then remembers 64 positions, which is better than 128 in the same time
(docs/results/recipes)."""


@dataclass(frozen=True)
class CompareConfig:
    """A comparison: the same training for each arm, from each seed."""

    train: TrainConfig = field(default_factory=lambda: TrainConfig(model=MEMORIES))
    """What all arms share."""
    models: tuple[ModelName, ...] = ("transformer", "transformer-xl", "compressive")
    """The models to train, in this order; each is an arm with the name of the model."""
    arms: tuple[str, ...] = ()
    """Other arms in addition to the models: a name and the settings that differ, such as
    "long: model=transformer-xl mem_len=320"; or a file with one arm per line."""
    equal_keys: bool = True
    """Whether Transformer-XL's memory is as long as the Compressive Transformer's memory and compressed
    memory together, so that both attend to equally many keys."""
    seeds: int = 1
    """How many seeds each arm is trained from: seed, seed + 1 and so on. Intervals need at least 2."""
    scale: float = 1.0
    """Multiplies the number of tokens of each arm: 0.1 for a short trial, 10 for a long comparison."""

    def __post_init__(self) -> None:
        """Raise ValueError, saying what doesn't fit."""
        if not 0.0 < self.scale < math.inf:
            raise UserError(f"scale={self.scale} must be a finite number above 0.")
        if len(set(self.models)) < len(self.models):
            raise UserError(f"models={' '.join(self.models)} must name each model once.")
        if self.seeds < 1:
            raise UserError(f"seeds={self.seeds} is too small; use at least 1.")
        if self.train.model.model != TrainConfig().model.model:
            raise UserError("a comparison trains several models; name them with models, not model.")
        if self.train.parallel != "single":
            raise UserError(
                f"parallel={self.train.parallel!r} can't be used in a comparison, which starts its trainings "
                f"one by one; train each with torchrun, and compare them with memformers report."
            )
        check_arms(self.planned_arms(), self.shared)

    @property
    def shared(self) -> TrainConfig:
        """The training that all arms share, of the first seed."""
        return replace(self.train, tokens=max(round(self.train.tokens * self.scale), 1))

    def planned_arms(self, beside: Sequence[str] = ()) -> list[PlannedArm]:
        """The arms; ``beside`` are names of models that are in the comparison already."""
        equal_keys = self.equal_keys and "compressive" in (*beside, *self.models)
        return arms_of_models(self.models, self.train, equal_keys) + read_arms(self.arms, self.shared)


def compare(
    config: CompareConfig, folder: Path, dashboard: str = "", *, resume: bool = False, probed: bool = True
) -> Path:
    """Train every arm from every seed, each into a sub-folder of ``folder``, probe them, unless ``probed`` is
    false, and write the report; returns its page.

    With ``resume``, trainings that were stopped go on, finished ones are left alone, and arms and seeds that
    ``folder`` doesn't have are added to those that it has.

    A training that fails doesn't stop the others: the report is written, and says so. Raises
    ValueError for a folder that already holds runs (with ``resume``: of other settings) and for what no
    training could start from, [`memformers.common.errors.TrainingsFailed`][] when a training failed.
    """
    check_named(folder)
    if not resume:
        if (folder / COMPARISON).exists() or next(folder.glob(f"*/{CONFIG}"), None):
            raise UserError(
                f"{folder} already holds runs; name a new folder for this comparison, or resume it."
            )
        check_nothing_is_lost(folder, OF_A_COMPARISON)
    dashboard = find_dashboard(dashboard)
    corpus = load_corpus(config.train.data, config.train.document_separator)
    config = in_one_precision(config, folder)
    plan = united(config, folder)
    trainings = trainings_of(plan, config.train)
    for name, training in trainings.items():
        check_same_corpus(corpus, folder / name)
        check_same_config(training, folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder):
        data = pin_corpus(corpus, folder, config.train.document_separator)
        trainings = {name: replace(training, data=data) for name, training in trainings.items()}
        write_json(folder / COMPARISON, asdict(plan))
        ids = plan_runs(plan.runs, folder)
        show_comparison(folder, dashboard)
        failed = train_all(trainings, folder, dashboard, resume)
        if not any((folder / name / RESULT).exists() for name in trainings):
            raise TrainingsFailed(f"no training ended well, so there is nothing to report; see {folder}.")
        try:
            if probed:
                probe_models(config, folder)
        finally:  # whatever the probe met
            with monit.section("Report"):
                report = write_report(folder)
    if failed:
        raise TrainingsFailed(f"the training of {', '.join(failed)} failed; the others are in {report}.")
    show_comparison(folder, dashboard)
    print_links(plan.runs, ids, dashboard)
    return report


def probe_models(config: CompareConfig, folder: Path) -> None:
    """Probe what was trained; where that can't be, say so."""
    try:
        device = choose_device(config.train.device)
        probe(folder, ProbeConfig(positions=PROBED, longest=LONGEST, tokens=WITH_CHANGES), device)
    except ValueError as error:
        print(f"NOTE: not probed: {error}")


def in_one_precision(config: CompareConfig, folder: Path) -> CompareConfig:
    """``config`` with a precision that all arms share, if it leaves it open: that of the comparison in
    ``folder``, if there is one, or what the device computes fastest."""
    saved, train = read_plan(folder), config.train
    if saved and train.precision == "auto":
        train = replace(
            train, precision=config_from_dict(TrainConfig, saved.train, str(folder / COMPARISON)).precision
        )
    return replace(config, train=with_precision(train, choose_device(train.device)))


def united(config: CompareConfig, folder: Path) -> Plan:
    """What ``config`` asks for, and what the comparison in ``folder`` was begun for, if there is one;
    ValueError for one of other settings."""
    saved = read_plan(folder) or Plan(asdict(config.shared), ())
    before = config_from_dict(TrainConfig, saved.train, str(folder / COMPARISON))
    if changes := differences(asdict(before), asdict(config.shared)):
        raise UserError(
            f"{folder} is a comparison with other settings: {changes}. Leave them out, or name a new folder."
        )
    arms = {arm.name: arm for arm in saved.arms}
    for arm in config.planned_arms(beside=list(arms)):
        old, new = (training_of(a, config.shared) for a in (arms.setdefault(arm.name, arm), arm))
        if changes := differences(asdict(old), asdict(new)):
            raise UserError(
                f"{folder} has an arm {arm.name} with other settings: {changes}. Give it another name, or "
                f"name a new folder. (In a comparison with the Compressive Transformer, Transformer-XL's "
                f"memory is longer, unless --no-equal-keys is given.)"
            )
    check_arms(list(arms.values()), config.shared)
    seeds = max(config.seeds, len({run.seed for run in saved.runs.values()}))
    first = config.train.seed
    runs = runs_of(list(arms), range(first, first + seeds))
    commands = tuple(dict.fromkeys((*saved.commands, command_as_given())))
    return Plan(saved.train, tuple(arms.values()), runs, commands)


def trainings_of(plan: Plan, train: TrainConfig) -> dict[str, TrainConfig]:
    """Each run's training, by the run's name; of settings that a resumed training may have otherwise, those
    of ``train``."""
    shared = replace(train, tokens=plan.train["tokens"])
    arms = {arm.name: training_of(arm, shared) for arm in plan.arms}
    return {name: replace(arms[run.arm], seed=run.seed) for name, run in plan.runs.items()}


def train_all(trainings: dict[str, TrainConfig], folder: Path, dashboard: str, resume: bool) -> list[str]:
    """Run what isn't finished, one after the other; returns the names of those that failed."""
    failed = []
    for i, (name, training) in enumerate(trainings.items(), 1):
        run = folder / name
        if (run / RESULT).exists():
            print(f"{i} of {len(trainings)}: {name} is finished", flush=True)
            continue
        print(f"\n── {i} of {len(trainings)}: {name} ──", flush=True)
        write_json(run / CONFIG, asdict(training))
        arguments = [str(run), *(["--resume"] if resume else [])]
        if run_module("memformers.training", *arguments, environment={DASHBOARD: dashboard}):
            failed.append(name)
    return failed


def plan_runs(runs: Mapping[str, Planned], folder: Path) -> dict[str, str]:
    """Folders for the runs, and the ids by which a dashboard will know them as one group: under one comment,
    each compared with the baseline of its seed."""
    cards = {name: folder / name / CARD for name in runs}
    ids = {n: read_json(card)["run"] if card.exists() else new_run_id() for n, card in cards.items()}
    for name in runs:
        (folder / name).mkdir(parents=True, exist_ok=True)
        other = ids.get(compared_with(runs, name), "")
        if not cards[name].exists():  # one that is resumed keeps its own
            plan_run(folder / name, ids[name], f"comparison {folder.resolve().name}", other, name)
    return ids


def print_links(runs: Mapping[str, Planned], ids: Mapping[str, str], dashboard: str) -> None:
    """Print where labml's comparison shows the arms of the first seed, each with the baseline, if a
    dashboard runs that has both."""
    api = sent_to(dashboard)
    first = next(iter(runs.values())).seed
    names = [name for name, run in runs.items() if run.seed == first]
    known = [name for name in names if api and has_run(api, ids[name])]
    base = baseline_of(names)
    for name in known if base in known else ():
        if name != base:
            link = f"{page_address(api)}/run/{ids[name]}/compare"
            print(f"dashboard: {link}  ({name} beside {base})", flush=True)


def pin_corpus(corpus: Corpus, folder: Path, document_separator: str = "") -> str:
    """The corpus for each training to load, with the ``document_separator``, so that all read the same one,
    whatever the network or a cache contains: a word for the built-in play, otherwise a file or folder."""
    if corpus.is_stand_in:
        return STAND_IN
    if corpus.is_builtin:
        return BUILTIN
    if not Path(corpus.source).exists():
        documents = corpus.documents_between(0, len(corpus.text))
        text = "".join(f"{document}{document_separator}" for document in documents) or corpus.text
        with replacing(folder / "corpus.txt") as temporary:
            temporary.write_bytes(bytes_of(text))  # as text, some systems would change its lines
        return str((folder / "corpus.txt").resolve())
    return str(Path(corpus.source).resolve())
