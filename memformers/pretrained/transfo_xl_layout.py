"""The names and shapes of a Transformer-XL state dict, as the original repository and Hugging Face's
``transfo-xl`` have them, and the model they are of."""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.models.config import AdaptiveConfig, ModelConfig
from memformers.models.layers import Norm
from memformers.pretrained.weights_file import few

Config = Mapping[str, Any]
"""Of Hugging Face's ``config.json``, or the original's arguments."""
WITHOUT_COUNTERPART = {
    "attn_type": 0,
    "ext_len": 0,
    "layer_norm_epsilon": 1e-5,
}
"""Settings that have only one possible value here."""


def plain_names(state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """The state dict without Hugging Face's prefix and without the fixed sinusoids' rates, and whether it is
    of the original repository. Raises ValueError for the weights of another model."""
    prefixed = any(name.startswith("transformer.word_emb.") for name in state_dict)
    state = {name.removeprefix("transformer.") if prefixed else name: t for name, t in state_dict.items()}
    if not any(name.startswith("layers.") and ".dec_attn." in name for name in state):
        raise UserError(
            "a state dict of Transformer-XL was expected, with layers.0.dec_attn.… or transformer.layers.0."
            f"dec_attn.…; this one has {few([str(name) for name in state_dict]) or 'nothing'}."
        )
    state.pop("pos_emb.inv_freq", None)
    return state, not prefixed


def with_shared(state: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The state dict with all names of a tensor that has several, since some formats keep only one of them;
    and with u and v for each layer, if all layers share them."""
    state = dict(state)
    clusters = range(1 + rare_clusters(state))
    tables = [f"{i}.weight" for i in clusters]
    if config.get("tie_weight", config.get("tie_word_embeddings", True)):
        for i in tables:
            share(state, [f"word_emb.emb_layers.{i}", f"crit.out_layers.{i}"])
    tied = config.get("tie_projs", [False, *clusters])
    if not isinstance(tied, list | tuple):
        raise UserError(f"the config's tie_projs={tied!r} must be a list of true and false.")
    several = "word_emb.emb_layers.1.weight" in state
    maps = [[f"word_emb.emb_projs.{i}", f"crit.out_projs.{i}"] for i in clusters if any(tied[i : i + 1])]
    one_map = ["word_emb.emb_projs.0", *(out for _, out in maps)]
    for names in maps if several else [one_map]:
        share(state, names)
    for bias in ("r_w_bias", "r_r_bias"):
        if bias in state or config.get("untie_r") is False:
            share(state, [bias, *(f"layers.{i}.dec_attn.{bias}" for i in range(depth(state)))])
            state.pop(bias, None)
    return state


def share(state: dict[str, Tensor], names: Sequence[str]) -> None:
    """Assign the tensor of the first existing name to the names that are missing."""
    there = [state[name] for name in names if name in state]
    for name in names if there else ():
        state.setdefault(name, there[0])


def rare_clusters(state: Mapping[str, Tensor]) -> int:
    """The number of clusters without the first one."""
    return state["crit.cluster_bias"].numel() if "crit.cluster_bias" in state else 0


def depth(state: Mapping[str, Tensor]) -> int:
    """The number of layers."""
    return 1 + max(int(found[1]) for name in state if (found := re.match(r"layers\.(\d+)\.", name)))


def config_of(state: Mapping[str, Tensor], config: Config, is_original: bool) -> ModelConfig:
    """Our config of the model that has this state dict. Raises ValueError if ``config`` contradicts the
    weights, requires something that isn't implemented here, or lacks a setting that the weights don't show.
    Warns of a ``dropatt`` that training would not use."""
    for name, only in WITHOUT_COUNTERPART.items():
        if config.get(name, only) != only:
            raise UserError(f"{name}={config[name]} is not supported here; only {name}={only} is.")
    _, d_embed = shape(state, "word_emb.emb_layers.0.weight", 2)
    heads, d_head = shape(state, "layers.0.dec_attn.r_w_bias", 2)
    (d_model,) = shape(state, "layers.0.dec_attn.layer_norm.weight", 1)
    d_ff, _ = shape(state, "layers.0.pos_ff.CoreNet.0.weight", 2)
    if heads * d_head != d_model:
        raise UserError(
            f"n_head={heads} times d_head={d_head} must equal d_model={d_model} here; it doesn't."
        )
    vocab_size, cutoffs, div_val = clusters_of(state, config)
    found = {
        "vocab_size": vocab_size,
        "n_token": vocab_size,
        "d_model": d_model,
        "d_embed": d_embed,
        "d_inner": d_ff,
        "d_head": d_head,
        "n_head": heads,
        "n_layer": depth(state),
    }
    for name, value in found.items():
        if config.get(name, value) != value:
            raise UserError(f"the config says {name}={config[name]}, but the weights have {value}.")
    defaults, clamp_len = ModelConfig(), integer(config, "clamp_len", -1)
    dropout = config.get("dropout", defaults.dropout)
    if not isinstance(dropout, int | float):
        raise UserError(f"the config's dropout={dropout!r} must be a number.")
    if config.get("dropatt", dropout) != dropout:
        warnings.warn(
            f"dropatt={config['dropatt']} is not used: if the training continues, dropout={dropout} applies "
            f"to attention probabilities too. Outputs in eval mode are those of the original.",
            stacklevel=4,
        )
    return ModelConfig(
        model="transformer-xl",
        vocab_size=vocab_size,
        d_model=d_model,
        heads=heads,
        n_layers=depth(state),
        d_ff=d_ff,
        dropout=dropout,
        norm=norm_of(config, is_original),
        positions="sinusoidal",
        clamp_len=clamp_len if clamp_len > 0 else None,
        segment_len=integer(config, "tgt_len", defaults.segment_len),
        mem_len=integer(config, "mem_len", defaults.layer_lengths[0].mem_len),
        same_length=bool(config.get("same_length", False)),
        embedding="adaptive",
        adaptive=AdaptiveConfig(cutoffs=cutoffs, div_val=div_val, d_embed=d_embed),
    )


def norm_of(config: Config, is_original: bool) -> Norm:
    """Where the model normalizes: ``pre_lnorm``, which the weights don't show. In Hugging Face's format, a
    missing ``pre_lnorm`` means post-norm. With the original's weights, a missing ``pre_lnorm`` is a
    UserError."""
    pre_lnorm = config.get("pre_lnorm", None if is_original else False)
    if not isinstance(pre_lnorm, bool):
        came = f"the config's pre_lnorm={pre_lnorm!r}" if "pre_lnorm" in config else "no pre_lnorm"
        raise UserError(
            f"the weights don't show whether this model normalizes before each sublayer (pre_lnorm=True) or "
            f"after each sum (False), and {came} came; give it, as in config={{'pre_lnorm': False}}."
        )
    return "pre-without-final" if pre_lnorm else "post"


def integer(config: Config, name: str, default: int) -> int:
    """A whole number of the config; else ValueError."""
    value = config.get(name, default)
    if not isinstance(value, int):
        raise UserError(f"the config's {name}={value!r} must be a whole number.")
    return value


def clusters_of(state: Mapping[str, Tensor], config: Config) -> tuple[int, tuple[int, ...], int]:
    """Vocabulary, cutoffs and ``div_val``, from the tables of word vectors, or from ``config`` where all
    have one width and so one table."""
    tables: list[tuple[int, ...]] = []
    while f"word_emb.emb_layers.{len(tables)}.weight" in state:
        tables.append(shape(state, f"word_emb.emb_layers.{len(tables)}.weight", 2))
    ends = torch.tensor([words for words, _ in tables]).cumsum(0).tolist()
    vocab_size, widths = ends[-1], [width for _, width in tables]
    given = config.get("cutoffs", ())
    if not isinstance(given, list | tuple) or not all(isinstance(cutoff, int) for cutoff in given):
        raise UserError(f"the config's cutoffs={given!r} must be a list of token ids.")
    given = tuple(cutoff for cutoff in given if cutoff != vocab_size)
    if len(tables) > 1:
        cutoffs = tuple(ends[:-1])
        fitting = range(2, widths[0] + 1)
        div_val = next((v for v in fitting if widths == [widths[0] // v**i for i in range(len(widths))]), 0)
        if not div_val or config.get("div_val", div_val) != div_val:
            raise UserError(f"the widths {widths} of word vectors don't fit div_val={config.get('div_val')}.")
    else:
        cutoffs = given
        # Without clusters it shows only in that vectors are mapped which have the right width already.
        square = "word_emb.emb_projs.0" in state and len(set(state["word_emb.emb_projs.0"].shape)) == 1
        div_val = 2 if square else 1
    rare = rare_clusters(state)
    if len(cutoffs) != rare:
        raise UserError(
            f"the weights have {rare} clusters of rare words, and cutoffs={list(cutoffs)} make "
            f"{len(cutoffs)}; give those of the model, as in config={{'cutoffs': [20000, 40000]}}."
        )
    if given and given != cutoffs:
        raise UserError(f"the config says cutoffs={list(given)}, but the weights have {list(cutoffs)}.")
    return vocab_size, cutoffs, div_val


def shape(state: Mapping[str, Tensor], name: str, dims: int) -> tuple[int, ...]:
    """The shape of a tensor that must exist with this number of dimensions; else ValueError."""
    if name not in state:
        raise UserError(f"the weights lack {name}, so this is not a complete Transformer-XL.")
    if state[name].dim() != dims:
        raise UserError(f"{name} is {list(state[name].shape)}; a tensor of {dims} dimensions was expected.")
    return tuple(state[name].shape)


def shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every name of a state dict of this model, as [`with_shared`][] gives it, with its shape."""
    D, H, clusters = config.d_model, config.heads, config.clusters
    rare, mapped = len(clusters.cutoffs), clusters.maps(D)
    widths = [clusters.d_embed // clusters.div_val**i for i in range(1 + rare)]
    found: dict[str, tuple[int, ...]] = {}
    for i, (words, width) in enumerate(clusters.tables):
        found[f"word_emb.emb_layers.{i}.weight"] = found[f"crit.out_layers.{i}.weight"] = (words, width)
        found[f"crit.out_layers.{i}.bias"] = (words,)
        if mapped:
            found[f"word_emb.emb_projs.{i}"] = (D, width)
    if mapped:
        found |= {f"crit.out_projs.{i}": (D, width) for i, width in enumerate(widths)}
    if rare:
        found |= {"crit.cluster_weight": (rare, clusters.d_embed), "crit.cluster_bias": (rare,)}
    for i in range(config.n_layers):
        of_layer: dict[str, tuple[int, ...]] = {
            "dec_attn.qkv_net.weight": (3 * D, D),
            "dec_attn.r_net.weight": (D, D),
            "dec_attn.o_net.weight": (D, D),
            "dec_attn.r_w_bias": (H, D // H),
            "dec_attn.r_r_bias": (H, D // H),
            "pos_ff.CoreNet.0.weight": (config.d_ff, D),
            "pos_ff.CoreNet.0.bias": (config.d_ff,),
            "pos_ff.CoreNet.3.weight": (D, config.d_ff),
            "pos_ff.CoreNet.3.bias": (D,),
        }
        norms = ("dec_attn.layer_norm", "pos_ff.layer_norm")
        of_layer |= {f"{norm}.{part}": (D,) for norm in norms for part in ("weight", "bias")}
        found |= {f"layers.{i}.{name}": size for name, size in of_layer.items()}
    return found


def check_shapes(state: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Raise ValueError, which names the differences, unless ``state`` has exactly the tensors of this
    model."""
    wanted = shapes(config)
    differing = {
        "missing:": [name for name in wanted if name not in state],
        "unexpected:": [name for name in state if name not in wanted],
    }
    other = [
        f"{name} is {list(state[name].shape)}, not {list(size)}"
        for name, size in wanted.items()
        if name in state and tuple(state[name].shape) != size
    ]
    other += [
        f"{name} is {tensor.dtype}, no floating-point tensor"
        for name, tensor in state.items()
        if name in wanted and not tensor.is_floating_point()
    ]
    problems = [f"{what} {few(names)}" for what, names in differing.items() if names]
    problems += [few(other)] if other else []
    if problems:
        raise UserError(
            f"these are not the weights of a Transformer-XL of {config.n_layers} layers with "
            f"d_model={config.d_model}: {'; '.join(problems)}."
        )
