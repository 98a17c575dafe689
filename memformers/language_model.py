"""A whole language model around a memory transformer: tokens and memory in, logits and memory out."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memformers.adaptive import AdaptiveSoftmax
from memformers.attention import nearest_mask
from memformers.building import (
    build_embedding,
    build_head,
    build_transformer,
    draw_vocabulary,
    draw_weights,
)
from memformers.compressive import (
    AttentionReconstructionLoss,
    CompressiveTransformer,
    CompressiveTransformerLayer,
)
from memformers.decoding import Decoder, Rereader, write
from memformers.files import config_from_dict, read_json, replacing, write_json
from memformers.memory import Memory, compress_oldest, keep_newest
from memformers.model_config import ModelConfig as ModelConfig
from memformers.model_config import ModelName as ModelName
from memformers.sampling import Sampling, seeded
from memformers.sealed import check_seal, is_sealed


class LMOutput(NamedTuple):
    """What :class:`MemoryLM` returns for a segment."""

    logits: Tensor
    """``[S, B, vocab_size]``, of each next token; from an adaptive softmax log-probabilities, which are
    logits as well."""
    memory: Memory
    """To pass in with the streams' next segment."""
    auxiliary_loss: Tensor
    """Attention-reconstruction loss, a scalar to add to the loss; exactly 0 if nothing was
    compressed in this segment."""


class MemoryLM(nn.Module):
    """Embedding, a memory transformer, and a head; built from one :class:`ModelConfig`.

    The language-model loss trains everything but the compression functions; the auxiliary loss
    trains those alone. Memory is a value: nothing about the text is kept on the module.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = build_embedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = build_transformer(config)
        self.head = build_head(config)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights, with a head that starts from near-equal odds.

        The compression functions draw last: from the same seed, all three models start with the
        same weights in everything they share.
        """
        draw_vocabulary(self.embed, self.head)
        draw_weights(self.transformer)

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> LMOutput:
        """``tokens [S, B]``, integers, with the memory that the last segment returned, or None.

        Raises ValueError for tokens that aren't integers ``[S, B]`` with S ≥ 1, for a memory of
        another model, batch, dtype or device, and for a segment longer than learned positions.
        """
        self.check_tokens(tokens)
        memory = memory or Memory(())
        self.check_kind(memory)
        hidden, inputs = self.transform(tokens, memory)
        memory, auxiliary_loss = self.remember(memory, inputs)
        return LMOutput(self.predict(hidden), memory, auxiliary_loss)

    def transform(self, tokens: Tensor, memory: Memory) -> tuple[Tensor, list[Tensor]]:
        """``tokens [S, B]`` to the transformer's output ``[S, B, D]`` and each layer's input, likewise."""
        x = self.dropout(self.embed(tokens))  # [S, B, D]
        if isinstance(self.transformer, CompressiveTransformer):
            return self.transformer(x, memory.mem, memory.c_mem)
        return self.transformer(x, memory.mem, self.visible(len(tokens), memory.mem_len))

    def visible(self, S: int, M: int) -> Tensor | None:
        """Where the queries of a segment may look, boolean ``[S, M + S, 1]``; None for all before them."""
        span, K = self.config.mem_len, M + S
        if not self.config.equal_spans or span >= K:
            return None
        return nearest_mask(S, K, span, self.device)[..., None]

    def predict(self, hidden: Tensor) -> Tensor:
        """The transformer's output ``[·, D]`` to the logits ``[·, vocab_size]`` of the next token."""
        if isinstance(self.head, AdaptiveSoftmax):
            return self.head(hidden, self.embed)
        return self.head(hidden)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.head.weight.device

    def check_tokens(self, tokens: Tensor, batch: int | None = None) -> None:
        """Raise ValueError unless ``tokens`` is text of this vocabulary, ``[S, B]``, of ``batch`` streams."""
        check_tokens(tokens, self.config.vocab_size)
        if batch is not None and tokens.shape[1] != batch:
            raise ValueError(f"tokens of {batch} streams were expected; {list(tokens.shape)} came.")

    def check_kind(self, memory: Memory) -> None:
        """Raise ValueError for a memory that only another kind of model keeps."""
        if memory.mem_len and self.config.model == "transformer":
            raise ValueError(
                f"a memory of {memory.mem_len} positions was given to a model='transformer', which has "
                f"none; use it with the model that made it."
            )
        if memory.c_mem_len and self.config.model != "compressive":
            raise ValueError(
                f"a compressed memory of {memory.c_mem_len} slots was given to a model="
                f"{self.config.model!r}, which has none; use it with the model that made it."
            )

    def remember(self, memory: Memory, inputs: list[Tensor]) -> tuple[Memory, Tensor]:
        """The memory after a segment with these layer inputs, ``[S, B, D]`` each, and what compressing it
        cost, a scalar."""
        config, no_loss = self.config, inputs[0].new_zeros(())
        if not isinstance(self.transformer, CompressiveTransformer):
            mem_len = config.mem_len if config.model == "transformer-xl" else 0
            return keep_newest(memory, inputs, mem_len), no_loss
        layers = cast(list[CompressiveTransformerLayer], list(self.transformer.layers))
        memory, compressed = compress_oldest(
            memory,
            inputs,
            [layer.compress for layer in layers],
            mem_len=config.mem_len,
            c_mem_len=config.c_mem_len,
            compression_rate=config.compression_rate,
        )
        if compressed is None:
            return memory, no_loss
        loss = AttentionReconstructionLoss(layers)(inputs, compressed.old, compressed.new)
        return memory, loss

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stop: int | None = None,
        batch: int = 1,
    ) -> Iterator[Tensor]:
        """Continue ``prompt [P, B]``: yields int64 ``[B]``, the next token of each stream, as it comes.

        Text is read as in training, by segments, each remembered when it is full, with keys and values
        kept (:class:`memformers.decoding.Decoder`). A model without memory reads the newest
        ``segment_len`` tokens again for each new one. The same ``seed`` gives the same text; temperature
        0 is greedy. It ends after ``max_new_tokens``, or when every stream has come to ``stop``.
        ``batch`` continues a single prompt ``[P, 1]`` so many times.

        Raises ValueError as :class:`Sampling` does, for a prompt without tokens, a negative
        ``max_new_tokens``, and a ``batch`` of several prompts.
        """
        self.check_tokens(prompt)
        if batch < 1 or (batch > 1 and prompt.shape[1] > 1):
            raise ValueError(f"batch={batch} for {prompt.shape[1]} prompts; it repeats a single one.")
        sampling = Sampling(temperature, top_k, top_p)
        reader = self.reader(batch if batch > 1 else prompt.shape[1])
        reader.read(prompt.expand(-1, reader.batch))
        return write(reader, max_new_tokens, sampling, seeded(seed, prompt.device), stop)

    def reader(self, batch: int, memory: Memory | None = None) -> Decoder | Rereader:
        """What reads ``batch`` streams token by token, from ``memory`` or from nothing remembered."""
        if self.config.model == "transformer":
            self.check_kind(memory or Memory(()))
            return Rereader(self, batch)
        return Decoder(self, batch, memory)

    def save_pretrained(self, folder: str | Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write ``config.json`` and ``model.safetensors``; each file appears whole or not at all.

        ``weights`` are the whole ones of a model of which each process holds a part. Raises ValueError for
        a training's checkpoint, whose files belong together.
        """
        folder = Path(folder)
        if is_sealed(folder):
            raise ValueError(f"{folder} is a training's checkpoint; name another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", asdict(self.config))
        with replacing(folder / "model.safetensors") as temporary:
            save_file(self.state_dict() if weights is None else weights, temporary)

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str | torch.device = "cpu") -> "MemoryLM":
        """The model that :meth:`save_pretrained` wrote, in eval mode, on ``device``.

        Nothing is unpickled. Raises ValueError for a missing, broken or mismatched file, and for one of a
        training's checkpoint that has changed since.
        """
        folder = Path(folder)
        if is_sealed(folder):
            check_seal(folder, ("config.json", "model.safetensors"))
        config = config_from_dict(ModelConfig, read_json(folder / "config.json"), "config.json")
        weights = folder / "model.safetensors"
        if not weights.is_file():
            raise ValueError(f"{weights} was expected beside config.json, but is missing.")
        model = cls(config)
        try:
            state = load_file(weights)
            model.to(next(iter(state.values())).dtype).load_state_dict(state)
        except (SafetensorError, RuntimeError, StopIteration, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"{weights} doesn't hold this config's weights: {reason}") from error
        return model.to(device).eval()


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError unless ``tokens`` is a segment: integers ``[S, B]``, S and B at least 1, each
    below ``vocab_size`` (on a GPU that is left to the embedding, so as not to wait for the values)."""
    if tokens.dim() != 2 or 0 in tokens.shape or tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"tokens were expected as int64 or int32 integers [segment, batch], at least one of each; "
            f"{tokens.dtype} {list(tokens.shape)} came."
        )
    if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = tokens.aminmax()
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"tokens from {low} to {high} came, but vocab_size={vocab_size} has 0 … {vocab_size - 1}."
            )
