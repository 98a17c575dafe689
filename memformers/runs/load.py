"""A trained model and its tokenizer, from the folder of a run or one that another program wrote."""

import json
from pathlib import Path

import torch

from memformers.common.errors import UserError
from memformers.common.files import (
    MANIFEST,
    check_manifest,
    has_manifest,
    newest_that_loads,
    numbered,
    read_json,
)
from memformers.convert.transfo_xl import VOCABULARY, from_transfo_xl, load_vocabulary
from memformers.data.tokenizer import Tokenizer
from memformers.data.tokenizers import TOKENIZER, SubwordTokenizer, load_tokenizer
from memformers.models.hub import download, is_hub_model
from memformers.models.io import CONFIG, WEIGHTS, packaged
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CHECKPOINTS


def load_checkpoint(folder: Path, device: torch.device) -> tuple[MemoryLM, Tokenizer]:
    """The model, in eval mode on ``device``, and its tokenizer: from the ``folder`` of a run (its newest
    checkpoint), a checkpoint, ``save_pretrained``, or Hugging Face's Transformer-XL; else ValueError."""
    if checkpoints := numbered(folder / CHECKPOINTS):
        return newest_that_loads(checkpoints, lambda path: load_with_tokenizer(path, device))[1]
    return load_with_tokenizer(folder, device)


def load_pretrained(name: str, device: torch.device, revision: str = "") -> tuple[MemoryLM, Tokenizer]:
    """The model ``name``, in eval mode on ``device``, and its tokenizer: one of the package, in float32, or
    OWNER/NAME on Hugging Face's hub; else ValueError."""
    if is_hub_model(name):
        files = (CONFIG, WEIGHTS, MANIFEST, TOKENIZER)
        return load_with_tokenizer(download(name, files, revision), device)
    model, tokenizer = load_with_tokenizer(packaged(name), device)
    return model.float(), tokenizer


def load_with_tokenizer(folder: Path, device: torch.device) -> tuple[MemoryLM, Tokenizer]:
    """The model and tokenizer whose files are in ``folder`` itself; else ValueError."""
    # MemoryLM.from_pretrained checks its own files.
    if has_manifest(folder) and TOKENIZER in read_json(folder / MANIFEST).get("files", ()):
        check_manifest(folder, (TOKENIZER,))

    if not folder.exists():
        raise UserError(f"{folder} doesn't exist; name the folder of a run or of a checkpoint.")

    # Whose files they are: Hugging Face's Transformer-XL, or ours, which transformers may have written.
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    is_foreign = config.get("model_type", "memformers") != "memformers"
    tokenizer: Tokenizer
    if is_foreign or (folder / VOCABULARY).is_file():
        model = from_transfo_xl(folder).to(device)
        tokenizer = load_vocabulary(folder)
    elif has_manifest(folder) or (folder / WEIGHTS).is_file():
        model = MemoryLM.from_pretrained(folder, device)
        tokenizer = load_model_tokenizer(folder, model.config.n_tokens)
    else:
        raise UserError(f"{folder} holds no checkpoint; name the folder of a run or of a checkpoint.")

    if model.config.vocab_size != tokenizer.vocab_size:
        sizes = f"a model of {model.config.vocab_size} tokens and a tokenizer of {tokenizer.vocab_size}"
        raise UserError(f"{folder} has {sizes}; they belong to different trainings.")
    return model, tokenizer


def load_model_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in ``folder``, without what transformers adds to ``vocab_size`` tokens, as ``<pad>``."""
    tokenizer = load_tokenizer(folder)
    if isinstance(tokenizer, SubwordTokenizer) and tokenizer.vocab_size > vocab_size:
        data = tokenizer.to_json()
        added = [token for token in data["added_tokens"] if token["id"] < vocab_size]
        return SubwordTokenizer(json.dumps(data | {"added_tokens": added}), str(folder / TOKENIZER))
    return tokenizer
