"""Conversion of the weights of labml-nn 0.5.1's Transformer-XL and Compressive Transformer."""

import re
from collections.abc import Mapping
from typing import Annotated

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Range, check_arguments
from memformers.convert.transfo_xl import abbreviate, strip_prefix

LABML_DISTANCES = 4096
"""labml-nn stores 2 · 4,096 relative positions a layer; index 4,096 − d is distance d."""
Distances = Annotated[int, Range(1, LABML_DISTANCES)]
RENAMED = (
    # The language models of labml-nn's experiments.
    (r"^src_embed\.", "embed."),
    (r"^generator\.", "head."),
    # Attention: u, and for each distance a vector r and a scalar s per head.
    (r"\.self_attn\.(query|key|value)\.linear\.", r".self_attn.\1."),
    (r"(^|\.)layers\.(\d+)\.compress\.", r"\1rules.\2.f_c."),
    (r"\.self_attn\.query_pos_bias$", ".self_attn.u"),
    (r"\.self_attn\.key_pos_embeddings$", ".self_attn.r"),
    (r"\.self_attn\.key_pos_bias$", ".self_attn.s"),
)
"""Their names and ours."""


@check_arguments
def from_labml(
    state_dict: Mapping[str, Tensor], *, max_positions: Distances = LABML_DISTANCES
) -> dict[str, Tensor]:
    """Convert a ``state_dict`` of labml-nn 0.5.1's ``TransformerXL`` or ``CompressiveTransformer``, or of the
    language models of its two experiments (to [`memformers.MemoryLM`][]), to ours of the same shape.
    Positions of the future are dropped: ``[2 · 4096, H, E]`` becomes ``[H, max_positions, E]``, as in the
    attention to load into. Raises ValueError for another model, and more positions than labml-nn has.

    Examples:
        >>> import torch
        >>> from memformers import from_labml
        >>> theirs = {"layers.0.self_attn.key_pos_embeddings": torch.zeros(2 * 4096, 4, 16)}
        >>> {name: list(tensor.shape) for name, tensor in from_labml(theirs, max_positions=128).items()}
        {'layers.0.self_attn.r': [4, 128, 16]}
    """
    if not any(name.endswith("self_attn.key_pos_embeddings") for name in state_dict):
        expected = "labml-nn's TransformerXL or CompressiveTransformer, with …self_attn.key_pos_embeddings"
        raise UserError(f"expected a state dict of {expected}, got one with {abbreviate(list(state_dict))}.")
    ours = {}
    distances = torch.arange(max_positions)
    for name, tensor in strip_prefix(state_dict).items():
        if name.endswith(("key_pos_embeddings", "key_pos_bias")):
            tensor = tensor[LABML_DISTANCES - distances]  # [max_positions, H, …]
            tensor = tensor.transpose(0, 1)  # [H, max_positions, …]
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        ours[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return ours
