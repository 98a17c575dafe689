"""What memory is worth to the models of a comparison, measured from its checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_fields
from memformers.common.files import write_json
from memformers.data.corpora import Corpus, load_corpus
from memformers.data.streams import streams_and_places
from memformers.evaluation.attention_mass import attention_mass, check_long_enough
from memformers.evaluation.context import effective_context
from memformers.evaluation.memory_ablation import memory_ablation
from memformers.evaluation.token_groups import word_occurrences
from memformers.pretrained.own import load_checkpoint
from memformers.runs.finished import FinishedRun, newest_checkpoint, one_of_each_arm, read_runs
from memformers.runs.folder import PROBE


@dataclass(frozen=True)
class ProbeConfig:
    """How much to measure."""

    step: Count = 32
    """The difference in length between two contexts, in tokens (Δ)."""
    positions: Count = 1000
    """How many tokens of the held-out text are predicted with each context."""
    longest: int = 2048
    """The longest context, in tokens."""
    streams: Count = 8
    """Parallel streams in which the held-out text is read for attention."""
    tokens: Count = 65_536
    """About how many tokens of the held-out text are predicted with the unchanged memory and with each
    changed part of it; more tokens give narrower intervals."""

    def __post_init__(self) -> None:
        """Raise ValueError, saying what doesn't fit."""
        check_fields(self)
        if self.longest < 2 * self.step:
            raise UserError(
                f"expected longest to be at least {2 * self.step}, to compare contexts that are {self.step} "
                f"tokens apart, got {self.longest}."
            )


def probe(folder: Path, config: ProbeConfig, device: torch.device) -> Path:
    """Measure the models in ``folder``, a run's or a comparison's, on their held-out text, and write
    ``probe.json`` into it; returns its path.

    It holds the checkpoints that were measured, the effective context of each model, its attention by place
    and distance, and what each part of its memory is worth; null for the last where the text is too short.
    Documents are read each from an empty memory, and of them each of the three is null where they are too
    short. Runs without a checkpoint are left out; of several seeds, the first of each arm is measured.

    Raises ValueError for a folder without any, for a text too short, and for runs on different texts or with
    different vocabularies.
    """
    trained = [
        run
        for run in read_runs(folder)
        if newest_checkpoint(run.folder) or (run.folder / "model.safetensors").is_file()
    ]
    runs = one_of_each_arm(trained)
    if not runs:
        raise UserError(f"no run in {folder} has a checkpoint; train at least until the first evaluation.")
    corpus = common_corpus(runs)
    loaded = {run.folder.name: load_checkpoint(run.folder, device) for run in runs}
    models = {name: model for name, (model, _) in loaded.items()}
    tokenizers = [tokenizer for _, tokenizer in loaded.values()]
    tokens, *others = [tokenizer.encode(corpus.validation_text) for tokenizer in tokenizers]
    if any(not torch.equal(tokens, other) for other in others):
        raise UserError("these runs divide the text into different tokens; probe each run alone.")
    texts = corpus.validation_documents
    # A single document is part of one that was cut like a plain text.
    documents = tuple(len(tokenizers[0].encode(text)) for text in texts) if len(texts) > 1 else ()
    if not documents:
        for model in models.values():
            check_long_enough(model, tokens, config.streams)
    context = None
    if not documents or streams_and_places(documents)[1].median() >= 2 * config.step:
        with tqdm(unit="tok", unit_scale=True, desc="probing contexts") as bar:
            context = effective_context(
                models,
                tokens,
                step=config.step,
                positions=config.positions,
                longest=config.longest,
                documents=documents,
                progress=bar.update,
            )
    occurrences = occurrences_in(corpus, len(tokens), documents)
    with tqdm(unit="tok", unit_scale=True, desc="probing memory") as bar:
        found = memory_ablation(
            models, tokens, occurrences, tokens=config.tokens, documents=documents, progress=bar.update
        )
    attention = {
        name: attention_mass(model, tokens, documents=documents, streams=config.streams)
        for name, model in models.items()
    }
    results = {
        "checkpoints": {run.folder.name: newest_checkpoint(run.folder) for run in runs},
        "documents": len(documents),
        "effective_context": context,
        "attention": attention if all(attention.values()) else None,
        "memory_ablation": found,
    }
    write_json(folder / PROBE, results)
    return folder / PROBE


def occurrences_in(corpus: Corpus, n_tokens: int, documents: Sequence[int]) -> Tensor:
    """How often the word of each of the ``n_tokens`` of the held-out text occurs in training, int64 ``[n]``;
    no word of ``documents``, given by their numbers of tokens, goes on in the next one."""
    if not documents:
        return word_occurrences(corpus.validation_text, corpus.train_text, n_tokens)
    held_out, trained_on = "\n".join(corpus.validation_documents), "\n".join(corpus.train_documents)
    found = word_occurrences(held_out, trained_on, n_tokens + len(documents) - 1)
    parts = found.split([length + 1 for length in documents[:-1]] + [documents[-1]])
    return torch.cat([part[:length] for part, length in zip(parts, documents, strict=True)])


def common_corpus(runs: Sequence[FinishedRun]) -> Corpus:
    """The text that all runs were trained on, as it was then; else ValueError."""
    first = runs[0]
    corpus = load_corpus(first.config["data"], first.config["document_separator"])
    for run in runs:
        if run.facts["corpus"]["sha256"] != corpus.sha256:
            raise UserError(
                f"{run.folder} was trained on {run.facts['corpus']['source']} with sha256 "
                f"{run.facts['corpus']['sha256']}, but {corpus.source} has {corpus.sha256}; probe only runs "
                f"on the same text together, and restore the text if it was changed."
            )
    return corpus
