"""Text read and continued by a trained model, piece by piece."""

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from memformers.data.tokenizers import ByteTokenizer, Tokenizer, load_tokenizer
from memformers.decoding import Decoder, write
from memformers.files import replacing
from memformers.language_model import MemoryLM
from memformers.memory import Memory
from memformers.run_folder import CHECKPOINTS
from memformers.sampling import Sampling, seeded
from memformers.sealed import check_seal, is_sealed, newest_that_loads, numbered


class TextStream:
    """A model in the middle of a text: it reads what it is given and writes on from there.

    Whatever was read or written stays in the model's memory, as far as that reaches.
    """

    def __init__(self, model: MemoryLM, tokenizer: Tokenizer):
        self.model, self.tokenizer = model, tokenizer
        self.device = model.device
        self.reader = model.reader(batch=1)

    def read(self, text: str, progress: Callable[[int], object] = lambda tokens: None) -> None:
        """Read ``text``; ``progress`` is told now and then how many tokens more are done. Raises
        ValueError for characters outside the vocabulary, before anything is read."""
        tokens = self.tokenizer.encode(text).to(self.device)[:, None]  # [T, 1]
        if not len(tokens):
            return
        for part in tokens.split(16 * self.model.config.segment_len):
            self.reader.read(part)
            progress(len(part))

    def write(
        self, max_new_tokens: int, sampling: Sampling, generator: torch.Generator, stop: str = ""
    ) -> Iterator[str]:
        """Yield the text that follows, character by character, until ``max_new_tokens`` are written or
        the newest end with ``stop``. Raises ValueError if nothing was read yet."""
        decode, written = incremental_decoder(self.tokenizer), ""
        for token in write(self.reader, max_new_tokens, sampling, generator):
            piece = decode(int(token))
            yield piece
            written = (written + piece)[-len(stop) :] if stop else ""
            if stop and written == stop:
                return

    def save_memory(self, path: Path) -> None:
        """Write what the model remembers to a safetensors file, whole or not at all. Raises ValueError
        for a model without memory."""
        if not isinstance(self.reader, Decoder):
            raise ValueError("model='transformer' has no memory to save.")
        if self.reader.logits is None:
            raise ValueError("nothing was read yet, so there is no memory to save.")
        memory = self.reader.memory()
        tensors = {f"mem.{i}": t.contiguous() for i, t in enumerate(memory.mem)}
        tensors |= {f"c_mem.{i}": t.contiguous() for i, t in enumerate(memory.c_mem)}
        tensors |= {"running": self.reader.running.contiguous(), "logits": self.reader.logits}
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"model": fingerprint(self.model)})

    def load_memory(self, path: Path) -> None:
        """Take up the text where :meth:`save_memory` left it. Raises ValueError for a file that is
        missing, broken, or another model's."""
        try:
            with safe_open(path, framework="pt", device=str(self.device)) as file:
                made_by = (file.metadata() or {}).get("model", "")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} can't be read as a saved memory: {error}") from None
        if made_by != fingerprint(self.model):
            raise ValueError(
                f"{path} is the memory of another model, or of other weights; use it with its own."
            )
        layers = range(self.model.config.n_layers)
        try:
            mem = tuple(tensors[f"mem.{i}"] for i in layers)
            c_mem = tuple(tensors[f"c_mem.{i}"] for i in layers) if "c_mem.0" in tensors else ()
            reader = self.model.reader(1, Memory(mem, c_mem))
            if len(tensors["running"]):
                reader.read(tensors["running"])
            reader.logits = tensors["logits"]
        except KeyError as error:
            raise ValueError(f"{path} is no whole memory: it has no {error}.") from None
        self.reader = reader


def continue_text(
    model: MemoryLM,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    stop: str = "",
) -> str:
    """What the model writes after ``prompt``; see :meth:`MemoryLM.generate` for the options.

    Raises ValueError for an empty prompt and for characters outside the vocabulary.
    """
    sampling = Sampling(temperature, top_k, top_p)
    stream = TextStream(model, tokenizer)
    stream.read(prompt)
    return "".join(stream.write(max_new_tokens, sampling, seeded(seed, stream.device), stop))


def incremental_decoder(tokenizer: Tokenizer) -> Callable[[int], str]:
    """A function from each next token to the text that it completes; of a character of several bytes,
    all but the last give none."""
    if not isinstance(tokenizer, ByteTokenizer):
        return lambda token: tokenizer.decode(torch.tensor([token]))
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return lambda token: decoder.decode(bytes([token]))


def fingerprint(model: MemoryLM) -> str:
    """A checksum of config and weights: a memory means nothing to any other model."""
    digest = hashlib.sha256(json.dumps(asdict(model.config), sort_keys=True).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_checkpoint(folder: Path, device: torch.device) -> tuple[MemoryLM, Tokenizer]:
    """The model and tokenizer in ``folder``: a run's, of which the newest checkpoint that is whole counts,
    a checkpoint's, or one that save_pretrained wrote with a tokenizer; else ValueError."""
    if checkpoints := numbered(folder / CHECKPOINTS):
        return newest_that_loads(checkpoints, lambda path: load_model(path, device))[1]
    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"{folder} holds no checkpoint; name a run's folder, or a checkpoint's.")
    return load_model(folder, device)


def load_model(folder: Path, device: torch.device) -> tuple[MemoryLM, Tokenizer]:
    """The model and tokenizer whose files are in ``folder`` itself; else ValueError."""
    if is_sealed(folder):
        check_seal(folder, ("tokenizer.json",))
    model, tokenizer = MemoryLM.from_pretrained(folder, device), load_tokenizer(folder)
    if model.config.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"{folder} has a model of {model.config.vocab_size} tokens and a tokenizer of "
            f"{tokenizer.vocab_size}; they belong to different trainings."
        )
    return model, tokenizer
