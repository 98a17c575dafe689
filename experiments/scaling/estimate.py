"""What one of several ranks computes, holds and sends in a training step."""

from dataclasses import dataclass, replace

import torch

from experiments.scaling.counting import Counts, built, flops, kept_bytes, over_layers
from memformers.common.errors import UserError
from memformers.training.config import TrainConfig
from memformers.training.muon import Muon
from memformers.training.optimizers import build_optimizers

FLOAT32 = 4
"""Bytes of a number: of weights, gradients and moments in either precision."""


@dataclass(frozen=True)
class Estimate:
    """What one rank computes, holds and sends in a step with full memories, sizes in bytes; of several, the
    first, whose part of the weights is the largest under FSDP.

    Not counted: logits, gradients of activations on their way, temporaries, and what an allocator wastes.
    """

    parameters: int
    """Numbers to learn in the whole model."""
    tokens: int
    """Tokens of a step, over all ranks."""
    flops: Counts
    """Operations by part of the model, without those of layers that are computed again."""
    state_bytes: int
    """This rank's weights, their gradients, and what the optimizers keep: AdamW two moments and a count for
    each tensor, Muon one moment."""
    copy_bytes: int
    """The gradient once more in the buckets that DDP sends; the whole weights that FSDP gathers."""
    memory_bytes: int
    """Memories of its streams."""
    activation_bytes: int
    """What the forward pass keeps for the backward pass, and there a layer that is computed again."""
    sent_bytes: int
    """What it sends to other ranks."""

    @property
    def total_bytes(self) -> int:
        """All that is counted here."""
        return self.state_bytes + self.copy_bytes + self.memory_bytes + self.activation_bytes


def estimate(config: TrainConfig, ranks: int) -> Estimate:
    """What a training by ``config``, whose batch is taken in one part, asks of each of its ``ranks``.
    Raises UserError for ranks that can't share the batch."""
    if ranks < 1 or (ranks > 1 and config.parallel == "single"):
        raise UserError(f"{ranks} ranks can't train with parallel={config.parallel!r}; use ddp or fsdp.")
    if config.batch_size % ranks or config.accumulate > 1:
        raise UserError(
            f"batch_size={config.batch_size} streams in accumulate={config.accumulate} parts came for "
            f"{ranks} ranks; use a multiple of {ranks}, in one part."
        )
    streams = replace(config, batch_size=config.batch_size // ranks, parallel="single")
    kept, weights = over_layers(kept_bytes, streams), over_layers(lambda c: own_weights(c, ranks), config)
    whole, own = weights["whole"] * FLOAT32, weights["own"] * FLOAT32
    # In rings: an all-gather sends W - 1 parts, a reduce-scatter as many, an all-reduce is one of each. FSDP
    # gathers the weights once, and scatters the gradient.
    sent = 2 * (ranks - 1) * (own if config.parallel == "fsdp" else whole / ranks)
    return Estimate(
        parameters=weights["whole"],
        tokens=config.batch_size * config.model.segment_len,
        flops=over_layers(flops, streams),
        state_bytes=2 * own + (weights["moments"] + weights["tensors"]) * FLOAT32,
        copy_bytes={"single": 0, "ddp": whole, "fsdp": own * ranks}[config.parallel],
        memory_bytes=kept["memories"],
        activation_bytes=kept["kept"],
        sent_bytes=int(sent),
    )


def own_weights(config: TrainConfig, ranks: int) -> Counts:
    """How many numbers there are in the ``whole`` model, and how many of them the first rank's ``own``: with
    FSDP a part of each tensor, cut along its first axis, of which the first ranks get whole rows until there
    are no more. And how many ``moments`` the optimizers keep of them, and for how many ``tensors`` AdamW
    keeps a count."""
    parts = ranks if config.parallel == "fsdp" else 1
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
