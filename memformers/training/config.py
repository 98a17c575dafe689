"""What a training is made from: the model, the text and how to learn."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from memformers.data.tokenizers import TokenizerName
from memformers.language_model import ModelConfig

Precision = Literal["float32", "bfloat16"]
Parallel = Literal["single", "ddp", "fsdp"]


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    data: str = ""
    """A text file, or a folder with Tiny Shakespeare, or "builtin". Empty: Tiny Shakespeare from
    $MEMFORMERS_DATA, the user's cache, or its public address, else the built-in corpus."""
    tokenizer: TokenizerName = "character"
    """One token a character, or one a byte."""
    tokens: int = 1_200_000
    """How long to train: the number of tokens seen."""
    batch_size: int = 8
    """Parallel streams of text, B."""
    learning_rate: float = 2e-3
    """AdamW's learning rate at its peak, after warm-up; it then falls to 0 in a straight line."""
    warmup: float = 0.03
    """Fraction of the training over which the learning rate rises from 0."""
    weight_decay: float = 0.1
    """AdamW's decay of weight matrices."""
    max_grad_norm: float = 1.0
    """Gradients longer than this are shortened to it."""
    evaluations: int = 6
    """How often the whole validation text is evaluated, evenly spread, the last at the end."""
    log_every: int = 10
    """Steps between two training records."""
    checkpoint_every: int = 0
    """Tokens between two checkpoints, beside the one at each evaluation; 0 for no others."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept, beside the one of the lowest validation loss."""
    skip_bad_steps: int = 0
    """How many steps with a loss or gradient that is not finite may be left out before training stops."""
    seed: int = 0
    """Of the initial weights and of dropout."""
    device: str = "auto"
    """Where to train, such as cpu or cuda:1; auto takes a GPU if there is one."""
    precision: Precision = "float32"
    """Of matrix products in training steps; bfloat16 is autocast, with weights, memory, norms and losses
    in float32. Evaluations are in float32 in either."""
    compile: bool = False
    """Whether torch.compile builds the training step's forward and backward; takes minutes at first."""
    parallel: Parallel = "single"
    """How the processes that torchrun started share the work: each with the whole model (ddp), or with a
    part of every weight (fsdp). Each takes an equal part of the batch's streams."""
    accumulate: int = 1
    """Parts of a batch's streams that are computed one after the other before a step, to save memory."""
    activation_checkpointing: bool = False
    """Whether layers are computed again in the backward pass, to save the memory of their activations."""

    def __post_init__(self) -> None:
        """Raise ValueError, saying what doesn't fit."""
        if self.precision not in get_args(Precision):
            raise ValueError(f"precision={self.precision!r} is unknown; use 'float32' or 'bfloat16'.")
        if self.parallel not in get_args(Parallel):
            raise ValueError(f"parallel={self.parallel!r} is unknown; use 'single', 'ddp' or 'fsdp'.")
        if self.compile and self.parallel == "fsdp":
            raise ValueError("compile=True can't be used with parallel='fsdp'; use parallel='ddp'.")
        for name in ("tokens", "batch_size", "accumulate", "evaluations", "log_every", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is too small; use at least 1.")
        for name in ("checkpoint_every", "skip_bad_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative; use 0 for none.")
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0.")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} streams can't be cut into accumulate={self.accumulate} equal "
                f"parts; use a multiple of {self.accumulate}."
            )
        if not self.weight_decay >= 0.0:
            raise ValueError(f"weight_decay={self.weight_decay} is negative; use 0 for none.")
        if not 0.0 <= self.warmup < 1.0:
            raise ValueError(f"warmup={self.warmup} is a fraction of the training, in [0, 1).")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} is outside 0 … 2⁶³ − 1.")
