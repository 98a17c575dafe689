"""What a training asks for, on paper: arithmetic, bytes held and bytes sent by one rank in one step.

The formulas follow the model term by term, and the tests compare each with models that are built and run.
Letters are those of the kernels' package; P = C + M positions are remembered, L is ``n_layers``, F ``d_ff``,
V ``vocab_size``, W the number of ranks. A step is an optimizer step in which the memories are full.
"""

from dataclasses import dataclass, fields
from math import prod

from memformers.language_model import ModelConfig
from memformers.training.activations import FLOAT32, kept_bytes, recomputed_bytes
from memformers.training.config import TrainConfig
from memformers.training.lengths import Lengths, full_lengths


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one rank in a step, forward and backward, of matrix products alone; a
    product of ``[m, k]`` and ``[k, n]`` has 2·m·k·n.

    Counted from the definition: every query meets all K keys, also those that the causal mask hides, and
    what a kernel computes twice to keep less counts once. Sums, norms, softmax and AdamW are left out.
    """

    projections: int
    """Queries, keys, values and output of the segment."""
    memory_projections: int
    """Keys and values of memory and compressed memory, projected again in every step."""
    positions: int
    """W_R of the sinusoids: for each part of the batch once, however many streams it has."""
    scores: int
    """Content scores, position scores, and sums of values."""
    feed_forward: int
    """Both maps."""
    compression: int
    """f_c."""
    reconstruction: int
    """The attention-reconstruction loss."""
    head: int
    """Logits."""
    recomputed: int
    """The layers' forward pass once more, with activation_checkpointing."""

    @property
    def total(self) -> int:
        """Of all parts."""
        return sum(getattr(self, part.name) for part in fields(self))


@dataclass(frozen=True)
class Estimate:
    """What one rank computes, holds and sends in a step; of several, the first, whose part of the weights is
    the largest under FSDP. Sizes are in bytes.

    Not counted: logits, gradients of activations on their way, temporaries, and what an allocator wastes.
    """

    parameters: int
    """Numbers to learn in the whole model."""
    tokens: int
    """Tokens of a step, over all ranks."""
    flops: Flops
    weight_bytes: int
    """This rank's part of the weights, in float32 in either precision."""
    gradient_bytes: int
    """Their gradients."""
    optimizer_bytes: int
    """AdamW's two moments of them, and a count for each tensor."""
    working_bytes: int
    """What the way of sharing needs beside: with DDP, the gradient once more in the buckets that are sent;
    with FSDP, the whole weights, and with ``accumulate`` parts their whole gradient."""
    memory_bytes: int
    """Memory of its streams, as values."""
    c_mem_bytes: int
    """Compressed memory of its streams, as values."""
    memory_storage_bytes: int
    """What both take between steps. A memory no longer than a segment is a view of that segment's inputs and
    holds all S of them; likewise compressed slots no more than the n made last. Longer ones, and all with
    ``accumulate``, are copies that hold what they show."""
    activation_bytes: int
    """What the forward pass of a part of its streams keeps for the backward pass."""
    recomputed_bytes: int
    """What one layer keeps beside its input while it is computed again, with activation_checkpointing."""
    sent_bytes: int
    """What it sends to other ranks."""

    @property
    def state_bytes(self) -> int:
        """Weights, gradients and what AdamW remembers."""
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    @property
    def total_bytes(self) -> int:
        """All that is counted here."""
        kept = self.activation_bytes + self.recomputed_bytes
        return self.state_bytes + self.working_bytes + self.memory_storage_bytes + kept


def estimate(config: TrainConfig, ranks: int) -> Estimate:
    """What a training by ``config`` asks of each of so many ``ranks``.

    Raises ValueError for ranks that can't share the batch, and for kernels whose activations nobody has
    put into a formula: augmented, and fused with dropout, which it doesn't have.
    """
    check(config, ranks)
    model, lengths = config.model, full_lengths(config.model)
    shapes = parameter_shapes(model)
    parameters, own = sum(map(prod, shapes)), own_numbers(config, ranks)
    streams = config.batch_size // ranks
    part = streams // config.accumulate
    slot = streams * model.d_model * model.n_layers * FLOAT32  # one position of all layers' memory
    held = (
        lengths.P
        if config.accumulate > 1
        else in_storage(lengths.M, lengths.S) + in_storage(lengths.C, lengths.n)
    )
    return Estimate(
        parameters=parameters,
        tokens=config.batch_size * lengths.S,
        flops=flops(config, lengths, part),
        weight_bytes=own * FLOAT32,
        gradient_bytes=own * FLOAT32,
        optimizer_bytes=(2 * own + len(shapes)) * FLOAT32,
        working_bytes=working_bytes(config, ranks),
        memory_bytes=lengths.M * slot,
        c_mem_bytes=lengths.C * slot,
        memory_storage_bytes=held * slot,
        activation_bytes=kept_bytes(config, lengths, part),
        recomputed_bytes=recomputed_bytes(config, lengths, part),
        sent_bytes=sent_bytes(config, ranks),
    )


def in_storage(kept: int, new: int) -> int:
    """Positions held for ``kept`` ones, the last ``new`` of which came in one tensor: it is shown where it
    suffices, and all are copied where not."""
    return max(kept, new) if kept else 0


def check(config: TrainConfig, ranks: int) -> None:
    """Raise ValueError for what can't be estimated."""
    if ranks < 1 or (ranks > 1 and config.parallel == "single"):
        raise ValueError(f"{ranks} ranks can't train with parallel={config.parallel!r}; use ddp or fsdp.")
    if config.batch_size % (ranks * config.accumulate):
        raise ValueError(
            f"batch_size={config.batch_size} streams can't be shared equally by {ranks} ranks in accumulate="
            f"{config.accumulate} parts; use a multiple of {ranks * config.accumulate}."
        )
    model, kernel = config.model, config.model.kernel
    if model.embedding != "plain" or model.norm != "pre" or model.equal_spans:
        raise ValueError(
            f"embedding={model.embedding!r} with norm={model.norm!r} and equal_spans={model.equal_spans} is "
            f"not estimated; use plain, pre and False."
        )
    if kernel == "augmented" or (kernel == "fused" and config.model.dropout):
        raise ValueError(
            f"what kernel={kernel!r} with dropout={config.model.dropout} keeps is not estimated; use naive, "
            f"or fused without dropout."
        )


def parameter_shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """The shape of every parameter of a :class:`memformers.MemoryLM`."""
    D, F, H, V, E = model.d_model, model.d_ff, model.heads, model.vocab_size, model.d_model // model.heads
    query, key, value, output = [(D, D)], [(D, D)], [(D, D), (D,)], [(D, D), (D,)]
    attention = [*query, *key, *value, *output, (H, E)]  # u
    if model.positions == "learned":
        longest = model.longest_attention
        attention += [(H, longest, E), (H, longest)]  # r, s
    else:
        attention += [(D, model.position_features or D), (H, E)]  # W_R, v
    feed_forward: list[tuple[int, ...]] = [(F, D), (F,), (D, F), (D,)]
    norm: list[tuple[int, ...]] = [(D,), (D,)]
    layer = [*attention, *feed_forward, *norm, *norm]
    if model.model == "compressive":
        layer += [(D, D, model.compression_rate), (D,)]  # f_c
    return [(V, D), *layer * model.n_layers, *norm, (V, D), (V,)]


def own_numbers(config: TrainConfig, ranks: int) -> int:
    """How many numbers of the weights the first rank keeps: with FSDP a part of each, cut along its first
    axis, of which the first ranks get whole rows until there are no more."""
    parts = ranks if config.parallel == "fsdp" else 1
    return sum(-(-shape[0] // parts) * prod(shape[1:]) for shape in parameter_shapes(config.model))


def working_bytes(config: TrainConfig, ranks: int) -> int:
    """What DDP and FSDP hold beside weights, gradients and the optimizer's state."""
    whole = sum(map(prod, parameter_shapes(config.model))) * FLOAT32
    if config.parallel == "fsdp":
        # All parts are gathered as long as the longest.
        gathered = own_numbers(config, ranks) * ranks * FLOAT32
        return gathered + (whole if config.accumulate > 1 else 0)
    return whole if config.parallel == "ddp" else 0


def sent_bytes(config: TrainConfig, ranks: int) -> int:
    """What each rank sends in a step, in rings: an all-gather sends W − 1 parts, a reduce-scatter too, and an
    all-reduce is both, 2(W − 1)/W of the gradient.

    DDP reduces the gradient with the last part of a batch. FSDP gathers the weights for each part, and
    scatters the gradient with the last. Numbers for the log and the norm of the gradient are not counted.
    """
    if config.parallel == "fsdp":
        return (config.accumulate + 1) * (ranks - 1) * own_numbers(config, ranks) * FLOAT32
    gradient = sum(map(prod, parameter_shapes(config.model))) * FLOAT32
    return 2 * (ranks - 1) * gradient // ranks


def flops(config: TrainConfig, lengths: Lengths, B: int) -> Flops:
    """Those of a rank that takes ``config.accumulate`` parts of ``B`` streams.

    Behind a product of two matrices, the backward pass has one of the same size for each that takes a
    gradient. Memory, sinusoids and what is compressed take none, nor do the weights in the reconstruction
    loss: it passes only through keys and values of the new slots.
    """
    model = config.model
    S, P, K, n, c = lengths.S, lengths.P, lengths.K, lengths.n, model.compression_rate
    D, F, V = model.d_model, model.d_ff, model.vocab_size
    features = (model.position_features or D) if model.positions == "sinusoidal" else 0
    once = model.n_layers * config.accumulate

    projections = 4 * 2 * S * B * D * D
    memory_projections = 2 * 2 * P * B * D * D
    positions = 2 * K * features * D
    scores = 3 * 2 * B * S * K * D
    second = 2 * S * B * F * D
    first = second
    repeated = 0
    if config.activation_checkpointing:
        # It stops when the last tensor is there that the backward pass needs: without dropout, before the
        # layer's last product.
        last = second if model.dropout else 0
        repeated = projections + memory_projections + positions + scores + first + last
    return Flops(
        projections=3 * projections * once,
        memory_projections=2 * memory_projections * once,
        positions=2 * positions * once,
        scores=3 * scores * once,
        feed_forward=3 * (first + second) * once,
        compression=2 * (2 * n * c * B * D * D) * once,
        reconstruction=reconstruction_flops(S, n, n * c, B, D) * once,
        head=3 * (2 * S * B * D * V) * config.accumulate,
        recomputed=repeated * once,
    )


def reconstruction_flops(S: int, n: int, old: int, B: int, D: int) -> int:
    """One layer's reconstruction loss for n slots made of so many ``old`` positions."""
    if not n:
        return 0
    queries, attention_of_old = 2 * S * B * D * D, 2 * 2 * S * old * B * D
    maps_of_old, maps_of_new = (2 * 2 * length * B * D * D for length in (old, n))
    attention_of_new = 2 * S * n * B * D  # scores, and as much for sums of values
    forward = queries + maps_of_old + attention_of_old + maps_of_new + 2 * attention_of_new
    return forward + maps_of_new + 3 * attention_of_new  # gradients of keys, values and probabilities
