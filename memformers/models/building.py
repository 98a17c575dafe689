"""The modules of a language model from its config, and their first weights."""

from typing import Any

from torch import nn

from memformers.models.attention import RelativeMultiHeadAttention
from memformers.models.config import ModelConfig, NetworkConfig
from memformers.models.kinds import kind_of
from memformers.models.layers import FeedForward
from memformers.models.stack import MemoryStack, reset_parameters
from memformers.models.vocabulary import AdaptiveEmbedding, AdaptiveSoftmax


def build_embedding(config: ModelConfig) -> nn.Embedding | AdaptiveEmbedding:
    """Tokens ``[S, B]`` to ``[S, B, D]``."""
    if config.embedding == "adaptive":
        return AdaptiveEmbedding(config.clusters, config.d_model)
    return nn.Embedding(config.vocab_size, config.d_model)


def build_head(config: ModelConfig) -> nn.Linear | AdaptiveSoftmax:
    """Features ``[·, D]`` to logits or log-probabilities ``[·, vocab_size]``."""
    if config.embedding == "adaptive":
        tied = {name: getattr(config.adaptive, name) for name in ("tie_weights", "tie_projections")}
        return AdaptiveSoftmax(config.clusters, config.d_model, **tied)
    return nn.Linear(config.d_model, config.vocab_size)


def initialise_vocabulary(embed: nn.Embedding | AdaptiveEmbedding, head: nn.Linear | AdaptiveSoftmax) -> None:
    """Draw fresh weights for embedding and head; the head starts with nearly equal probabilities."""
    if isinstance(embed, AdaptiveEmbedding):
        embed.reset_parameters()
    else:
        nn.init.normal_(embed.weight, std=0.3)
    if isinstance(head, AdaptiveSoftmax):
        head.reset_parameters()
    else:
        nn.init.normal_(head.weight, std=0.02)
        nn.init.zeros_(head.bias)


def initialise_weights(transformer: nn.Module) -> None:
    """Let every module draw its weights anew, the compression functions after all others and their decoders
    last."""
    turns: list[list[nn.Module]] = [[], [], []]
    for name, module in transformer.named_modules():
        turns[("compress" in name.split(".")) + ("decoder" in name.split("."))].append(module)
    for modules in turns:
        reset_parameters(modules)


def build_transformer(config: NetworkConfig) -> MemoryStack:
    """The network of ``config``, without embedding and head."""
    attention = RelativeMultiHeadAttention(
        config.heads,
        config.d_model,
        config.dropout,
        positions=config.positions,
        max_positions=config.longest_attention,
        position_features=config.position_features,
        clamp_len=config.clamp_len,
        kernel=config.kernel,
    )
    parts: dict[str, Any] = {
        "d_model": config.d_model,
        "self_attn": attention,
        "feed_forward": FeedForward(config.d_model, config.d_ff, config.dropout),
        "dropout_prob": config.dropout,
        "norm": config.norm,
        "gate": config.gate,
    }
    return kind_of(config.model).build(config, parts)
