"""A whole language model around a memory transformer: tokens and memory in, logits and memory out."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, cast, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from memformers.attention import (
    Positions,
    RelativeMultiHeadAttention,
    check_dropout,
    check_features,
    check_heads,
)
from memformers.compressive import (
    AttentionReconstructionLoss,
    CompressiveTransformer,
    CompressiveTransformerLayer,
    Conv1dCompression,
)
from memformers.decoding import Decoder, Rereader, write
from memformers.files import config_from_dict, read_json, replacing, write_json
from memformers.kernels.dispatch import KernelName, check_kernel
from memformers.layers import FeedForward, reset_parameters
from memformers.memory import Memory, compress_oldest, extend, keep_newest
from memformers.sampling import Sampling
from memformers.transformer_xl import TransformerXL, TransformerXLLayer

ModelName = Literal["transformer", "transformer-xl", "compressive"]


@dataclass(frozen=True)
class ModelConfig:
    """What a language model is built from."""

    model: ModelName = "transformer-xl"
    """What it remembers between segments: nothing, its last inputs, or those and older ones
    compressed. Width, depth and everything else are the same network."""
    vocab_size: int = 256
    """How many different tokens there are; a training takes the number from its text."""
    d_model: int = 128
    """Width D: features a token."""
    heads: int = 4
    """Attention heads H; must divide d_model."""
    n_layers: int = 4
    """Depth, in layers."""
    d_ff: int = 512
    """Width of the feed-forward network's hidden layer."""
    dropout: float = 0.0
    """Probability of dropping an activation while training."""
    positions: Positions = "sinusoidal"
    """The paper's fixed sinusoids (sinusoidal), or a learned vector for each distance (learned)."""
    kernel: KernelName = "auto"
    """What computes attention: naive (the definition), blocked (fast on CPU), fused (Triton, on a GPU),
    augmented (PyTorch's own, for sinusoidal positions), or the fastest of those measured (auto)."""
    position_features: int | None = None
    """Numbers in a sinusoid, P (sinusoidal positions); d_model if not given, fewer for augmented."""
    segment_len: int = 64
    """Segment length S the model is trained with, in tokens; the longest with learned positions."""
    mem_len: int = 64
    """Memory length M, in positions (transformer-xl, compressive)."""
    c_mem_len: int = 64
    """Compressed memory length C, in slots (compressive)."""
    compression_rate: int = 4
    """Positions a compressed slot stands for, c (compressive)."""

    def __post_init__(self) -> None:
        """Raise ValueError, saying what doesn't fit."""
        if self.model not in get_args(ModelName):
            names = ", ".join(get_args(ModelName))
            raise ValueError(f"model={self.model!r} is unknown; use one of {names}.")
        check_heads(self.heads, self.d_model)
        check_dropout(self.dropout)
        check_kernel(self.kernel)
        if self.position_features is not None:
            check_features(self.position_features, self.positions, self.kernel)
        for name in ("vocab_size", "n_layers", "d_ff", "segment_len", "compression_rate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is too small; use at least 1.")
        for name in ("mem_len", "c_mem_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative; use 0 for none.")

    @property
    def longest_attention(self) -> int:
        """The most keys K = C + M + S one query's segment can meet, in positions and slots."""
        if self.model == "transformer":
            return self.segment_len
        if self.model == "transformer-xl":
            return self.mem_len + self.segment_len
        # A memory shorter than one slot's worth waits until it fills one.
        return self.c_mem_len + max(self.mem_len, self.compression_rate - 1) + self.segment_len

    @property
    def remembered_positions(self) -> int:
        """How many positions before the segment one layer can look at, compressed ones included."""
        if self.model == "transformer":
            return 0
        if self.model == "transformer-xl":
            return self.mem_len
        return self.mem_len + self.c_mem_len * self.compression_rate


class LMOutput(NamedTuple):
    """What :class:`MemoryLM` returns for a segment."""

    logits: Tensor
    """``[S, B, vocab_size]``, of each next token."""
    memory: Memory
    """To pass in with the streams' next segment."""
    auxiliary_loss: Tensor
    """Attention-reconstruction loss, a scalar to add to the loss; exactly 0 if nothing was
    compressed in this segment."""


class MemoryLM(nn.Module):
    """Embedding, a memory transformer, and a linear head; built from one :class:`ModelConfig`.

    The language-model loss trains everything but the compression functions; the auxiliary loss
    trains those alone. Memory is a value: nothing about the text is kept on the module.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = build_transformer(config)
        self.head = nn.Linear(config.d_model, config.vocab_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw fresh weights, with a head that starts from near-equal odds.

        The compression functions draw last: from the same seed, all three models start with the
        same weights in everything they share.
        """
        nn.init.normal_(self.embed.weight, std=0.3)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        draw_weights(self.transformer)

    def forward(self, tokens: Tensor, memory: Memory | None = None) -> LMOutput:
        """``tokens [S, B]``, integers, with the memory that the last segment returned, or None.

        Raises ValueError for tokens that aren't integers ``[S, B]`` with S ≥ 1, for a memory of
        another model, batch, dtype or device, and for a segment longer than learned positions.
        """
        self.check_tokens(tokens)
        memory = memory or Memory(())
        self.check_kind(memory)
        x = self.dropout(self.embed(tokens))  # [S, B, D]
        if isinstance(self.transformer, CompressiveTransformer):
            hidden, inputs = self.transformer(x, memory.mem, memory.c_mem)
        else:
            hidden, inputs = self.transformer(x, memory.mem)
        memory, auxiliary_loss = self.remember(memory, inputs)
        return LMOutput(self.head(hidden), memory, auxiliary_loss)

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
        """The memory after a segment with these layer inputs, and what compressing it cost."""
        config, no_loss = self.config, inputs[0].new_zeros(())
        if not isinstance(self.transformer, CompressiveTransformer):
            mem_len = config.mem_len if config.model == "transformer-xl" else 0
            return keep_newest(extend(memory, inputs), mem_len), no_loss
        layers = cast(list[CompressiveTransformerLayer], list(self.transformer.layers))
        memory, compressed = compress_oldest(
            extend(memory, inputs),
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
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens={max_new_tokens} is negative; use 0 or more.")
        if batch < 1 or (batch > 1 and prompt.shape[1] > 1):
            raise ValueError(f"batch={batch} for {prompt.shape[1]} prompts; it repeats a single one.")
        sampling = Sampling(temperature, top_k, top_p)
        generator = torch.Generator(prompt.device)
        generator.seed() if seed is None else generator.manual_seed(seed)
        reader = self.reader(batch if batch > 1 else prompt.shape[1])
        return write(reader, prompt.expand(-1, reader.batch), max_new_tokens, sampling, generator, stop)

    def reader(self, batch: int, memory: Memory | None = None) -> Decoder | Rereader:
        """What reads ``batch`` streams token by token, from ``memory`` or from nothing remembered."""
        if self.config.model == "transformer":
            self.check_kind(memory or Memory(()))
            return Rereader(self, batch)
        return Decoder(self, batch, memory)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``; each file appears whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", asdict(self.config))
        with replacing(folder / "model.safetensors") as temporary:
            save_file(self.state_dict(), temporary)

    @classmethod
    def from_pretrained(cls, folder: str | Path, device: str | torch.device = "cpu") -> "MemoryLM":
        """The model that :meth:`save_pretrained` wrote, in eval mode, on ``device``.

        Nothing is unpickled. Raises ValueError for a missing, broken or mismatched file.
        """
        folder = Path(folder)
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


def draw_weights(transformer: nn.Module) -> None:
    """Let every module draw its weights anew, the compression functions after all others."""
    named = list(transformer.named_modules())
    reset_parameters(module for name, module in named if "compress" not in name.split("."))
    reset_parameters(module for name, module in named if "compress" in name.split("."))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode within the block, and afterwards in the mode it came in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def build_transformer(config: ModelConfig) -> TransformerXL | CompressiveTransformer:
    """The network of ``config``, without embedding and head; a transformer with no memory is a
    Transformer-XL that is never given one."""
    attention = RelativeMultiHeadAttention(
        config.heads,
        config.d_model,
        config.dropout,
        positions=config.positions,
        max_positions=config.longest_attention,
        position_features=config.position_features,
        kernel=config.kernel,
    )
    feed_forward = FeedForward(config.d_model, config.d_ff, config.dropout)
    if config.model == "compressive":
        compressive_layer = CompressiveTransformerLayer(
            d_model=config.d_model,
            self_attn=attention,
            feed_forward=feed_forward,
            dropout_prob=config.dropout,
            compress=Conv1dCompression(config.compression_rate, config.d_model),
        )
        return CompressiveTransformer(compressive_layer, config.n_layers)
    layer = TransformerXLLayer(
        d_model=config.d_model,
        self_attn=attention,
        feed_forward=feed_forward,
        dropout_prob=config.dropout,
    )
    return TransformerXL(layer, config.n_layers)


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
