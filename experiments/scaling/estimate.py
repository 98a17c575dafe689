"""The compute, memory and communication of one of several ranks in a training step."""

from dataclasses import dataclass

import torch

from experiments.scaling.counting import Counts, built, flops, kept_bytes, over_layers
from memformers.common.errors import UserError
from memformers.common.fields import changed
from memformers.training.config import TrainConfig
from memformers.training.optimizers import Muon, build_optimizers

FLOAT32 = 4
"""Bytes of a number in weights, gradients and moments, in both precisions."""


@dataclass(frozen=True)
class Estimate:
    """The compute, memory and communication of one rank in a step with full memories, sizes in bytes; of
    several ranks, the first, whose part of the weights is the largest under FSDP.

    Not counted: logits, gradients of activations during the backward pass, temporaries, and unused memory of
    the allocator.
    """

    parameters: int
    """The number of parameters of the whole model."""
    tokens: int
    """Tokens of a step over all ranks."""
    flops: Counts
    """Operations by part of the model, without those of layers that are computed again."""
    state_bytes: int
    """This rank's weights, their gradients, and the state of the optimizers: two moments and a count for each
    tensor with AdamW, one moment with Muon."""
    copy_bytes: int
    """A copy of the gradient in the buckets that DDP sends, or the whole weights that FSDP gathers."""
    memory_bytes: int
    """Memories of its streams."""
    activation_bytes: int
    """Tensors that the forward pass keeps for the backward pass, and those of a layer that is computed
    again."""
    sent_bytes: int
    """Bytes that it sends to other ranks."""

    @property
    def total_bytes(self) -> int:
        """The sum of all sizes that are counted here."""
        return self.state_bytes + self.copy_bytes + self.memory_bytes + self.activation_bytes


def estimate(config: TrainConfig, ranks: int) -> Estimate:
    """The estimate for each of the ``ranks`` of a training run with ``config``, whose batch is processed in
    one part. Raises UserError for ranks that can't share the batch."""
    if ranks < 1 or (ranks > 1 and config.step.parallel == "single"):
        raise UserError(f"{ranks} ranks can't train with parallel={config.step.parallel!r}; use ddp or fsdp.")
    if config.batch_size % ranks or config.step.accumulate > 1:
        raise UserError(
            f"expected a multiple of {ranks} streams in one part, for {ranks} ranks, got "
            f"batch_size={config.batch_size} and accumulate={config.step.accumulate}."
        )
    streams = changed(config, batch_size=config.batch_size // ranks, parallel="single")
    kept, weights = over_layers(kept_bytes, streams), over_layers(lambda c: own_weights(c, ranks), config)
    whole, own = weights["whole"] * FLOAT32, weights["own"] * FLOAT32
    # In rings: an all-gather and a reduce-scatter send W - 1 parts each, and an all-reduce is both. FSDP
    # gathers the weights once, and scatters the gradient.
    sent = 2 * (ranks - 1) * (own if config.step.parallel == "fsdp" else whole / ranks)
    return Estimate(
        parameters=weights["whole"],
        tokens=config.batch_size * config.model.segment_len,
        flops=over_layers(flops, streams),
        state_bytes=2 * own + (weights["moments"] + weights["tensors"]) * FLOAT32,
        copy_bytes={"single": 0, "ddp": whole, "fsdp": own * ranks}[config.step.parallel],
        memory_bytes=kept["memories"],
        activation_bytes=kept["kept"],
        sent_bytes=int(sent),
    )


def own_weights(config: TrainConfig, ranks: int) -> Counts:
    """The number of parameters of the ``whole`` model and of the first rank's ``own``. With FSDP, a rank has
    a part of each tensor, divided along its first axis; the first ranks get whole rows until there are no
    more. Also the number of ``moments`` that the optimizers keep for them, and of ``tensors`` for which AdamW
    keeps a count."""
    parts = ranks if config.step.parallel == "fsdp" else 1
    with torch.device("meta"):
        model = built(config)
        moments = {
            weight: 1 if isinstance(optimizer, Muon) else 2
            for optimizer in build_optimizers(model, config)
            for group in optimizer.param_groups
            for weight in group["params"]
        }
    own = {weight: -(-len(weight) // parts) * weight[0].numel() for weight in moments}
    return Counts(
        tensors=sum(kept == 2 for kept in moments.values()),
        whole=sum(weight.numel() for weight in moments),
        own=sum(own.values()),
        moments=sum(kept * own[weight] for weight, kept in moments.items()),
    )
