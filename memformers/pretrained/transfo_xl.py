"""Conversion of the weights of the original Transformer-XL and of Hugging Face's ``transfo-xl``.

Sources of the layouts: Dai et al. 2019 (arXiv 1901.02860), the repository kimiyoung/transformer-xl and the
package transformers 4. Both are the same model. Their names differ by the prefix ``transformer.``, and they
differ in the order of the softmax's rows for rare clusters: ascending in transformers (as in the TensorFlow
code that the published weights come from), descending in the original's PyTorch code.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memformers.common.errors import UserError
from memformers.data.tokenizers import WordTokenizer
from memformers.models.config import AdaptiveConfig, ModelConfig
from memformers.models.language_model import MemoryLM
from memformers.models.layers import Norm
from memformers.pretrained.published import vocabulary_of, weights_of
from memformers.pretrained.weights_file import few

Config = Mapping[str, Any]
"""Of Hugging Face's ``config.json``, or the original's arguments."""
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


def from_transfo_xl(
    source: Mapping[str, Tensor] | str | Path, config: Mapping[str, Any] | None = None
) -> MemoryLM:
    """The language model of a published Transformer-XL, in eval mode: same outputs, same memories (Dai et al.
    2019, [arXiv 1901.02860](https://arxiv.org/abs/1901.02860)).

    The weights alone don't show ``mem_len``, ``tgt_len`` (our ``segment_len``), ``clamp_len``,
    ``same_length`` and ``dropout``, for which our defaults are used; nor ``pre_lnorm``, which is required
    with the original's layout and is false by default in Hugging Face's; nor ``cutoffs`` if ``div_val`` is 1,
    which are then required. With ``pre_lnorm``, memories contain the input of a layer before its norm, and
    the last layer's output is not normalized.

    Outputs agree in eval mode. In further training, the original also applies dropout to the sinusoids and to
    the last layer's output, and drops attention probabilities at a separate rate, ``dropatt``; ours drops
    them at the rate ``dropout``, and warns if the config has another ``dropatt``.

    Ours has more parameters in three places, which doesn't change the outputs before further training: the
    values and the output of attention have biases, initially 0; each layer has its own u and v, initially
    equal if the original shares them; and projections are tied for all rare clusters or for none.

    Both begin a text with an empty memory, as the original does; Hugging Face's begins with zeros, which it
    attends to, and a [`memformers.Memory`][] of zeros gives the same here.

    Args:
        source: The folder of the model, with Hugging Face's ``config.json`` and weights, or the original's
            ``model.pt``; or its state dict, in the original repository's layout or that of Hugging Face's
            ``TransfoXLLMHeadModel``. [`memformers.load_weights`][] reads files of weights alone. No code of a
            pickle is run.
        config: The model's own, by the names in Hugging Face's ``config.json`` or the original's arguments.

    Returns:
        The model.

    Raises:
        ValueError: For weights of another model, and names what is missing, unexpected or of another shape;
            also for a config that contradicts the weights or requires something that isn't implemented here.

    Examples:
        >>> from memformers import from_transfo_xl
        >>> from_transfo_xl({"embed.weight": None})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        memformers.common.errors.UserError: expected a state dict of Transformer-XL, ...
    """
    if isinstance(source, str | Path):
        source, own = weights_of(Path(source))
        config = {**own, **(config or {})}
    ours, ours_config = converted(source, config or {})
    model = MemoryLM(ours_config).to(ours["head.bias"].dtype)
    model.load_state_dict(ours)
    return model.eval()


def load_published(folder: Path) -> tuple[MemoryLM, WordTokenizer]:
    """The model in ``folder``, as [`from_transfo_xl`][] takes it, and its tokenizer, from ``vocab.bin`` or
    ``vocab.pkl``, or the original's ``cache.pt``; UserError for missing or broken files."""
    model, tokenizer = from_transfo_xl(folder), vocabulary_of(folder)
    if model.config.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f"{folder} has a model of {model.config.vocab_size} words and a vocabulary of "
            f"{tokenizer.vocab_size}; they belong to different models."
        )
    return model, tokenizer


def converted(state_dict: Mapping[str, Tensor], config: Config) -> tuple[dict[str, Tensor], ModelConfig]:
    """The state dict and config of [`from_transfo_xl`][]'s model."""
    theirs, is_original = plain_names(state_dict)
    theirs = with_shared(theirs, config)
    ours_config = config_of(theirs, config, is_original)
    check_shapes(theirs, ours_config)
    ours_config = with_ties(theirs, ours_config)

    def counterpart(our: str, like: Tensor) -> Tensor:
        if our == "head.bias":
            return torch.cat(
                [theirs[f"crit.out_layers.{i}.bias"] for i in range(len(ours_config.clusters.tables))]
            )
        if our.endswith(OURS_ALONE):
            return theirs["layers.0.dec_attn.o_net.weight"].new_zeros(like.shape)
        their = their_name(our)
        if ".qkv_net." in their:
            return theirs[their].chunk(3)[("query", "key", "value").index(our.split(".")[-2])]  # [D, D]
        if their.startswith("crit.cluster_") and is_original:
            return theirs[their].flip(0)
        return theirs[their].mT if their.startswith("crit.out_projs.") else theirs[their]

    ours = {name: counterpart(name, like).detach() for name, like in state_of(ours_config).items()}
    return {name: t.clone(memory_format=torch.contiguous_format) for name, t in ours.items()}, ours_config


def state_of(config: ModelConfig) -> dict[str, Tensor]:
    """Our state dict by name, of tensors that have no data."""
    with torch.device("meta"):
        return MemoryLM(config).state_dict()


def their_name(name: str) -> str:
    """Their name of a tensor of ours."""
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def with_ties(theirs: Mapping[str, Tensor], config: ModelConfig) -> ModelConfig:
    """The config that says what embedding and softmax share, which is what is equal."""
    tables, rare = range(len(config.clusters.tables)), range(1, 1 + len(config.clusters.cutoffs))

    def same(name: str, other: str) -> bool:
        return torch.equal(theirs[name], theirs[other])

    in_table = [f"{i}.weight" for i in tables]
    tie_weights = all(same(f"word_emb.emb_layers.{i}", f"crit.out_layers.{i}") for i in in_table)
    tie_projections = config.clusters.maps(config.d_model) and all(
        same(f"word_emb.emb_projs.{min(i, tables[-1])}", f"crit.out_projs.{i}") for i in rare
    )
    shared = replace(config.adaptive, tie_weights=tie_weights, tie_projections=bool(rare) and tie_projections)
    return replace(config, adaptive=shared)


def plain_names(state_dict: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """The state dict without Hugging Face's prefix and without the fixed sinusoids' rates, and whether it is
    of the original repository. Raises ValueError for the weights of another model."""
    prefixed = any(name.startswith("transformer.word_emb.") for name in state_dict)
    state = {name.removeprefix("transformer.") if prefixed else name: t for name, t in state_dict.items()}
    if not any(name.startswith("layers.") and ".dec_attn." in name for name in state):
        raise UserError(
            "expected a state dict of Transformer-XL, with layers.0.dec_attn.… or transformer.layers.0."
            f"dec_attn.…, got one with {few([str(name) for name in state_dict]) or 'nothing'}."
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
    tied = setting(config, "tie_projs", [False, *clusters], list | tuple, "a list of true and false")
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
    _, d_embed = shape(state, "word_emb.emb_layers.0.weight", 2)
    heads, d_head = shape(state, "layers.0.dec_attn.r_w_bias", 2)
    (d_model,) = shape(state, "layers.0.dec_attn.layer_norm.weight", 1)
    d_ff, _ = shape(state, "layers.0.pos_ff.CoreNet.0.weight", 2)
    if heads * d_head != d_model:
        raise UserError(
            f"n_head={heads} times d_head={d_head} must equal d_model={d_model} here; it doesn't."
        )
    vocab_size, cutoffs, div_val = clusters_of(state, config)
    sizes = {"d_model": d_model, "d_embed": d_embed, "d_inner": d_ff, "d_head": d_head, "n_head": heads}
    sizes |= {"vocab_size": vocab_size, "n_token": vocab_size, "n_layer": depth(state)}
    for name, value in (WITHOUT_COUNTERPART | sizes).items():
        if config.get(name, value) != value:
            what = "the weights have" if name in sizes else "this library supports"
            raise UserError(
                f"expected {name}={value}, which {what}, got {name}={config[name]} in the config; "
                f"give the weights' own config."
            )
    defaults = ModelConfig()
    clamp_len = setting(config, "clamp_len", -1, int, "a whole number")
    dropout = setting(config, "dropout", defaults.dropout, int | float, "a number")
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
        segment_len=setting(config, "tgt_len", defaults.segment_len, int, "a whole number"),
        mem_len=setting(config, "mem_len", defaults.mem_len, int, "a whole number"),
        same_length=bool(config.get("same_length", False)),
        embedding="adaptive",
        adaptive=AdaptiveConfig(cutoffs=cutoffs, div_val=div_val, d_embed=d_embed),
    )


def setting(config: Config, name: str, default: Any, kind: Any, said: str) -> Any:
    """A setting of the config, or the default; ValueError unless it is of this kind, ``said`` in words."""
    value = config.get(name, default)
    if not isinstance(value, kind):
        raise UserError(f"expected the config's {name} to be {said}, got {name}={value!r}.")
    return value


def norm_of(config: Config, is_original: bool) -> Norm:
    """Where the model normalizes: ``pre_lnorm``, which the weights don't show. In Hugging Face's format, a
    missing ``pre_lnorm`` means post-norm. With the original's weights, a missing ``pre_lnorm`` is a
    UserError."""
    pre_lnorm = config.get("pre_lnorm", None if is_original else False)
    if not isinstance(pre_lnorm, bool):
        raise UserError(
            f"expected pre_lnorm to be True (the model normalizes before each sublayer) or False (after each "
            f"sum), which the weights don't show, got pre_lnorm={pre_lnorm!r}; give it, as in "
            f"config={{'pre_lnorm': False}}."
        )
    return "pre-without-final" if pre_lnorm else "post"


def clusters_of(state: Mapping[str, Tensor], config: Config) -> tuple[int, tuple[int, ...], int]:
    """Vocabulary, cutoffs and ``div_val``, from the tables of word vectors, or from ``config`` where all
    have one width and so one table."""
    tables: list[tuple[int, ...]] = []
    while f"word_emb.emb_layers.{len(tables)}.weight" in state:
        tables.append(shape(state, f"word_emb.emb_layers.{len(tables)}.weight", 2))
    ends = torch.tensor([words for words, _ in tables]).cumsum(0).tolist()
    vocab_size, widths = ends[-1], [width for _, width in tables]
    given = setting(config, "cutoffs", (), list | tuple, "a list of token ids")
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
        raise UserError(f"expected {name} to have {dims} dimensions, got {list(state[name].shape)}.")
    return tuple(state[name].shape)


def their_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every name of a state dict of this model, in which nothing is tied, with its shape."""
    found: dict[str, tuple[int, ...]] = {
        f"crit.out_layers.{i}.bias": (words,) for i, (words, _) in enumerate(config.clusters.tables)
    }
    for name, tensor in state_of(config).items():
        their, size = their_name(name), tuple(tensor.shape)
        if ".qkv_net." in their:
            size = (3 * size[0], *size[1:])
        if name != "head.bias" and not name.endswith(OURS_ALONE):
            found[their] = size[::-1] if their.startswith("crit.out_projs.") else size
    return found


def check_shapes(state: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Raise ValueError, which names the differences, unless ``state`` has exactly the tensors of this
    model."""
    wanted = their_shapes(config)
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
