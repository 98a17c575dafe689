"""A model's memory of a text, saved to a file and loaded again."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.files import check_utf8_name, replacing
from memformers.generation.decoding import Decoder, Reader
from memformers.models.language_model import MemoryLM
from memformers.models.memory import memory_from_tensors, memory_tensors

MODEL, SEAL = "model", "sha256"
"""Metadata of the file: the fingerprint of its model, and the checksum of its tensors."""


def check_target(model: MemoryLM, path: Path) -> None:
    """Raise UserError if [`save_memory`][] could not write to ``path``, or would replace a file that is not a
    saved memory. It is called before a long text is read."""
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
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


def save_memory(reader: Reader, path: Path) -> None:
    """Write the memory of ``reader``'s single stream to a safetensors file, atomically. Raises UserError for
    a model without memory, before anything was read, and for a bad target."""
    check_target(reader.model, path)
    assert isinstance(reader, Decoder)
    if reader.logits is None:
        raise UserError("nothing was read yet, so there is no memory to save.")
    tensors = memory_tensors(reader.memory())
    tensors |= {"running": reader.stepper.running.contiguous(), "logits": reader.logits.contiguous()}
    if (doc_starts := reader.stepper.doc_starts) is not None:
        tensors["doc_starts"] = doc_starts.contiguous()
    metadata = {MODEL: fingerprint(reader.model), SEAL: checksum(tensors)}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)


def load_memory(model: MemoryLM, path: Path) -> Reader:
    """A reader that continues the text of a memory that [`save_memory`][] wrote. Raises UserError for a file
    that is missing, broken, changed since, or another model's."""
    try:
        with safe_open(path, framework="pt", device=str(model.device)) as file:
            said = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} can't be read as a saved memory: {error}") from None
    if said.get(MODEL) != fingerprint(model):
        raise UserError(
            f"{path} is the memory of another model, or of other weights; use it with its own model."
        )
    if said.get(SEAL) != checksum(tensors):
        raise UserError(f"{path} has changed since it was written: its checksum differs.")
    try:
        running, doc_starts, logits = whole(tensors, model)
        stream = Decoder(model, 1, memory_from_tensors(tensors, model.config.n_layers))
        if len(running):
            stream.read(running, doc_starts)
    except UserError as error:
        raise UserError(f"{path} is not a complete memory: {error}") from None
    stream.stepper.result = logits[None]
    return stream


def whole(tensors: dict[str, Tensor], model: MemoryLM) -> tuple[Tensor, Tensor | None, Tensor]:
    """The running segment ``[t, 1]``, its starts ``[t, 1]`` where a document begins in it, and the logits
    ``[1, vocab_size]``, taken out of ``tensors``; UserError where they are missing or can't be this model's,
    or where a number is not finite."""
    config = model.config
    for name, shape in (("running", "[t, 1]"), ("logits", f"[1, {config.vocab_size}]")):
        if name not in tensors:
            raise UserError(f"it has no {name}, {shape}.")
    running, logits = tensors.pop("running"), tensors.pop("logits")
    doc_starts = tensors.pop("doc_starts", None)
    if running.dim() != 2 or running.shape[1] != 1 or len(running) >= config.segment_len:
        raise UserError(f"expected running as [t, 1], shorter than a segment, got {list(running.shape)}.")
    if logits.shape != (1, config.vocab_size):
        raise UserError(f"expected logits as [1, {config.vocab_size}], got {list(logits.shape)}.")
    if not_finite := [n for n, t in {**tensors, "logits": logits}.items() if not t.isfinite().all()]:
        raise UserError(f"{not_finite[0]} holds numbers that are NaN or infinite.")
    return running, doc_starts, logits


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors with their names, dtypes and shapes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(in_bytes(tensor))
    return digest.hexdigest()


def fingerprint(model: MemoryLM) -> str:
    """A checksum of config and weights: a memory is useless for any other model."""
    digest = hashlib.sha256(json.dumps(asdict(model.config), sort_keys=True).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(in_bytes(tensor))
    return digest.hexdigest()


def in_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor of any shape."""
    return tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
