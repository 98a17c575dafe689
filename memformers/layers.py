"""The feed-forward network and the layer that both memory transformers share."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memformers.attention import RelativeMultiHeadAttention
from memformers.attention_checks import check_dropout

Norm = Literal["pre", "post"]


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
        # Flat, since what is changed in place must not be a view: autograd would copy its gradient twice.
        hidden = self.layer1(x.flatten(0, -2)).relu_()  # [S·B, d_ff]
        return self.layer2(self.dropout(hidden)).view_as(x)


class MemoryLayer(nn.Module):
    """The one layer of every model here: attention over what is remembered, then feed-forward.

    With ``norm="pre"`` normalization comes before each of the two, so that memories, which are a layer's
    raw inputs, are normalized by the layer that reads them. With ``norm="post"``, the form of the
    original Transformer-XL, it comes after each sum, and attention reads inputs and memories as they are.

    A model's layer derives from this and says what is remembered: :class:`memformers.TransformerXLLayer`,
    memory; :class:`memformers.CompressiveTransformerLayer`, compressed memory and memory.
    """

    def __init__(
        self,
        *,
        d_model: int,
        self_attn: RelativeMultiHeadAttention,
        feed_forward: FeedForward,
        dropout_prob: float,
        norm: Norm = "pre",
    ):
        super().__init__()
        check_dropout(dropout_prob)
        check_norm(norm)
        if self_attn.d_model != d_model:
            raise ValueError(f"d_model={d_model}, but self_attn was built for {self_attn.d_model}.")
        self.d_model = d_model
        self.norm = norm
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.dropout = nn.Dropout(dropout_prob)
        self.norm_self_attn = nn.LayerNorm(d_model)
        self.norm_ff = nn.LayerNorm(d_model)

    def attend_and_transform(self, x: Tensor, past: list[Tensor], mask: Tensor | None) -> Tensor:
        """``x [S, B, D]`` after looking at ``past``, tensors ``[·, B, D]`` in order of time."""
        if self.norm == "post":
            x = self.norm_self_attn(x + self.dropout(self.attend(x, past, mask)))
            return self.norm_ff(x + self.dropout(self.feed_forward(x)))
        x = x + self.dropout(self.attend(x, past, mask))
        return x + self.dropout(self.feed_forward(self.norm_ff(x)))

    def attend(self, x: Tensor, past: list[Tensor], mask: Tensor | None) -> Tensor:
        """Attention of ``x [S, B, D]`` over ``past`` and itself, all normalized first in pre-norm."""
        past = [memory for memory in past if len(memory)]
        if past:
            return self.self_attn.over_memory(x, torch.cat(past), self.norm_before_attention, mask)
        z = self.attention_input(x)
        return self.self_attn(query=z, key=z, value=z, mask=mask)

    def attention_input(self, x: Tensor) -> Tensor:
        """What attention reads of the layer's input or memory ``x [·, B, D]``."""
        return x if self.norm == "post" else self.norm_self_attn(x)

    @property
    def norm_before_attention(self) -> nn.LayerNorm | None:
        """The norm between the layer's input and attention; post-norm has none."""
        return None if self.norm == "post" else self.norm_self_attn


def final_norm(layer: MemoryLayer) -> nn.Module:
    """What comes after the last of a stack of layers like ``layer``: in pre-norm a norm, since nothing
    has normalized the sums yet; in post-norm nothing."""
    return nn.Identity() if layer.norm == "post" else nn.LayerNorm(layer.d_model)


def check_norm(norm: str) -> None:
    """Raise ValueError for a place of the norm that isn't known."""
    if norm not in get_args(Norm):
        raise ValueError(f"norm={norm!r} is unknown; use 'pre' or 'post'.")


def sparing(layer: nn.Module, recompute: bool) -> Callable[..., Tensor]:
    """``layer``, from ``[S, B, D]`` to the same; or with ``recompute``, one that keeps only its inputs for
    the backward pass and computes the rest again there (Chen et al. 2016, arXiv 1604.06174)."""
    if recompute and torch.is_grad_enabled():
        return partial(checkpoint, layer, use_reentrant=False)
    return layer


def stack(layer: MemoryLayer, n_layers: int) -> nn.ModuleList:
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


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode within the block, and afterwards in the mode it came in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
