"""Weights and words of the original Transformer-XL (repository kimiyoung/transformer-xl) and of Hugging
Face's, in which names begin with ``transformer.`` and the softmax's rows for rare clusters are reversed. A
pickle can run code while it is loaded, so only tensors and plain containers are read from one."""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import check_value
from memformers.common.files import read_json
from memformers.data.tokenizer import WordTokenizer
from memformers.models.config import AdaptiveConfig, ModelConfig
from memformers.models.io import CONFIG
from memformers.models.language_model import MemoryLM

Config = Mapping[str, Any]
State = dict[str, Tensor]
"""Tensors by the original's names."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
VOCABULARY = "vocab.bin"
WITHOUT_COUNTERPART = {"attn_type": 0, "ext_len": 0, "layer_norm_epsilon": 1e-5}
"""Settings that have only one possible value here."""
RENAMED = (
    (r"^transformer\.layers\.", "layers."),
    # The adaptive embedding and softmax: word vectors, maps to D features, rare clusters.
    (r"^embed\.tables\.", "word_emb.emb_layers."),
    (r"^embed\.maps\.(\d+)\.weight$", r"word_emb.emb_projs.\1"),
    (r"^head\.words\.", "crit.out_layers."),
    (r"^head\.maps\.(\d+)\.weight$", r"crit.out_projs.\1"),
    (r"^head\.rare\.", "crit.cluster_"),
    # Attention: W_q, W_k,E and W_v in one matrix, W_k,R, u and v of Dai et al. 2019, section 3.3.
    (r"\.self_attn\.(query|key|value)\.", ".dec_attn.qkv_net."),
    (r"\.self_attn\.output\.", ".dec_attn.o_net."),
    (r"\.self_attn\.position\.", ".dec_attn.r_net."),
    (r"\.self_attn\.u$", ".dec_attn.r_w_bias"),
    (r"\.self_attn\.v$", ".dec_attn.r_r_bias"),
    (r"\.norm_self_attn\.", ".dec_attn.layer_norm."),
    # The feed-forward network: a linear layer, ReLU, dropout, a linear layer.
    (r"\.feed_forward\.layer1\.", ".pos_ff.CoreNet.0."),
    (r"\.feed_forward\.layer2\.", ".pos_ff.CoreNet.3."),
    (r"\.norm_ff\.", ".pos_ff.layer_norm."),
)
"""Our names and theirs."""
OURS_ALONE = ("self_attn.value.bias", "self_attn.output.bias")
"""Parameters that only our attention has; they become 0."""


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict from ``path``, a file of safetensors or ``torch.save``, without running code in it. A
    prefix that all names share, such as ``module.``, is removed. Raises ValueError for any other or a broken
    file.

    Examples:
        >>> import torch
        >>> from memformers import load_weights
        >>> torch.save({"weight": torch.ones(2, 3)}, "weights.pt")
        >>> load_weights("weights.pt")["weight"].shape
        torch.Size([2, 3])
    """
    path = Path(path)
    state = load_plain(path, "weights")
    names = list(map(str, state)) if isinstance(state, dict) else [type(state).__name__]
    has_tensors = isinstance(state, dict) and len(state) > 0
    if not has_tensors or not all(isinstance(state.get(name), Tensor) for name in names):
        got = abbreviate(names) or "nothing"
        raise UserError(
            f"expected {path} to hold tensors by name alone, got {got}; save only the model's state_dict()."
        )
    return strip_prefix(state)


def load_plain(path: Path, content: str) -> Any:
    """The tensors and plain containers in a file of safetensors or ``torch.save``; UserError, with the
    expected ``content``, for code in it and for a missing or broken file."""
    if not path.is_file():
        raise UserError(f"expected {path} to be a file of {content}, but it is missing.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # a broken or hostile pickle may raise anything
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{path} is refused: loading it would run code ({code[1]}). Ask for safetensors; or, if you "
                f"trust the file, load it elsewhere and save only tensors and plain containers."
            ) from None
        reason = "it is broken, or was not written by safetensors or torch.save"
        raise UserError(f"{path} can't be read as {content}: {reason}.") from None


def strip_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without prefixes that all its names share, such as ``module.``; ``layers.`` stays."""
    prefixes = {name[: name.find(".") + 1] for name in state}
    if len(prefixes) != 1 or prefixes & {"", "layers."}:
        return dict(state)
    (prefix,) = prefixes
    # There may be one more, as in module._orig_mod.
    return strip_prefix({name.removeprefix(prefix): tensor for name, tensor in state.items()})


def abbreviate(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def load_vocabulary(folder: Path) -> WordTokenizer:
    """The words in Hugging Face's ``folder``, in their order; else UserError."""
    path = folder / VOCABULARY
    vocabulary = load_plain(path, "the vocabulary that is published with the weights")
    words = vocabulary.get("idx2sym") if isinstance(vocabulary, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"expected {path} to have idx2sym, a list of words, got {str(vocabulary)[:80]}.")
    if vocabulary.get("lower_case") or vocabulary.get("delimiter") is not None:
        raise UserError(f"{path} changes or splits words (lower_case, delimiter); use another.")
    return WordTokenizer(words)


def from_transfo_xl(source: Mapping[str, Tensor] | str | Path, config: Config | None = None) -> MemoryLM:
    """The language model of a published Transformer-XL, in eval mode: same outputs, same memories (Dai et al.
    2019, [arXiv 1901.02860](https://arxiv.org/abs/1901.02860)). Hugging Face's starts with a memory of zeros
    and attends to it; ours attends to zeros only in such a [`memformers.Memory`][].

    The weights don't show ``mem_len``, ``tgt_len`` (our ``segment_len``), ``clamp_len``, ``same_length`` and
    ``dropout``, which have our defaults; ``pre_lnorm``, required with the original's layout and false by
    default in Hugging Face's; and ``cutoffs``, required if ``div_val`` is 1. ``dropatt`` is not used.

    Args:
        source: A folder with Hugging Face's ``config.json`` and weights; or a state dict of the original or
            ``TransfoXLLMHeadModel``, as of [`memformers.load_weights`][]. A prefix of all names is removed.
        config: Settings by their names in Hugging Face's ``config.json`` or the original's arguments.

    Raises:
        ValueError: For weights of another model, and a config that isn't implemented here.

    Examples:
        >>> from memformers import from_transfo_xl
        >>> from_transfo_xl({"embed.weight": None})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        memformers.common.errors.UserError: expected a state dict of Transformer-XL, ...
    """
    # Weights and settings, from a folder or as given.
    settings = dict(config or {})
    if isinstance(source, str | Path):
        folder = Path(source)
        source = load_weights(find_weights(folder))
        settings = {**read_json(folder / CONFIG), **settings}

    # A model with their sizes and ties.
    state, is_original = normalize_names(source)
    ties = merge_shared(state)
    model = MemoryLM(build_config(state, settings, is_original, ties))
    model.to(state["word_emb.emb_layers.0.weight"].dtype)

    # Each tensor of theirs fills one of ours, or several in order.
    targets = collect_targets(model)
    check_shapes(state, targets)
    for name, parts in targets.items():
        tensor = state[name].detach()
        if is_original and name.startswith("crit.cluster_"):
            tensor = tensor.flip(0)  # the original's rows begin with the rarest cluster
        rows = tensor.split([len(part) for part in parts])
        for part, values in zip(parts, rows, strict=True):
            part.copy_(values)
    return model.eval()


def find_weights(folder: Path) -> Path:
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{folder} has no weights; expected one of {', '.join(WEIGHTS)}.")


def normalize_names(source: Mapping[str, Tensor]) -> tuple[State, bool]:
    """The state dict by the original's names, without the fixed sinusoids' rates, and whether the original
    wrote it; UserError for the weights of another model, or without a head."""
    state = strip_prefix(source)
    is_original = not has_name(state, r"transformer\.word_emb\.")
    if not is_original:
        state = {name.removeprefix("transformer."): tensor for name, tensor in state.items()}
    if not has_name(state, r"layers\..*\.dec_attn\."):
        names = abbreviate(list(state)) or "nothing"
        raise UserError(
            f"expected a state dict of Transformer-XL, layers.0.dec_attn.…, got one with {names}."
        )
    if not has_name(state, r"crit\."):
        raise UserError("the weights have no head, crit.…; use those of a TransfoXLLMHeadModel, for example.")
    state.pop("pos_emb.inv_freq", None)
    quantized = [f"{name} is {x.dtype}" for name, x in state.items() if not x.is_floating_point()]
    if quantized:
        raise UserError(f"expected weights of floating-point numbers, but {abbreviate(quantized)}.")
    return state, is_original


def has_name(state: State, pattern: str) -> bool:
    return any(re.match(pattern, name) for name in state)


def merge_shared(state: State) -> dict[str, bool]:
    """Remove the weights that the softmax shares with the embedding: they are equal or, in transformers'
    safetensors, missing. Returns the ties ([`memformers.AdaptiveConfig`][]). If all layers share one u and v,
    every layer gets a copy."""
    n_tables = len(table_names(state))
    tables = []
    for i in range(n_tables):
        tables.append((f"word_emb.emb_layers.{i}.weight", f"crit.out_layers.{i}.weight"))
    maps = []
    for i in range(1, 1 + count_rare_clusters(state)):
        # With one table (div_val=1), one map is for all clusters.
        maps.append((f"word_emb.emb_projs.{min(i, n_tables - 1)}", f"crit.out_projs.{i}"))
    ties = {"tie_weights": remove_copies(state, tables), "tie_projections": remove_copies(state, maps)}

    # untie_r=False in Hugging Face's config: one u and v.
    for bias in ("r_w_bias", "r_r_bias"):
        if bias in state:
            shared = state.pop(bias)
            for i in range(count_layers(state)):
                state[f"layers.{i}.dec_attn.{bias}"] = shared
    return ties


def remove_copies(state: State, pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether the second tensor of each of ``pairs`` equals the first or is missing; then it is removed."""
    for first, copy in pairs:
        if first not in state or not torch.equal(state[first], state.get(copy, state[first])):
            return False
    for _, copy in pairs:
        state.pop(copy, None)
    return bool(pairs)


def count_layers(state: State) -> int:
    numbers = [int(name.split(".")[1]) for name in state if re.match(r"layers\.\d+\.", name)]
    return 1 + max(numbers)


def table_names(state: State) -> list[str]:
    return sorted(name for name in state if name.startswith("word_emb.emb_layers."))


def count_rare_clusters(state: State) -> int:
    return len(state.get("crit.cluster_bias", ()))


def build_config(state: State, config: Config, is_original: bool, ties: dict[str, bool]) -> ModelConfig:
    """Our config of the model that has this state dict; UserError if ``config`` requires something that isn't
    implemented here, or lacks a setting that the weights don't show."""
    # What the weights don't show.
    defaults = ModelConfig()
    settings: dict[str, Any] = {
        # Hugging Face's configs may lack pre_lnorm, and the original's weights could then be of either form.
        "pre_lnorm": None if is_original else False,
        "dropout": defaults.dropout,
        "clamp_len": -1,
        "tgt_len": defaults.segment_len,
        "mem_len": defaults.mem_len,
        **config,
    }
    for name, value in WITHOUT_COUNTERPART.items():
        if config.get(name, value) != value:
            raise UserError(f"expected {name}={value}, the only one supported, got {name}={config[name]}.")
    pre_lnorm = settings["pre_lnorm"]
    if not isinstance(pre_lnorm, bool):
        raise UserError(
            "expected pre_lnorm to be True (norms before each sublayer) or False (after each sum), got "
            f"pre_lnorm={pre_lnorm!r}; set it in config, since the weights don't show it."
        )

    # Sizes: u is [H, E], the first feed-forward layer [d_ff, D], a table of word vectors [words, width].
    u = "layers.0.dec_attn.r_w_bias"
    layer1 = "layers.0.pos_ff.CoreNet.0.weight"
    tables = table_names(state) or ["word_emb.emb_layers.0.weight"]
    check_matrices(state, [u, layer1, *tables])
    n_heads = len(state[u])
    d_ff, d_model = state[layer1].shape
    widths = [state[name].shape[1] for name in tables]
    # Each table begins where those before it end.
    *cutoffs, vocab_size = accumulate(len(state[name]) for name in tables)
    d_embed = widths[0]
    div_val = d_embed // max(widths[1], 1) if cutoffs else 1
    n_rare = count_rare_clusters(state)
    if not cutoffs and n_rare:  # in one table, clusters don't show
        check_value("cutoffs", config.get("cutoffs"), list[int] | tuple[int, ...])
        cutoffs = [cutoff for cutoff in config["cutoffs"] if cutoff != vocab_size]
        if len(cutoffs) != n_rare:
            raise UserError(
                f"the weights have {n_rare} clusters of rare words, the config cutoffs={cutoffs}."
            )

    return ModelConfig(
        model="transformer-xl",
        vocab_size=vocab_size,
        d_model=d_model,
        n_heads=n_heads,
        n_layers=count_layers(state),
        d_ff=d_ff,
        dropout=settings["dropout"],
        norm="pre-without-final" if pre_lnorm else "post",
        positions="sinusoidal",
        clamp_len=None if settings["clamp_len"] in (-1, 0) else settings["clamp_len"],
        segment_len=settings["tgt_len"],
        mem_len=settings["mem_len"],
        same_length=bool(config.get("same_length", False)),
        embedding="adaptive",
        adaptive=AdaptiveConfig(tuple(cutoffs), div_val, d_embed, **ties),
    )


def check_matrices(state: State, names: Sequence[str]) -> None:
    wrong = [name for name in names if name not in state or state[name].dim() != 2]
    if wrong:
        raise UserError(f"expected the weights to have matrices {abbreviate(wrong)}.")


def collect_targets(model: MemoryLM) -> dict[str, list[Tensor]]:
    """For each name of theirs, the tensors of ``model`` ``[rows, …]``, or parts of them, that its rows fill
    in order. What only our model has becomes 0."""
    targets: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if name == "head.bias":
            # Ours is one bias for the vocabulary, theirs one for each table.
            sizes = [table.num_embeddings for table in model.embed.tables]  # type: ignore[union-attr]
            for i, part in enumerate(tensor.split(sizes)):
                targets[f"crit.out_layers.{i}.bias"] = [part]
        elif name.endswith(OURS_ALONE):
            tensor.zero_()
        else:
            for pattern, replacement in RENAMED:
                name = re.sub(pattern, replacement, name)
            # Query, key and value have one name; maps of the softmax are transposed in theirs.
            part = tensor.mT if name.startswith("crit.out_projs.") else tensor
            targets.setdefault(name, []).append(part)
    return targets


def check_shapes(state: State, targets: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise UserError unless the tensors of ``state`` have the shapes of the ``targets`` that they fill."""
    wrong = []
    for name in {**targets, **state}:
        expected: Any = "none"
        actual: Any = "none"
        if parts := targets.get(name):
            expected = [sum(map(len, parts)), *parts[0].shape[1:]]
        if name in state:
            actual = list(state[name].shape)
        if expected != actual:
            wrong.append(f"expected {name} {expected}, got {actual}")
    if wrong:
        raise UserError(f"these are not the weights of a whole Transformer-XL: {abbreviate(wrong)}.")
