"""Conversion of the weights of the original Transformer-XL and of Hugging Face's ``transfo-xl``.

Sources of the layouts: Dai et al. 2019 (arXiv 1901.02860), the repository kimiyoung/transformer-xl and the
package transformers 4. Both are the same model. Their names differ by the prefix ``transformer.``, and they
differ in the order of the softmax's rows for rare clusters: ascending in transformers (as in the TensorFlow
code that the published weights come from), descending in the original's PyTorch code.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from memformers.models.config import ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.pretrained.transfo_xl_layout import check_shapes, config_of, plain_names, with_shared

OF_A_LAYER = {
    "dec_attn.o_net.weight": "self_attn.output.weight",
    "dec_attn.r_net.weight": "self_attn.position.weight",
    "dec_attn.r_w_bias": "self_attn.u",
    "dec_attn.r_r_bias": "self_attn.v",
    "dec_attn.layer_norm.weight": "norm_self_attn.weight",
    "dec_attn.layer_norm.bias": "norm_self_attn.bias",
    "pos_ff.CoreNet.0.weight": "feed_forward.layer1.weight",
    "pos_ff.CoreNet.0.bias": "feed_forward.layer1.bias",
    "pos_ff.CoreNet.3.weight": "feed_forward.layer2.weight",
    "pos_ff.CoreNet.3.bias": "feed_forward.layer2.bias",
    "pos_ff.layer_norm.weight": "norm_ff.weight",
    "pos_ff.layer_norm.bias": "norm_ff.bias",
}
"""The names within a layer, theirs and ours."""


def from_transfo_xl(state_dict: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> MemoryLM:
    """The language model of a Transformer-XL's state dict, in eval mode: same outputs, same memories.

    Takes the original repository's layout and that of Hugging Face's ``TransfoXLLMHeadModel``;
    [`memformers.load_weights`][] reads their files. ``config`` is the model's own, by the names in Hugging
    Face's ``config.json`` or the original's arguments. The weights alone don't show ``mem_len``, ``tgt_len``
    (our ``segment_len``), ``clamp_len``, ``same_length`` and ``dropout``, for which our defaults are used;
    nor ``pre_lnorm``, which is required with the original's layout and is false by default in Hugging Face's;
    nor ``cutoffs`` if ``div_val`` is 1, which are then required. With ``pre_lnorm``, memories contain the
    input of a layer before its norm, and the last layer's output is not normalized.

    Outputs agree in eval mode. In further training, the original also applies dropout to the sinusoids and to
    the last layer's output, and drops attention probabilities at a separate rate, ``dropatt``; ours drops
    them at the rate ``dropout``, and warns if the config has another ``dropatt``.

    Ours has more parameters in three places, which doesn't change the outputs before further training: the
    values and the output of attention have biases, initially 0; each layer has its own u and v, initially
    equal if the original shares them; and projections are tied for all rare clusters or for none.

    Both begin a text with an empty memory, as the original does; Hugging Face's begins with zeros, which it
    attends to, and a [`memformers.Memory`][] of zeros gives the same here.

    Raises ValueError for weights of another model, and names what is missing, unexpected or of another shape;
    also for a config that contradicts the weights or requires something that isn't implemented here.
    """
    ours, ours_config = converted(state_dict, config or {})
    model = MemoryLM(ours_config).to(ours["head.bias"].dtype)
    model.load_state_dict(ours)
    return model.eval()


def converted(
    state_dict: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], ModelConfig]:
    """The state dict and config of [`from_transfo_xl`][]'s model."""
    theirs, is_original = plain_names(state_dict)
    theirs = with_shared(theirs, config)
    ours_config = config_of(theirs, config, is_original)
    check_shapes(theirs, ours_config)
    ours_config = with_ties(theirs, ours_config)
    ours = vocabulary(theirs, ours_config, is_original)
    for i in range(ours_config.n_layers):
        layer = f"transformer.layers.{i}."
        ours |= {layer + our: theirs[f"layers.{i}.{their}"] for their, our in OF_A_LAYER.items()}
        query, key, value = theirs[f"layers.{i}.dec_attn.qkv_net.weight"].chunk(3)  # [D, D] each
        ours |= {layer + "self_attn.query.weight": query, layer + "self_attn.key.weight": key}
        ours |= {layer + "self_attn.value.weight": value}
        no_bias = value.new_zeros(len(value))
        ours |= {layer + "self_attn.value.bias": no_bias, layer + "self_attn.output.bias": no_bias}
    ours = {name: t.detach().clone(memory_format=torch.contiguous_format) for name, t in ours.items()}
    return ours, ours_config


def with_ties(theirs: Mapping[str, Tensor], config: ModelConfig) -> ModelConfig:
    """The config that says what embedding and softmax share, which is what is equal."""
    tables, rare = range(len(config.clusters.tables)), range(1, 1 + len(config.clusters.cutoffs))
    in_table = [f"{i}.weight" for i in tables]
    tie_weights = all(equal(theirs, f"word_emb.emb_layers.{i}", f"crit.out_layers.{i}") for i in in_table)
    tie_projections = config.clusters.maps(config.d_model) and all(
        equal(theirs, f"word_emb.emb_projs.{min(i, tables[-1])}", f"crit.out_projs.{i}") for i in rare
    )
    shared = replace(config.adaptive, tie_weights=tie_weights, tie_projections=bool(rare) and tie_projections)
    return replace(config, adaptive=shared)


def equal(theirs: Mapping[str, Tensor], name: str, other: str) -> bool:
    """Whether two of their tensors are the same."""
    return torch.equal(theirs[name], theirs[other])


def vocabulary(theirs: Mapping[str, Tensor], config: ModelConfig, is_original: bool) -> dict[str, Tensor]:
    """Embedding and head as ours."""
    tables, rare = range(len(config.clusters.tables)), len(config.clusters.cutoffs)
    ours = {f"embed.tables.{i}.weight": theirs[f"word_emb.emb_layers.{i}.weight"] for i in tables}
    ours["head.bias"] = torch.cat([theirs[f"crit.out_layers.{i}.bias"] for i in tables])
    if not config.adaptive.tie_weights:
        ours |= {f"head.words.{i}.weight": theirs[f"crit.out_layers.{i}.weight"] for i in tables}
    if rare:
        for part in ("weight", "bias"):
            rows = theirs[f"crit.cluster_{part}"]
            ours[f"head.rare.{part}"] = rows.flip(0) if is_original else rows
    if config.clusters.maps(config.d_model):
        ours |= {f"embed.maps.{i}.weight": theirs[f"word_emb.emb_projs.{i}"] for i in tables}  # [D, d_i]
        own = range(1 if config.adaptive.tie_projections else 1 + rare)
        ours |= {f"head.maps.{i}.weight": theirs[f"crit.out_projs.{i}"].mT for i in own}  # [d_i, D]
    return ours
