"""What memory is worth to the models of a comparison, measured from its checkpoints."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from memformers.common.errors import UserError
from memformers.common.files import write_json
from memformers.data.corpora import Corpus, load_corpus
from memformers.evaluation.attention_mass import attention_mass, check_long_enough
from memformers.evaluation.context import effective_context
from memformers.evaluation.rarity import word_occurrences
from memformers.evaluation.worth import worth
from memformers.pretrained.own import load_checkpoint
from memformers.runs.finished import FinishedRun, newest_checkpoint, one_of_each_arm, read_runs
from memformers.runs.folder import PROBE


@dataclass(frozen=True)
class ProbeConfig:
    """How much to measure."""

    step: int = 32
    """The difference in length between two contexts, in tokens (Δ)."""
    positions: int = 1000
    """How many tokens of the held-out text are predicted with each context."""
    longest: int = 2048
    """The longest context, in tokens."""
    streams: int = 8
    """Parallel streams in which the held-out text is read for attention."""
    tokens: int = 65_536
    """About how many tokens of the held-out text are predicted with the unchanged memory and with each
    changed part of it; more tokens give narrower intervals."""

    def __post_init__(self) -> None:
        """Raise ValueError, saying what doesn't fit."""
        for name in ("step", "positions", "streams", "tokens"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} is too small; use at least 1.")
        if self.longest < 2 * self.step:
            raise UserError(
                f"longest={self.longest} is too small to compare contexts that are {self.step} tokens apart; "
                f"use {2 * self.step} or more."
            )


def probe(folder: Path, config: ProbeConfig, device: torch.device) -> Path:
    """Measure the models in ``folder``, a run's or a comparison's, on their held-out text, and write
    ``probe.json`` into it; returns its path.

    It holds the checkpoints that were measured, the effective context of each model, its attention by place
    and distance, and what each part of its memory is worth; null for the last where the text is too short.
    Runs without a checkpoint are left out; of several seeds, the first of each arm is measured.

    Raises ValueError for a folder without any, for a text too short, and for runs on different texts or with
    different vocabularies.
    """
    runs = one_of_each_arm([run for run in read_runs(folder) if has_checkpoint(run.folder)])
    if not runs:
        raise UserError(f"no run in {folder} has a checkpoint; train at least until the first evaluation.")
    corpus = common_corpus(runs)
    loaded = {run.folder.name: load_checkpoint(run.folder, device) for run in runs}
    models = {name: model for name, (model, _) in loaded.items()}
    tokens = common_tokens([tokenizer.encode(corpus.validation_text) for _, tokenizer in loaded.values()])
    for model in models.values():
        check_long_enough(model, tokens, config.streams)
    with tqdm(unit="tok", unit_scale=True, desc="probing contexts") as bar:
        context = effective_context(
            models,
            tokens,
            step=config.step,
            positions=config.positions,
            longest=config.longest,
            progress=bar.update,
        )
    occurrences = word_occurrences(corpus.validation_text, corpus.train_text, len(tokens))
    with tqdm(unit="tok", unit_scale=True, desc="probing memory") as bar:
        found = worth(models, tokens, occurrences, tokens=config.tokens, progress=bar.update)
    results: dict[str, Any] = {
        "checkpoints": {run.folder.name: newest_checkpoint(run.folder) for run in runs},
        "effective_context": asdict(context),
        "attention": {
            name: asdict(attention_mass(model, tokens, streams=config.streams))
            for name, model in models.items()
        },
        "worth": asdict(found) if found else None,
    }
    write_json(folder / PROBE, results)
    return folder / PROBE


def has_checkpoint(folder: Path) -> bool:
    """Whether a run came far enough to leave a model."""
    return bool(newest_checkpoint(folder)) or (folder / "model.safetensors").is_file()


def common_corpus(runs: Sequence[FinishedRun]) -> Corpus:
    """The text that all runs were trained on, as it was then; else ValueError."""
    first = runs[0]
    corpus = load_corpus(first.config["data"], first.config.get("document_separator", ""))
    for run in runs:
        if run.facts["corpus"]["sha256"] != corpus.sha256:
            raise UserError(
                f"{run.folder} was trained on {run.facts['corpus']['source']} with sha256 "
                f"{run.facts['corpus']['sha256']}, but {corpus.source} has {corpus.sha256}; probe only runs "
                f"on the same text together, and restore the text if it was changed."
            )
    return corpus


def common_tokens(texts: Sequence[Tensor]) -> Tensor:
    """The held-out text in tokens ``[n]``, which must be the same for all; else ValueError."""
    if any(not torch.equal(text, texts[0]) for text in texts):
        raise UserError("these runs divide the text into different tokens; probe each run alone.")
    return texts[0]
