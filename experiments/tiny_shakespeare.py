"""The packaged models on Tiny Shakespeare, the text that they were trained on."""

import torch

from memformers.common.errors import UserError
from memformers.data.dataset import TokenDataset
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import dataset_of
from memformers.models.language_model import MemoryLM
from memformers.runs.load import load_pretrained


def read_shakespeare(data: str) -> TokenDataset:
    """The file ``data``, or the one that a training run uses."""
    corpus = dataset_of(CorpusSpec(data))
    check_found(corpus.info.is_stand_in)
    return corpus


def check_found(is_stand_in: bool) -> None:
    """Raise UserError for a text that replaces Tiny Shakespeare."""
    if is_stand_in:
        raise UserError("Tiny Shakespeare was neither found nor downloaded; name its file with --data.")


def load_packaged(name: str, corpus: TokenDataset) -> MemoryLM:
    """The packaged model ``name``, whose tokens are those of the ``corpus``."""
    model, tokenizer = load_pretrained(name, torch.device("cpu"))
    assert tokenizer.to_json() == corpus.tokenizer.to_json()
    return model
