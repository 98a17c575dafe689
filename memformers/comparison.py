"""Several models trained alike, one after the other, and the report that sets them side by side."""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from labml import monit

from memformers.data.corpora import BUILTIN, STAND_IN, Corpus, load_corpus
from memformers.files import write_json
from memformers.language_model import ModelName
from memformers.processes import run_module
from memformers.report import CONFIG, write_report
from memformers.tracking import LABML_URL, find_dashboard
from memformers.training.config import TrainConfig


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
            raise ValueError(f"scale={self.scale} must be above 0, and finite.")
        if not self.models or len(set(self.models)) < len(self.models):
            raise ValueError(f"models={self.models} must name each model once, and at least one.")
        if self.train.model.model != TrainConfig().model.model:
            raise ValueError("a comparison trains several models; name them with models, not model.")

    def run_config(self, model: ModelName) -> TrainConfig:
        """The training of one of the models."""
        network = replace(self.train.model, model=model)
        return replace(self.train, model=network, tokens=max(round(self.train.tokens * self.scale), 1))


def compare(config: CompareConfig, folder: Path, dashboard: str = "") -> Path:
    """Train every model into a sub-folder of ``folder`` and write the report; returns its page.

    A model whose training fails doesn't stop the others: the report is written, and says so. Raises
    ValueError for a folder that already holds runs, for what no training could start from, and when
    a training failed.
    """
    if next(folder.glob(f"*/{CONFIG}"), None):
        raise ValueError(f"{folder} already holds runs; name a new folder for this comparison.")
    address = find_dashboard(dashboard)
    corpus = load_corpus(config.train.data)
    folder.mkdir(parents=True, exist_ok=True)
    data = pin_corpus(corpus, folder)
    failed = []
    for i, model in enumerate(config.models, 1):
        print(f"\n── {i} of {len(config.models)} ──", flush=True)
        run = folder / model
        run.mkdir(exist_ok=True)
        write_json(run / CONFIG, asdict(replace(config.run_config(model), data=data)))
        if run_module("memformers.training", str(run), environment={LABML_URL: address}):
            failed.append(model)
    if len(failed) == len(config.models):
        raise ValueError(f"no training ended well, so there is nothing to report; see {folder}.")
    with monit.section("Report"):
        report = write_report(folder)
    if failed:
        raise ValueError(f"the training of {', '.join(failed)} failed; the others are in {report}.")
    return report


def pin_corpus(corpus: Corpus, folder: Path) -> str:
    """What each training is to load so that all get this very corpus, whatever the network or a
    cache would give them: a word for the built-in play, else a file."""
    if corpus.is_stand_in:
        return STAND_IN
    if corpus.is_builtin:
        return BUILTIN
    if not Path(corpus.source).is_file():
        (folder / "corpus.txt").write_bytes(corpus.text.encode("utf-8"))
        return str((folder / "corpus.txt").resolve())
    return str(Path(corpus.source).resolve())
