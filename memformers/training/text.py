"""The text of a training, as tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.corpora import Corpus
from memformers.data.streams import check_length
from memformers.data.tokenizers import Tokenizer, build_tokenizer, check_order
from memformers.training.config import TrainConfig


@dataclass(frozen=True)
class Text:
    """A corpus as tokens."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: Tensor
    validation: Tensor
    train_documents: tuple[int, ...] = ()
    """How many tokens of ``train`` each document has; empty for a plain text."""
    validation_documents: tuple[int, ...] = ()
    """The same for ``validation``."""


def prepare(corpus: Corpus, config: TrainConfig) -> Text:
    """The corpus as tokens, long enough for ``config`` to train and validate on; else ValueError."""
    check_order(config.tokenizer, config.model.adaptive.cutoffs)
    tokenizer = build_tokenizer(config.tokenizer, corpus.text)
    train_tokens, train_documents = encoded(tokenizer, corpus.train_text, corpus.train_documents)
    validation, held_out = encoded(tokenizer, corpus.validation_text, corpus.validation_documents)
    check_length(len(train_tokens), config.batch_size, config.model.segment_len)
    for documents, purpose in ((train_documents, "train"), (held_out, "validate")):
        if documents and max(documents) < 2:
            raise UserError(
                f"{corpus.source} has only documents of a single token to {purpose} on, and nothing can be "
                f"predicted in them; use longer documents."
            )
    if len(validation) < 2:
        raise UserError(f"{corpus.source} leaves {len(validation)} tokens to validate on; use a longer text.")
    return Text(corpus, tokenizer, train_tokens, validation, train_documents, held_out)


def encoded(tokenizer: Tokenizer, text: str, documents: tuple[str, ...]) -> tuple[Tensor, tuple[int, ...]]:
    """The tokens ``[n]`` of ``text``, and how many of them each of the ``documents`` has that it consists
    of."""
    if not documents:
        return tokenizer.encode(text), ()
    parts = [tokenizer.encode(document) for document in documents]
    return torch.cat(parts), tuple(map(len, parts))
