"""How much memory helps the models of trained runs, on the held-out text that they were trained beside."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from memformers.common.console import Progress
from memformers.common.errors import UserError
from memformers.common.files import write_json
from memformers.data.dataset import TokenDataset
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import dataset_of
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER
from memformers.evaluation.controls import memory_ablation
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import PROBE, flatten
from memformers.runs.load import load_checkpoint
from memformers.runs.reader import Run, newest_checkpoint, read_runs

MAX_TOKENS = 4_000_000
"""Of the held-out text of a folder of tokens that are read."""
TEXT_SETTINGS = (
    "data", "validation", "test", "document_separator", "document_end", "text_field", "tokenizer",
)  # fmt: skip
"""The settings of a run that say what it reads."""


def probe(folder: Path, tokens: int, device: torch.device, **moved: str) -> Path:
    """Measure how much memory helps the models in ``folder``, a run's or a comparison's, on about ``tokens``
    tokens of their held-out text, and write the checkpoints and the
    [`MemoryAblation`][memformers.evaluation.controls.MemoryAblation] into its ``probe.json``; returns the
    path. ``moved`` is as in [`common_corpus`][]. Of several seeds, the first of each arm that has a
    checkpoint is measured.

    Raises UserError where there is no checkpoint, and for runs on different texts or with different
    vocabularies.
    """
    # The runs, and their models.
    runs: dict[str, Run] = {}
    for run in read_runs(folder):
        if newest_checkpoint(run.folder):
            runs.setdefault(run.arm, run)
    if not runs:
        raise UserError(f"no run in {folder} has a checkpoint; train at least until the first evaluation.")
    models: dict[str, MemoryLM] = {}
    tokenizers: list[Tokenizer] = []
    checkpoints = {}
    for run in runs.values():
        checkpoints[run.folder.name] = newest_checkpoint(run.folder)
        models[run.folder.name], tokenizer = load_checkpoint(run.folder, device)
        tokenizers.append(tokenizer)

    # The text that all of them read.
    corpus = common_corpus(list(runs.values()), tokenizers[0], **moved)
    if any(tokenizer.to_json() != tokenizers[0].to_json() for tokenizer in tokenizers):
        raise UserError("these runs have different tokenizers; probe each run alone.")
    text, documents = held_out_tokens(corpus)
    if len(documents) == 1:  # it is part of one that was cut like a plain text
        documents = ()

    # The measurement.
    with Progress(unit="tok", unit_scale=True, desc="probing memory") as bar:
        ablation = memory_ablation(models, text, tokens=tokens, documents=documents, progress=bar.update)
    write_json(folder / PROBE, {"checkpoints": checkpoints, "memory_ablation": ablation})
    return folder / PROBE


def held_out_tokens(corpus: TokenDataset) -> tuple[Tensor, tuple[int, ...]]:
    """The held-out text, int64 ``[n]``, and the length of each document."""
    split = corpus.validation
    n_tokens = MAX_TOKENS if isinstance(split.tokens, np.memmap) else len(split.tokens)
    documents = split.documents
    if len(documents):  # whole ones, and at least the first
        ends = documents.cumsum()
        documents = documents[ends <= max(n_tokens, ends[0])]
        n_tokens = documents.sum()
    return torch.from_numpy(split.tokens[:n_tokens].astype(np.int64)), tuple(documents.tolist())


def common_corpus(runs: Sequence[Run], subwords: Tokenizer | None = None, **moved: str) -> TokenDataset:
    """The text that all ``runs`` were trained on, its ``data``, ``validation`` and ``test`` now where these
    say if they were ``moved``; UserError if it has changed since, or differs between runs. The ``subwords``
    that they have learned from it are not learned again."""
    first = runs[0]
    settings = {}
    for dotted, value in flatten(first.config):
        name = dotted.rpartition(".")[2]
        if name in TEXT_SETTINGS:  # earlier versions have fewer
            settings[name] = value
    settings |= {name: path for name, path in moved.items() if path}
    tokenizer = first.folder / TOKENIZER
    if tokenizer.is_file():  # one that was not made from the text
        settings["tokenizer"] = str(tokenizer)
    vocab_size = first.config["model"]["vocab_size"]
    known_subwords = subwords if settings["tokenizer"] == "bpe" else None
    corpus = dataset_of(CorpusSpec(**settings, vocab_size=vocab_size, subwords=known_subwords))
    for run in runs:
        trained_on = run.facts["corpus"]
        if trained_on["sha256"] != corpus.info.sha256:
            raise UserError(
                f"{run.folder} was trained on {trained_on['source']} with sha256 {trained_on['sha256']}, but "
                f"{corpus.info.source} now has {corpus.info.sha256}; name the text that it was trained on "
                f"with --data, and measure runs on different texts one by one."
            )
    return corpus
