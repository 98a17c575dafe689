"""Weights of the original Transformer-XL (repository kimiyoung/transformer-xl) and Hugging Face's, in which
names begin with ``transformer.`` and the softmax's rows for rare clusters are reversed."""

import re
import warnings
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import check_value
from memformers.common.files import read_json
from memformers.convert.hf_files import CONFIG, WEIGHTS, few, load_weights, without_prefix
from memformers.models.config import AdaptiveConfig, ModelConfig
from memformers.models.language_model import MemoryLM

Config = Mapping[str, Any]
"""Of Hugging Face's ``config.json``, or the original's arguments."""
State = dict[str, Tensor]
"""Tensors by the original's names."""
WITHOUT_COUNTERPART = {"attn_type": 0, "ext_len": 0, "layer_norm_epsilon": 1e-5}
"""Settings that have only one possible value here."""
RENAMED = (
    (r"^transformer\.layers\.", "layers."),
    (r"^embed\.tables\.", "word_emb.emb_layers."),
    (r"^embed\.maps\.(\d+)\.weight$", r"word_emb.emb_projs.\1"),
    (r"^head\.words\.", "crit.out_layers."),
    (r"^head\.maps\.(\d+)\.weight$", r"crit.out_projs.\1"),
    (r"^head\.rare\.", "crit.cluster_"),
    (r"\.self_attn\.(query|key|value)\.", ".dec_attn.qkv_net."),
    (r"\.self_attn\.output\.", ".dec_attn.o_net."),
    (r"\.self_attn\.position\.", ".dec_attn.r_net."),
    (r"\.self_attn\.u$", ".dec_attn.r_w_bias"),
    (r"\.self_attn\.v$", ".dec_attn.r_r_bias"),
    (r"\.norm_self_attn\.", ".dec_attn.layer_norm."),
    (r"\.feed_forward\.layer1\.", ".pos_ff.CoreNet.0."),
    (r"\.feed_forward\.layer2\.", ".pos_ff.CoreNet.3."),
    (r"\.norm_ff\.", ".pos_ff.layer_norm."),
)
"""Our names and theirs."""
OURS_ALONE = ("self_attn.value.bias", "self_attn.output.bias")
NO_CLUSTERS = torch.empty(0)


def from_transfo_xl(source: Mapping[str, Tensor] | str | Path, config: Config | None = None) -> MemoryLM:
    """The language model of a published Transformer-XL, in eval mode: same outputs, same memories (Dai et al.
    2019, [arXiv 1901.02860](https://arxiv.org/abs/1901.02860)). Hugging Face's begins with a memory of zeros,
    which it attends to, as to such a [`memformers.Memory`][] here.

    Not in the weights are ``mem_len``, ``tgt_len`` (our ``segment_len``), ``clamp_len``, ``same_length`` and
    ``dropout``, with our defaults; ``pre_lnorm``, required with the original's layout and false by default in
    Hugging Face's; ``cutoffs``, required if ``div_val`` is 1. An unused ``dropatt`` causes a warning.

    Args:
        source: A folder with Hugging Face's ``config.json`` and weights; or a state dict of the original or
            ``TransfoXLLMHeadModel``, as of [`memformers.load_weights`][]; a prefix of all names is left out.
        config: The model's own, by the names in Hugging Face's ``config.json`` or the original's arguments.

    Raises:
        ValueError: For weights of another model, or a config that contradicts them or isn't implemented here.

    Examples:
        >>> from memformers import from_transfo_xl
        >>> from_transfo_xl({"embed.weight": None})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        memformers.common.text.UserError: expected a state dict of Transformer-XL, ...
    """
    config = config or {}
    if isinstance(source, str | Path):
        folder = Path(source)
        path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
        if path is None:
            raise UserError(f"{folder} has no weights; expected one of {', '.join(WEIGHTS)}.")
        source, config = load_weights(path), {**read_json(folder / CONFIG), **config}
    state, is_original = plain_names(source)
    ties = ties_of(state, config)
    model = MemoryLM(config_of(state, config, is_original, ties))
    model.to(state["word_emb.emb_layers.0.weight"].dtype)
    places = places_in(model)
    sizes = {name: [sum(map(len, parts)), *parts[0].shape[1:]] for name, parts in places.items()}
    found = {name: list(tensor.shape) for name, tensor in state.items()}
    if wrong := [name for name in {**sizes, **found} if sizes.get(name) != found.get(name)]:
        said = [f"expected {name} {sizes.get(name, 'none')}, got {found.get(name, 'none')}" for name in wrong]
        raise UserError(f"these are not the weights of a whole Transformer-XL: {few(said)}.")
    for name, parts in places.items():
        theirs = state[name].detach()
        if is_original and name.startswith("crit.cluster_"):
            theirs = theirs.flip(0)
        for part, rows in zip(parts, theirs.split([len(part) for part in parts]), strict=True):
            part.copy_(rows)
    return model.eval()


def plain_names(state_dict: Mapping[str, Tensor]) -> tuple[State, bool]:
    """The state dict without prefixes and the fixed sinusoids' rates, and whether it is the original's;
    ValueError for the weights of another model, or without a head."""
    state = without_prefix(state_dict)
    is_original = not any(name.startswith("transformer.word_emb.") for name in state)
    state = {name if is_original else name.removeprefix("transformer."): t for name, t in state.items()}
    if not any(name.startswith("layers.") and ".dec_attn." in name for name in state):
        came = few(list(state_dict)) or "nothing"
        raise UserError(f"expected a state dict of Transformer-XL, layers.0.dec_attn.…, got one with {came}.")
    if not any(name.startswith("crit.") for name in state):
        raise UserError("the weights have no head, crit.…; take those of a TransfoXLLMHeadModel, say.")
    state.pop("pos_emb.inv_freq", None)
    if others := [f"{name} is {t.dtype}" for name, t in state.items() if not t.is_floating_point()]:
        raise UserError(f"expected weights of floating-point numbers, but {few(others)}.")
    return state, is_original


def ties_of(state: State, config: Config) -> dict[str, bool]:
    """What embedding and softmax share ([`memformers.AdaptiveConfig`][]): what is equal, and then has in
    ``state`` the embedding's name alone, whichever a file kept. A u and v of all become each layer's."""
    clusters = range(1 + state.get("crit.cluster_bias", NO_CLUSTERS).numel())
    tables = [(f"word_emb.emb_layers.{i}.weight", f"crit.out_layers.{i}.weight") for i in clusters]
    tables = [pair for pair in tables if state.keys() & pair]
    maps = [(f"word_emb.emb_projs.{min(i, len(tables) - 1)}", f"crit.out_projs.{i}") for i in clusters]
    tied = setting(config, "tie_projs", [i > 0 for i in clusters], list[bool] | tuple[bool, ...])
    pairs = [pair for pair, is_tied in zip(maps, tied, strict=False) if is_tied]
    if config.get("tie_weight", config.get("tie_word_embeddings", True)):
        pairs += tables
    for pair in pairs * 2:  # again, since a map of several clusters may have the name of the last one alone
        if there := [state[name] for name in pair if name in state]:
            state.update(zip(pair, (there[0], there[-1]), strict=True))
    found = {}
    for name, shared in (("tie_weights", tables), ("tie_projections", maps[1:])):
        found[name] = bool(shared) and all(
            state.keys() >= {own, copy} and torch.equal(state[own], state[copy]) for own, copy in shared
        )
        for _, copy in shared if found[name] else ():
            del state[copy]
    for bias in ("r_w_bias", "r_r_bias"):
        names = [bias, *(f"layers.{i}.dec_attn.{bias}" for i in range(depth(state)))]
        there = [state[name] for name in names if name in state]
        if there and (bias in state or config.get("untie_r") is False):
            state.update({name: there[0] for name in names if name not in state})
            state.pop(bias)
    return found


def depth(state: State) -> int:
    """The number of layers."""
    return 1 + max(int(found[1]) for name in state if (found := re.match(r"layers\.(\d+)\.", name)))


def config_of(state: State, config: Config, is_original: bool, ties: dict[str, bool]) -> ModelConfig:
    """Our config of the model that has this state dict; ValueError if ``config`` contradicts the weights,
    requires something that isn't implemented here, or lacks a setting that the weights don't show."""
    heads, d_head = shape(state, "layers.0.dec_attn.r_w_bias", 2)
    (d_model,) = shape(state, "layers.0.dec_attn.layer_norm.weight", 1)
    d_ff, _ = shape(state, "layers.0.pos_ff.CoreNet.0.weight", 2)
    if heads * d_head != d_model:
        raise UserError(f"n_head={heads} times d_head={d_head} isn't d_model={d_model}, as it must be here.")
    vocab_size, adaptive = clusters_of(state, config, ties)
    sizes = {"d_model": d_model, "d_embed": adaptive.d_embed, "d_inner": d_ff, "d_head": d_head}
    sizes |= {"n_head": heads, "vocab_size": vocab_size, "n_token": vocab_size, "n_layer": depth(state)}
    for name, value in (WITHOUT_COUNTERPART | sizes).items():
        if config.get(name, value) != value:
            what = "the weights have" if name in sizes else "this library supports"
            got = f"got {name}={config[name]} in the config; give the weights' own config."
            raise UserError(f"expected {name}={value}, which {what}, {got}")
    # Hugging Face's configs may leave it out, and the original's weights could then be of either form.
    pre_lnorm = config.get("pre_lnorm", None if is_original else False)
    if not isinstance(pre_lnorm, bool):
        wanted = "expected pre_lnorm to be True (norms before each sublayer) or False (after each sum)"
        raise UserError(
            f"{wanted}, got pre_lnorm={pre_lnorm!r}; say it in config, the weights don't show it."
        )
    defaults = ModelConfig()
    clamp_len = setting(config, "clamp_len", -1, int)
    dropout = setting(config, "dropout", defaults.dropout, float)
    if config.get("dropatt", dropout) != dropout:
        said = f"dropatt={config['dropatt']} is not used: in training dropout={dropout} applies to attention."
        warnings.warn(said, stacklevel=3)
    return ModelConfig(
        model="transformer-xl",
        vocab_size=vocab_size,
        d_model=d_model,
        heads=heads,
        n_layers=depth(state),
        d_ff=d_ff,
        dropout=dropout,
        norm="pre-without-final" if pre_lnorm else "post",
        positions="sinusoidal",
        clamp_len=clamp_len if clamp_len > 0 else None,
        segment_len=setting(config, "tgt_len", defaults.segment_len, int),
        mem_len=setting(config, "mem_len", defaults.mem_len, int),
        same_length=bool(config.get("same_length", False)),
        embedding="adaptive",
        adaptive=adaptive,
    )


def clusters_of(state: State, config: Config, ties: dict[str, bool]) -> tuple[int, AdaptiveConfig]:
    """The vocabulary's size and clusters, from the tables of word vectors, or from ``config`` where all
    vectors have one width and so are one table."""
    tables = [shape(state, "word_emb.emb_layers.0.weight", 2)]
    while (name := f"word_emb.emb_layers.{len(tables)}.weight") in state:
        tables.append(shape(state, name, 2))
    *ends, vocab_size = accumulate(words for words, _ in tables)
    widths = [width for _, width in tables]
    given = tuple(x for x in setting(config, "cutoffs", (), list[int] | tuple[int, ...]) if x != vocab_size)
    if ends:
        cutoffs, fitting = tuple(ends), range(2, widths[0] + 1)
        div_val = next((v for v in fitting if widths == [widths[0] // v**i for i in range(len(widths))]), 0)
        if not div_val or config.get("div_val", div_val) != div_val:
            raise UserError(f"the widths {widths} of word vectors don't fit div_val={config.get('div_val')}.")
    else:
        # Without clusters it shows only in that vectors are mapped which have the right width already.
        square = "word_emb.emb_projs.0" in state and len(set(state["word_emb.emb_projs.0"].shape)) == 1
        cutoffs, div_val = given, 2 if square else 1
    if len(cutoffs) != (rare := state.get("crit.cluster_bias", NO_CLUSTERS).numel()):
        what = f"{rare} clusters of rare words, and cutoffs={list(cutoffs)} make {len(cutoffs)}"
        raise UserError(f"the weights have {what}; give the model's, as config={{'cutoffs': [2000]}}.")
    if given and given != cutoffs:
        raise UserError(f"the config says cutoffs={list(given)}, but the weights have {list(cutoffs)}.")
    return vocab_size, AdaptiveConfig(cutoffs=cutoffs, div_val=div_val, d_embed=widths[0], **ties)


def setting(config: Config, name: str, default: Any, kind: Any) -> Any:
    """A setting of the config, or the default; ValueError unless it is of this ``kind``, an annotation."""
    check_value(name, value := config.get(name, default), kind)
    return value


def shape(state: State, name: str, dims: int) -> tuple[int, ...]:
    """The shape of a tensor that must exist with this number of dimensions; else ValueError."""
    if name not in state:
        raise UserError(f"the weights lack {name}, so this is not a complete Transformer-XL.")
    if state[name].dim() != dims:
        raise UserError(f"expected {name} to have {dims} dimensions, got {list(state[name].shape)}.")
    return tuple(state[name].shape)


def places_in(model: MemoryLM) -> dict[str, list[Tensor]]:
    """For each name of theirs, the tensors of ``model``, of any shape, or parts of them, that its rows fill
    in order. What ours alone has becomes 0."""
    places: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if name == "head.bias":
            of_tables = tensor.split([table.num_embeddings for table in model.embed.tables])  # type: ignore[union-attr]
            places |= {f"crit.out_layers.{i}.bias": [part] for i, part in enumerate(of_tables)}
        elif name.endswith(OURS_ALONE):
            tensor.zero_()
        else:
            for pattern, replacement in RENAMED:
                name = re.sub(pattern, replacement, name)
            places.setdefault(name, []).append(tensor.mT if name.startswith("crit.out_projs.") else tensor)
    return places
