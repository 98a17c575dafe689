"""A model's memory of a text, saved to a safetensors file and loaded again."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from memformers.common.errors import UserError
from memformers.common.files import check_utf8_name, replacing
from memformers.generation.incremental import Stepper
from memformers.models.io import save_tensors
from memformers.models.language_model import MemoryLM
from memformers.models.memory import memory_from_tensors, memory_tensors

MODEL = "model"  # metadata of the file: the fingerprint of its model


def check_target(model: MemoryLM, path: Path) -> None:
    """Raise UserError if [`save_memory`][] can't write ``path``, or would replace what is no saved memory."""
    if model.config.model == "transformer":
        raise UserError("model='transformer' has no memory to save; leave save_memory out.")
    target = Path(os.path.realpath(path))
    check_utf8_name(target)
    if not target.parent.is_dir():
        raise UserError(f"{path} can't be written: {target.parent} is not a folder; create it first.")
    if target.exists() and MODEL not in read_metadata(target):
        raise UserError(f"{path} exists already and is not a saved memory; name a new file.")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UserError(f"{path} can't be written: permission denied; name another file.")


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty for any other kind of file."""
    with suppress(OSError, SafetensorError), safetensors.safe_open(path, "pt") as file:
        return file.metadata() or {}
    return {}


def save_memory(decoder: Stepper, path: Path) -> None:
    """Write the memory of ``decoder``'s single stream, atomically. Raises UserError before anything was read,
    and as [`check_target`][] does."""
    check_target(decoder.model, path)
    if decoder.last is None:
        raise UserError("nothing was read yet, so there is no memory to save.")
    running, starts = decoder.running, decoder.doc_starts
    tensors = memory_tensors(decoder.memory()) | {"running": running, "logits": decoder.last}
    tensors |= {} if starts is None else {"doc_starts": starts}
    with replacing(path) as temporary:
        save_tensors(tensors, temporary, {MODEL: fingerprint(decoder.model)})


def load_memory(model: MemoryLM, path: Path) -> Stepper:
    """A decoder that continues the text of a memory that [`save_memory`][] wrote. Raises UserError for a file
    that is missing, broken or another model's."""
    try:
        tensors = safetensors.torch.load_file(path, device=str(model.device))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} can't be read as a saved memory: {error}") from None
    if read_metadata(path).get(MODEL) != fingerprint(model):
        why = "is the memory of another model, or of other weights; use it with its own model."
        raise UserError(f"{path} {why}")
    V, S, nothing = model.config.vocab_size, model.config.segment_len, torch.empty(0)
    try:
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise UserError("it holds numbers that are NaN or infinite.")
        logits, running = tensors.pop("logits", nothing), tensors.pop("running", nothing)
        starts = tensors.pop("doc_starts", None)
        if logits.shape != (1, V) or running.dim() != 2 or len(running) >= S:
            raise UserError(f"expected logits as [1, {V}] and running as [t, 1], less than a segment of {S}.")
        decoder = Stepper(model, 1, memory_from_tensors(tensors, model.config.n_layers))
        if running.shape != (0, 1):
            decoder.read(running, starts)
    except UserError as error:
        raise UserError(f"{path} is not a complete memory: {error}") from None
    decoder.last = logits
    return decoder


def fingerprint(model: MemoryLM) -> str:
    """A checksum of config and weights: a memory is useless for any other model."""
    digest = hashlib.sha256(json.dumps(asdict(model.config), sort_keys=True).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
