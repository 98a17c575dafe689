"""The feed-forward network and the pre-norm layer that both memory transformers share."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from memformers.attention import RelativeMultiHeadAttention, check_dropout


class FeedForward(nn.Module):
    """FFN(x) = W₂ · dropout(max(0, W₁x + b₁)) + b₂, position by position: ``[S, B, D]`` to the same.

    ``d_ff`` is the width of the hidden layer. Source: Vaswani et al. 2017, section 3.3.
    """

    def __init__(self, d_model: int, d_ff: int, dropout_prob: float = 0.1):
        super().__init__()
        check_dropout(dropout_prob)
        if d_model < 1 or d_ff < 1:
            raise ValueError(f"d_model={d_model} and d_ff={d_ff} must both be at least 1.")
        self.layer1 = nn.Linear(d_model, d_ff)
        self.layer2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout_prob)

    def forward(self, x: Tensor) -> Tensor:
        """``[S, B, D]`` to ``[S, B, D]``."""
        hidden = self.dropout(self.layer1(x).relu_())  # [S, B, d_ff]
        return self.layer2(hidden)


class PreNormLayer(nn.Module):
    """The one layer of every model here: attention over what is remembered, then feed-forward.

    Normalization comes before each of the two ("pre-norm"), so that memories, which are a layer's
    raw inputs, are normalized by the layer that reads them. A model's layer derives from this and
    says what is remembered: :class:`memformers.TransformerXLLayer`, memory;
    :class:`memformers.CompressiveTransformerLayer`, compressed memory and memory.
    """

    def __init__(
        self,
        *,
        d_model: int,
        self_attn: RelativeMultiHeadAttention,
        feed_forward: FeedForward,
        dropout_prob: float,
    ):
        super().__init__()
        check_dropout(dropout_prob)
        if self_attn.d_model != d_model:
            raise ValueError(f"d_model={d_model}, but self_attn was built for {self_attn.d_model}.")
        self.d_model = d_model
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout_prob)
        self.norm_self_attn = nn.LayerNorm(d_model)
        self.norm_ff = nn.LayerNorm(d_model)

    def attend_and_transform(self, x: Tensor, past: list[Tensor], mask: Tensor | None) -> Tensor:
        """``x [S, B, D]`` after looking at ``past``, tensors ``[·, B, D]`` in order of time."""
        past = [memory for memory in past if len(memory)]
        if past:
            attended = self.self_attn.over_memory(x, torch.cat(past), self.norm_self_attn, mask)
        else:
            z = self.norm_self_attn(x)
            attended = self.self_attn(query=z, key=z, value=z, mask=mask)
        x = x + self.dropout(attended)
        return x + self.dropout(self.feed_forward(self.norm_ff(x)))


def stack(layer: PreNormLayer, n_layers: int) -> nn.ModuleList:
    """``n_layers`` layers built like ``layer``, each with its own fresh weights.

    A plain copy would start every layer from the same weights. Modules that have no
    ``reset_parameters`` keep the copied ones.
    """
    if n_layers < 1:
        raise ValueError(f"n_layers={n_layers} makes no model; use at least 1.")
    layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(n_layers))
    reset_parameters(layers.modules())
    return layers


def reset_parameters(modules: Iterable[nn.Module]) -> None:
    """Let each module that has a ``reset_parameters`` draw its weights anew."""
    for module in modules:
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()
