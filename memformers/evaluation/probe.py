"""How much memory helps the models of a comparison, measured from its checkpoints."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_fields
from memformers.common.files import write_json
from memformers.common.intervals import Mean
from memformers.common.progress import Progress
from memformers.convert.load import load_checkpoint
from memformers.data.dataset import TokenDataset
from memformers.data.sources import CorpusSpec
from memformers.data.streams import streams_and_places
from memformers.data.tokenize_corpus import BIG, dataset_of
from memformers.evaluation.attention_distribution import attention_distribution, check_long_enough
from memformers.evaluation.context import effective_context
from memformers.evaluation.frequency_buckets import NO_WORD, WORD, word_counts, word_occurrences
from memformers.evaluation.memory_ablation import memory_ablation
from memformers.runs.folder import PROBE, flatten
from memformers.runs.reader import Run, newest_checkpoint, read_runs

MOST_TOKENS = 4_000_000
"""Of the held-out text of a folder of tokens that are probed."""


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
    and distance, and how much each part of its memory helps; null for the last where the text is too short.
    Documents are read each from an empty memory, and of them each of the three is null where they are too
    short. Runs without a checkpoint are left out; of several seeds, the first of each arm is measured.

    Raises ValueError for a folder without any, for a text too short, and for runs on different texts or with
    different vocabularies.
    """
    found, runs = read_runs(folder), dict[str, Run]()
    for run in found:
        if newest_checkpoint(run.folder):
            runs.setdefault(run.arm, run)
    if not runs:
        raise UserError(f"no run in {folder} has a checkpoint; train at least until the first evaluation.")
    if left_out := sorted({run.arm for run in found} - runs.keys()):
        warnings.warn(f"not probed, since there is no checkpoint of it: {', '.join(left_out)}.", stacklevel=2)
    corpus = common_corpus(list(runs.values()))
    loaded = {run.folder.name: load_checkpoint(run.folder, device) for run in runs.values()}
    models = {name: model for name, (model, _) in loaded.items()}
    first, *others = (tokenizer.to_json() for _, tokenizer in loaded.values())
    if any(other != first for other in others):
        raise UserError("these runs divide the text into different tokens; probe each run alone.")
    tokens, documents = held_out_tokens(corpus)
    # A single document is part of one that was cut like a plain text.
    documents = documents if len(documents) > 1 else ()
    if not documents:
        for model in models.values():
            check_long_enough(model, tokens, config.streams)
    context = None
    if not documents or streams_and_places(documents)[1].median() >= 2 * config.step:
        how = {name: getattr(config, name) for name in ("step", "positions", "longest")}
        with Progress(unit="tok", unit_scale=True, desc="probing contexts") as bar:
            context = effective_context(models, tokens, **how, documents=documents, progress=bar.update)
    occurrences = occurrences_in(corpus, tokens, documents)
    with Progress(unit="tok", unit_scale=True, desc="probing memory") as bar:
        ablation = memory_ablation(
            models, tokens, occurrences, tokens=config.tokens, documents=documents, progress=bar.update
        )
    attention = {
        name: attention_distribution(model, tokens, documents=documents, streams=config.streams)
        for name, model in models.items()
    }
    results = {
        "checkpoints": {run.folder.name: newest_checkpoint(run.folder) for run in runs.values()},
        "documents": len(documents),
        "effective_context": context,
        "attention": attention if all(attention.values()) else None,
        "memory_ablation": ablation,
    }
    write_json(folder / PROBE, results)
    return folder / PROBE


def findings(probed: Mapping[str, Any]) -> list[str]:
    """What the contents of ``probe.json`` say about each part of each model's memory."""
    if not (ablation := probed["memory_ablation"]):
        return ["The held-out text is too short to measure how much memory helps."]
    lines = []
    for run, costs in ablation["overall"]["less_untouched"].items():
        for part, name in {"slots": "slots", "memory": "positions"}.items():
            if f"{part} zeroed" not in costs:
                continue
            found = [Mean.from_json(costs[f"{part} {how}"]) for how in ("zeroed", "swapped")]
            uses = all(cost.mean > cost.half_width for cost in found)
            zeroed, swapped = (f"{cost.mean / math.log(2):.4f}" for cost in found)
            lines += [
                f"{run} {'uses' if uses else 'is not seen to use'} its {name}:",
                f"  zeroing them costs {zeroed} bits per token, swapping them {swapped}",
            ]
    return lines or ["No model here has a memory."]


def held_out_tokens(corpus: TokenDataset) -> tuple[Tensor, tuple[int, ...]]:
    """The held-out text, int64 ``[n]``, and how many tokens each of its documents has; of a large one at most
    [`MOST_TOKENS`][]."""
    split = corpus.validation
    most = MOST_TOKENS if isinstance(split.tokens, np.memmap) else len(split.tokens)
    ends = split.documents.cumsum()
    documents = split.documents[ends <= max(most, ends[0])] if len(ends) else ends
    tokens = split.tokens[: documents.sum() if len(ends) else most]
    return torch.from_numpy(tokens.astype(np.int64)), tuple(documents.tolist())


def occurrences_in(corpus: TokenDataset, tokens: Tensor, documents: Sequence[int]) -> Tensor:
    """How often the word of each of the held-out ``tokens`` occurs in training, int64 ``[n]``; no word of
    ``documents``, given by their numbers of tokens, goes on in the next one. Where tokens are words,
    subwords or ids, and in a large text, how often the token itself occurs, and [`NO_WORD`][] for one without
    a letter."""
    tokenizer, train = corpus.tokenizer, corpus.train
    if tokenizer.name not in ("character", "byte") or len(train.tokens) >= BIG:
        found = torch.zeros(tokenizer.vocab_size, dtype=torch.int64)
        for at in range(0, len(train.tokens), MOST_TOKENS):
            part = np.bincount(train.tokens[at : at + MOST_TOKENS], minlength=len(found))
            found += torch.from_numpy(part)
        for token in tokens.unique():
            if not WORD.search(tokenizer.decode(token[None])):
                found[token] = NO_WORD
        return found[tokens]

    def texts(ids: Tensor, lengths: Sequence[int]) -> list[str]:
        parts = ids.split(list(lengths) or len(ids))
        return [tokenizer.bytes_of(part).decode("utf-8", errors="surrogateescape") for part in parts]

    trained_on = texts(torch.from_numpy(train.tokens.astype(np.int64)), train.documents.tolist())
    counts, of_bytes = word_counts("\n".join(trained_on)), tokenizer.name == "byte"
    return torch.cat([word_occurrences(text, counts, of_bytes=of_bytes) for text in texts(tokens, documents)])


def common_corpus(runs: Sequence[Run]) -> TokenDataset:
    """The text that all runs were trained on, as it was then; else ValueError."""
    first = runs[0].config
    fields = ("data", "validation", "test", "document_separator", "text_field", "tokenizer")
    known = {name.rpartition(".")[2]: value for name, value in flatten(first)}
    given = {name: known[name] for name in fields if name in known}  # earlier versions have fewer
    corpus = dataset_of(CorpusSpec(**given, vocab_size=first["model"]["vocab_size"]))
    for run in runs:
        before, now = run.facts["corpus"], corpus.info
        if before["sha256"] != now.sha256:
            raise UserError(
                f"{run.folder} was trained on {before['source']} with sha256 {before['sha256']}, but "
                f"{now.source} has {now.sha256}; probe only runs on the same text together, and restore the "
                f"text if it was changed."
            )
    return corpus
