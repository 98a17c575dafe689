"""What a training run is made from: the model, the text and how to learn."""

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, NonNegativeInt, Positive, Range, Share, check_fields
from memformers.common.files import config_from_dict, read_json
from memformers.data.tokenizers import TOKENIZER, check_name
from memformers.models.config import WITHOUT_PARAMETERS, ModelConfig, applies_to, reject_unused
from memformers.runs.folder import CONFIG

Precision = Literal["auto", "float32", "bfloat16"]
Parallel = Literal["single", "ddp"]
OptimizerName = Literal["muon", "adamw"]
Schedule = Literal["linear", "cosine", "constant", "wsd"]
PRESETS = Path(__file__).parent / "presets"
DEFAULT_MUON_PEAK = 0.04
"""Muon's learning rate, chosen on Tiny Shakespeare (docs/recipes.md)."""
DEFAULT_MEMORY_GROWTH = 0.5
"""The fraction of a training over which memory grows, unless each length would be compiled."""
MOST_EVALUATION_TOKENS = 32_768
FEWEST_EVALUATION_TOKENS = 512


@dataclass(frozen=True)
class TextConfig(Checked):
    """Which parts of the text are read, and how it is divided. Raises ValueError for a wrong type.

    Examples:
        >>> from memformers import TextConfig
        >>> TextConfig(document_separator="\\n\\n").text_field
        'text'
    """

    validation: str = ""
    """The validation text, in any form that data takes; empty: the last 10 % of data, or the split in its
    folder."""
    test: str = ""
    """The test text, which only memformers evaluate --split test reads."""
    text_field: str = "text"
    """Which field of a line of JSON, or which column of a table, is the text."""
    document_separator: str = ""
    """The text between the documents of a text file; empty: the file is one text."""
    document_end: NonNegativeInt | None = None
    """The token id that ends each document, for files of token ids."""


@dataclass(frozen=True)
class OptimConfig:
    """How the weights are learned. Raises ValueError for a value out of its range.

    Examples:
        >>> from memformers import OptimConfig
        >>> OptimConfig(learning_rate=2e-3, schedule="cosine").muon_peak
        0.04
    """

    optimizer: OptimizerName = "muon"
    """Muon for the matrices of the layers and AdamW for all other weights (muon), or AdamW for all weights
    (adamw)."""
    learning_rate: Positive = 4e-3
    """The peak of AdamW's learning rate, after the warm-up."""
    muon_learning_rate: Positive | None = None
    """The peak of Muon's learning rate; 0.04 if not given (muon)."""
    beta2: Annotated[float, Range(0, below=1)] = 0.99
    """AdamW's β₂: how slowly its mean of squared gradients changes."""
    warmup_fraction: Annotated[float, Range(0, below=1)] = 0.03
    """Fraction of the training over which the learning rate rises from 0."""
    schedule: Schedule = "linear"
    """The learning rate after the warm-up: it falls to 0 in a line (linear) or as half a cosine (cosine),
    stays (constant), or stays and then falls to 0 in a line over the last fifth (wsd)."""
    weight_decay: Annotated[float, Range(0)] = 0.1
    """Weight decay of the matrices; it is multiplied by the learning rate."""
    max_grad_norm: Positive = 1.0
    """The largest norm of the gradient; a larger one is scaled down to it. The gradient of the compression
    functions, which comes from another loss, is clipped separately."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.optimizer != "muon" and self.muon_learning_rate is not None:
            raise UserError(
                f"muon_learning_rate={self.muon_learning_rate} was given to optimizer={self.optimizer!r}, "
                f"which uses only learning_rate; omit it, or use optimizer='muon'."
            )

    @property
    def muon_peak(self) -> float:
        """The peak of Muon's learning rate."""
        return self.muon_learning_rate or DEFAULT_MUON_PEAK


@dataclass(frozen=True)
class EvaluationConfig(Checked):
    """What is measured during training. Raises ValueError for a value out of its range.

    Examples:
        >>> from memformers import EvaluationConfig
        >>> EvaluationConfig(evaluations=10).final_tokens
        0
    """

    evaluations: Count = 6
    """The number of evaluations on the held-out text, at equal intervals, the last one at the end of the
    training."""
    evaluation_tokens: NonNegativeInt | None = None
    """How many held-out tokens each evaluation reads, always the first ones; 0 for all. By default
    32,768, or fewer in a short run: in all, an eighth of the training tokens, but at least 512 each."""
    final_tokens: NonNegativeInt = 0
    """How many tokens the evaluation at the end reads, for the result; 0 for all."""
    patience: NonNegativeInt = 0
    """End the training after this many evaluations in a row without a lower loss; 0 for never."""
    log_every: Count = 10
    """Steps between two training records."""


@dataclass(frozen=True)
class CheckpointConfig(Checked):
    """Which checkpoints are saved. Raises ValueError for a value out of its range.

    Examples:
        >>> from memformers import CheckpointConfig
        >>> CheckpointConfig(checkpoint_every=1_000_000).keep_checkpoints
        2
    """

    checkpoint_every: NonNegativeInt = 0
    """Tokens between two checkpoints, in addition to the one at each evaluation; 0 for none."""
    checkpoint_minutes: Annotated[float, Range(0)] = 5.0
    """The longest time between two checkpoints, in minutes; 0 for no limit."""
    keep_checkpoints: Count = 2
    """How many of the newest checkpoints are kept, in addition to the one with the lowest held-out loss."""


@dataclass(frozen=True)
class StepConfig(Checked):
    """Where and how a step is computed. Raises ValueError for a value out of its range.

    Examples:
        >>> from memformers import StepConfig
        >>> StepConfig(device="cpu", precision="float32").parallel
        'single'
    """

    device: str = "auto"
    """Where to train, such as cpu or cuda:1; auto takes a GPU if there is one."""
    precision: Precision = "auto"
    """The precision of matrix products in training steps. With bfloat16 (autocast), weights, memory, norms,
    attention scores and losses stay in float32. auto takes bfloat16 if the device multiplies it faster, else
    float32. Evaluations always use float32."""
    compile: bool = False
    """Whether torch.compile builds the forward and backward pass of the training step; this takes minutes at
    the start."""
    parallel: Parallel = "single"
    """One process (single), or those that torchrun started (ddp): each holds the whole model and trains an
    equal share of the streams."""
    gradient_accumulation_steps: Count = 1
    """The number of parts of a batch that are computed one after the other before a step, to save memory."""
    activation_checkpointing: bool = False
    """Whether layers are computed again in the backward pass, to save the memory of their activations."""


@dataclass(frozen=True)
class TrainConfig:
    """One training run. Raises ValueError for a value out of its range, and for settings that don't fit.

    Examples:
        >>> from memformers import ModelConfig, OptimConfig, TrainConfig
        >>> model = ModelConfig(model="compressive")
        >>> optim = OptimConfig(learning_rate=2e-3)
        >>> config = TrainConfig(model=model, data="book.txt", max_tokens=1_000_000, optim=optim)
        >>> config.tokens_per_step  # 64 streams of segments of 64
        4096
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    """The network."""
    data: str = ""
    """The text to train on, a file or a folder. A text file; or documents, as a folder of texts, a .jsonl
    file, or a .parquet or .csv table; or token ids, as .npy or .bin; or a folder with train.*, valid.* and
    perhaps test.* of these; or "builtin" for the built-in play. Empty: Tiny Shakespeare from
    $MEMFORMERS_DATA, the user's cache or its public address, or the built-in play if none of them works."""
    tokenizer: str = "character"
    """What a token is: character, frequency, byte, word, bpe or a tokenizer.json. Characters are numbered in
    alphabetical order (character) or by frequency in the text (frequency), and words by frequency; bpe are
    parts of words, of which --vocab-size are learned from the training text. The path of a tokenizer.json is
    that of a tokenizer of Hugging Face's."""
    text: TextConfig = field(default_factory=TextConfig)
    """Other parts of the text, and how it is divided."""
    max_tokens: Count = 2_700_000
    """How long to train: the number of tokens seen."""
    batch_size: Count = 64
    """Parallel streams of text, B."""
    chunk_len: NonNegativeInt = 4096
    """The training text is cut into chunks of this many tokens. Each epoch reads them in a new random order,
    which depends on the seed. Memory is carried from one to the next; starting each with an empty memory made
    no significant difference (the default's loss was higher by 0.012, -0.005 and 0.007 nats per token). 0
    reads the text from start to end. Documents are not cut into chunks; they are always read in a random
    order that depends on the seed."""
    memory_warmup: Share | None = None
    """Fraction of the training over which the memory grows from no keys to all of them, in eight stages; with
    0, it has its full length from the start. If not given, 0.5; but 0 with compile, because each length
    would be compiled separately. While it grows, a selective memory keeps its newest positions.
    Evaluations always use the full memory (transformer-xl, compressive, selective)."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """The seed of the initial weights, of the order of the text and of dropout."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """How the weights are learned."""
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """What is measured during the training."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Which checkpoints are saved."""
    step: StepConfig = field(default_factory=StepConfig)
    """Where and in which precision a step is computed."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_name(self.tokenizer)
        reject_unused(self, self.model.model)
        if 0 < self.chunk_len < self.model.segment_len:
            raise UserError(
                f"chunk_len={self.chunk_len} is shorter than a segment of {self.model.segment_len}; use at "
                f"least {self.model.segment_len}, or 0 to read the text from front to back."
            )
        parts = self.step.gradient_accumulation_steps
        if self.batch_size % parts:
            raise UserError(
                f"batch_size={self.batch_size} streams can't be divided into "
                f"gradient_accumulation_steps={parts} equal parts; use a multiple of {parts}."
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens that a step learns from: S·B."""
        return self.model.segment_len * self.batch_size

    @property
    def memory_growth(self) -> float:
        """The fraction of the training over which the memory grows."""
        model = self.model.model
        if ":" in model and not applies_to("memory_warmup", model):  # a user's memory doesn't grow
            return 0.0
        if self.memory_warmup is not None:
            return self.memory_warmup
        return 0.0 if self.step.compile else DEFAULT_MEMORY_GROWTH

    @property
    def evaluation_tokens(self) -> int:
        """How many tokens each evaluation during the training reads; 0 for all."""
        if self.evaluation.evaluation_tokens is not None:
            return self.evaluation.evaluation_tokens
        # All evaluations together read at most an eighth of what the training reads.
        share = self.max_tokens // (8 * self.evaluation.evaluations)
        return max(min(MOST_EVALUATION_TOKENS, share), FEWEST_EVALUATION_TOKENS)


def describe_settings(config: TrainConfig) -> dict[str, Any]:
    """The facts about settings for ``run.json``, by dotted names: the values of those that may be left open,
    and which have no effect beside the others."""
    model = config.model
    resolved = {
        "memory_warmup": config.memory_growth,
        "evaluation.evaluation_tokens": config.evaluation_tokens,
        "optim.muon_learning_rate": config.optim.muon_peak,
        "model.position_features": model.position_features or model.d_model,
        "model.clamp_len": model.clamp_len or "none",
        "model.adaptive.d_embed": model.d_embed,
    }
    names = [setting.name for setting in fields(config)] + [f"model.{f.name}" for f in fields(model)]
    unused = [name for name in names if not applies_to(name.rpartition(".")[2], model.model)]
    if model.model == "compressive" and model.compression in WITHOUT_PARAMETERS:
        unused += ["model.compression_start", "model.bptt"]
    if model.positions != "sinusoidal":
        unused += ["model.position_features", "model.clamp_len"]
    if model.embedding != "adaptive":
        unused += [f"model.adaptive.{setting.name}" for setting in fields(model.adaptive)]
    if config.optim.optimizer != "muon":
        unused.append("optim.muon_learning_rate")
    return {"resolved_settings": resolved, "unused": unused}


def read_train_config(folder: Path) -> TrainConfig:
    """The config of the run in ``folder``. A tokenizer that was not made from the text is the file in this
    folder, wherever the folder is now."""
    config = config_from_dict(TrainConfig, read_json(folder / CONFIG), str(folder / CONFIG))
    if config.tokenizer.endswith(".json") and (folder / TOKENIZER).exists():
        return replace(config, tokenizer=str(folder / TOKENIZER))
    return config


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def read_preset(name: str) -> dict[str, Any]:
    """The training of one row of a paper's table: its ``config``, and what ``presets/`` says of it. Attention
    drops probabilities at the rate of all other activations, and every layer has its own u and v."""
    if name not in preset_names():
        raise UserError(f"preset={name!r} is unknown; use one of {', '.join(preset_names())}.")
    preset = read_json(PRESETS / f"{name}.json")
    return preset | {"config": config_from_dict(TrainConfig, preset["settings"], name)}
