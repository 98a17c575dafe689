"""The text of a training, as tokens."""

from dataclasses import dataclass

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


def prepare(corpus: Corpus, config: TrainConfig) -> Text:
    """The corpus as tokens, long enough for ``config`` to train and validate on; else ValueError."""
    check_order(config.tokenizer, config.model.adaptive.cutoffs)
    tokenizer = build_tokenizer(config.tokenizer, corpus.text)
    train_tokens = tokenizer.encode(corpus.train_text)
    validation = tokenizer.encode(corpus.validation_text)
    check_length(len(train_tokens), config.batch_size, config.model.segment_len)
    if len(validation) < 2:
        raise UserError(f"{corpus.source} leaves {len(validation)} tokens to validate on.")
    return Text(corpus, tokenizer, train_tokens, validation)
