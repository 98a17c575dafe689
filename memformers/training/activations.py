"""Bytes that a forward pass keeps for its backward pass, tensor by tensor.

What autograd keeps follows from each operation's derivative: a linear map keeps its input, for the weight's
gradient, and softmax its output. Weights themselves are not counted, but copies of them are.
"""

from dataclasses import dataclass

from memformers.training.config import TrainConfig
from memformers.training.lengths import Lengths

FLOAT32, INT64 = 4, 8
"""Bytes of a number."""


@dataclass(frozen=True)
class Widths:
    """Bytes of a number in what is kept."""

    operand: int
    """Of a matrix product's operand."""
    softmax: int
    """Of attention's probabilities before dropout."""
    on_cpu: bool

    def mask(self, dropped: int) -> int:
        """Of the mask that dropout keeps for a tensor of so wide numbers."""
        return dropped if self.on_cpu else 1


def widths(config: TrainConfig) -> Widths:
    """Those of autocast: on a GPU it computes softmax in float32, on CPU in the type of the scores, which a
    learned scalar in float32 has widened."""
    operand, on_cpu = 2 if config.precision == "bfloat16" else FLOAT32, config.device == "cpu"
    narrow = on_cpu and config.model.positions == "sinusoidal"
    return Widths(operand, operand if narrow else FLOAT32, on_cpu)


def kept_bytes(config: TrainConfig, lengths: Lengths, B: int) -> int:
    """What is kept of a segment of ``B`` streams when its forward pass has ended."""
    S, D = lengths.S, config.model.d_model
    layer = layer_bytes(config, lengths, B)
    if config.activation_checkpointing:
        layer = S * B * D * FLOAT32  # its input
    if config.model.model == "compressive":
        layer += reconstruction_bytes(config, lengths, B)
    return config.model.n_layers * layer + ends_bytes(config, lengths, B)


def recomputed_bytes(config: TrainConfig, lengths: Lengths, B: int) -> int:
    """What a layer that is computed again in the backward pass keeps beside its input; else 0."""
    if not config.activation_checkpointing:
        return 0
    return layer_bytes(config, lengths, B) - lengths.S * B * config.model.d_model * FLOAT32


def layer_bytes(config: TrainConfig, lengths: Lengths, B: int) -> int:
    """Of one pre-norm layer."""
    model, wide = config.model, widths(config)
    S, D, F, w = lengths.S, model.d_model, model.d_ff, wide.operand
    norms = 2 * norm_bytes(S, B, D)
    maps = 2 * S * B * D * w  # inputs of the attention's output and of the feed-forward network
    hidden = S * B * F * w  # after ReLU, which is computed in place
    dropout = 0
    if model.dropout:
        dropout = 2 * S * B * D * wide.mask(w) + S * B * F * (wide.mask(w) + w)
    copies = cast(config, D * D + 2 * D * F)
    attention = projection_bytes(config, lengths, B) + attention_bytes(config, lengths, B)
    return norms + maps + hidden + dropout + copies + attention


def norm_bytes(length: int, B: int, D: int) -> int:
    """A LayerNorm's input ``[length, B, D]``, and mean and inverse deviation of each position."""
    return length * B * (D + 2) * FLOAT32


def cast(config: TrainConfig, weights: int) -> int:
    """Copies of so many weights that autocast makes, and keeps; none in float32."""
    return weights * widths(config).operand if config.precision == "bfloat16" else 0


def projection_bytes(config: TrainConfig, lengths: Lengths, B: int) -> int:
    """Inputs of the maps to queries, keys and values, and of W_R."""
    S, P, D, w = lengths.S, lengths.P, config.model.d_model, widths(config).operand
    casts = config.precision == "bfloat16"  # each map makes a copy of its input
    segment = (3 if casts else 1) * S * B * D * w
    past = (2 if casts else 1) * P * B * D * w
    # Over memory, the norm's scale and shift are moved into the three maps.
    folded = 3 * D * D * w + cast(config, D) if P else 0
    position = 0
    if config.model.positions == "sinusoidal":
        position = lengths.K * (config.model.position_features or D) * w
    return segment + past + folded + cast(config, 3 * D * D) + position


def attention_bytes(config: TrainConfig, lengths: Lengths, B: int) -> int:
    """Of scores, softmax and sums of values: by the fused kernel, or else by the naive one."""
    model, wide = config.model, widths(config)
    S, K, H, D, w = lengths.S, lengths.K, model.heads, model.d_model, wide.operand
    keys_and_values = 2 * K * B * D * w
    if model.kernel == "fused":
        queries, sums = S * B * D * w, B * H * S * FLOAT32  # its output is counted as the output map's input
        if model.positions == "learned":
            return queries + keys_and_values + sums + D * FLOAT32  # v as zeros; r and s are weights
        return queries + keys_and_values + sums + K * (D + H) * w  # r, and s as zeros
    queries = 2 * S * B * D * w  # once with u for the content, once with v or without for the position
    r, causal = K * D * w, S * K
    scores = B * H * S * K
    probabilities = scores * wide.softmax
    if model.dropout:
        probabilities += scores * (wide.mask(wide.softmax) + w)
    elif wide.softmax != w:
        probabilities += scores * w  # a copy, to be multiplied with the values
    return queries + keys_and_values + r + causal + probabilities


def ends_bytes(config: TrainConfig, lengths: Lengths, B: int) -> int:
    """Of what comes before the layers and after them: embedding, last norm, head and loss."""
    S, D, V, wide = lengths.S, config.model.d_model, config.model.vocab_size, widths(config)
    embedding = S * B * (INT64 + (D * wide.mask(FLOAT32) if config.model.dropout else 0))
    head = S * B * D * wide.operand + cast(config, D * V)
    loss = S * B * (V * FLOAT32 + INT64) + FLOAT32  # log-probabilities, targets, and how many there are
    return embedding + norm_bytes(S, B, D) + head + loss


def reconstruction_bytes(config: TrainConfig, lengths: Lengths, B: int) -> int:
    """Of one layer's compression and its reconstruction loss, whose gradient reaches f_c alone."""
    S, n, c, D = lengths.S, lengths.n, config.model.compression_rate, config.model.d_model
    if not n:
        return 0
    w = widths(config).operand
    compression = n * c * B * D * w
    keys_and_values = norm_bytes(n, B, D) + 2 * n * B * D * w + cast(config, 2 * D * D)
    attention = 2 * S * B * D * w + B * config.model.heads * S * FLOAT32  # queries, output, sums of exponents
    errors = (2 if config.precision == "bfloat16" else 1) * S * B * D * FLOAT32
    return compression + keys_and_values + attention + errors
