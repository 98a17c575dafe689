"""The text of a training: found, checked, and described for the run's files."""

import contextlib
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.files import check_manifest, numbered, user_path
from memformers.data import VALIDATION
from memformers.data.dataset import DatasetInfo, TokenDataset
from memformers.data.sources import CorpusSpec
from memformers.data.streams import check_length
from memformers.data.tokenize_corpus import dataset_of
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER, load_tokenizer, save_tokenizer
from memformers.evaluation.units import LOSES_TEXT
from memformers.runs.folder import CHECKPOINTS
from memformers.runs.reader import read_facts
from memformers.training.config import TrainConfig
from memformers.training.distributed import Distributed


def spec_of(config: TrainConfig) -> CorpusSpec:
    text = asdict(config.text)
    return CorpusSpec(config.data, tokenizer=config.tokenizer, vocab_size=config.model.vocab_size, **text)


def find_text(config: TrainConfig, folder: Path | None = None) -> TokenDataset:
    """The text of ``config``. The subwords of a run in ``folder`` are not learned again."""
    subwords = learned_subwords(folder) if folder and config.tokenizer == "bpe" else None
    return dataset_of(replace(spec_of(config), subwords=subwords))


def learned_subwords(folder: Path) -> Tokenizer | None:
    """The tokenizer of the newest checkpoint in ``folder`` that has an unbroken one; else None."""
    for checkpoint in numbered(folder / CHECKPOINTS):
        with contextlib.suppress(UserError, OSError):
            check_manifest(checkpoint, [TOKENIZER])
            return load_tokenizer(checkpoint)
    return None


def load_text(config: TrainConfig, folder: Path, ranks: Distributed) -> TokenDataset:
    """The text to train on, checked; a tokenizer that was not made from it is kept in ``folder``."""
    with ranks.rank_zero_first():
        text = find_text(config, folder)
    source = text.info.source
    ranks.check_alike(
        text.info.sha256,
        f"the processes read different texts, this one {source}; name a file that all have with data.",
    )
    check_corpus(text.info, config.data, folder)
    check_text(text, config)
    if config.tokenizer.endswith(".json") and ranks.first:
        keep_tokenizer(text.tokenizer, folder)
    if text.validation.counts.is_lossy and ranks.first:
        warnings.warn(f"{LOSES_TEXT}.", stacklevel=2)
    return text


def keep_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    if not (folder / TOKENIZER).exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_tokenizer(tokenizer, folder)
    elif load_tokenizer(folder).to_json() != tokenizer.to_json():
        raise UserError(f"{folder / TOKENIZER} is another tokenizer; name a new folder.")


def check_text(text: TokenDataset, config: TrainConfig) -> None:
    """Raise UserError if ``text`` can't be trained or validated on as ``config`` says."""
    source = text.info.source
    tokenizer = text.info.tokenizer
    requested = config.model.vocab_size
    vocab_size = text.tokenizer.vocab_size
    if requested not in (None, vocab_size):
        raise UserError(f"vocab_size={requested}, but the text has {vocab_size}; leave vocab_size out.")
    cutoffs = config.model.adaptive.cutoffs
    if cutoffs and tokenizer not in ("frequency", "word"):
        raise UserError(
            f"cutoffs={cutoffs} need tokens that are numbered by frequency, but tokenizer={tokenizer!r} "
            f"numbers them otherwise; use tokenizer='frequency' or 'word', or leave the cutoffs out."
        )
    if VALIDATION not in text.splits:
        raise UserError(f"{source} has no validation part; prepare it without a model's tokenizer.")
    check_length(len(text.train.tokens), config.batch_size, config.model.segment_len)
    for split, purpose in ((text.train, "train"), (text.validation, "validate")):
        if len(split.documents) and split.documents.max() < 2:
            raise UserError(
                f"{source} has only documents of a single token to {purpose} on, in which nothing can be "
                f"predicted; use longer documents."
            )


def check_apart(folder: Path, *texts: str) -> None:
    """Raise UserError if ``folder`` is that of the ``texts``."""
    if folder.resolve() in [user_path(text).resolve() for text in texts]:
        raise UserError(f"{folder} holds the texts to train on; name another folder for what is trained.")


def check_corpus(corpus: DatasetInfo, data: str, folder: Path) -> None:
    """Raise UserError if the ``folder`` of a run is that of ``corpus``, which ``data`` names, or has a run on
    another text."""
    check_apart(folder, data, corpus.source)
    facts = read_facts(folder)
    known = facts["corpus"] if facts else None
    if known and known["sha256"] != corpus.sha256:
        raise UserError(
            f"{folder} was trained on {known['name']} ({known['source']}); the text from {corpus.source} "
            f"is a different one. Name the same text with data."
        )


def describe_corpus(text: TokenDataset) -> dict[str, Any]:
    """The facts about ``text`` for ``run.json``."""
    info = text.info
    held_out = text.validation
    corpus: dict[str, Any] = {
        "name": info.name,
        "source": info.source,
        "tokenizer": info.tokenizer,
        "characters": info.total("characters"),
    }
    if info.documents:
        corpus["documents"] = info.documents
    corpus["held_out_tokens"] = len(held_out.tokens) - (len(held_out.documents) or 1)
    if held_out.counts.is_lossy:
        corpus["loses_text"] = True
    corpus["sha256"] = info.sha256
    corpus["stands_in_for_tiny_shakespeare"] = info.is_stand_in
    return corpus
