"""Weights and words of the original Transformer-XL (repository kimiyoung/transformer-xl) and of Hugging
Face's, in which names begin with ``transformer.`` and the softmax's rows for rare clusters are reversed. As a
pickle can run code while it is loaded, only tensors and plain containers are read from one."""

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from memformers.common.fields import check_value
from memformers.common.files import read_json
from memformers.common.text import UserError
from memformers.data.tokenizer import WordTokenizer
from memformers.models.config import AdaptiveConfig, ModelConfig
from memformers.models.language_model import MemoryLM

Config = Mapping[str, Any]
State = dict[str, Tensor]
"""Tensors by the original's names."""
CONFIG, WEIGHTS, VOCABULARY = "config.json", ("model.safetensors", "pytorch_model.bin"), "vocab.bin"
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
    state = load_plain(path := Path(path), "weights")
    names = [*map(str, state)] if isinstance(state, dict) else [type(state).__name__]
    if not isinstance(state, dict) or not all(isinstance(state.get(name), Tensor) for name in names or [""]):
        more = f"expected {path} to hold tensors by name alone, got {abbreviate(names) or 'nothing'}"
        raise UserError(f"{more}; save only the model's state_dict().")
    return without_prefix(state)


def load_plain(path: Path, what: str) -> Any:
    """The tensors and plain containers in a file of safetensors or ``torch.save``; UserError for code in it
    and for a missing or broken file."""
    if not path.is_file():
        raise UserError(f"expected {path} to be a file of {what}, but it is missing.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError:
        raise
    except Exception as error:  # whatever a broken or hostile pickle may end in
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise UserError(
                f"{path} is refused: loading it would run code ({code[1]}). Ask for safetensors; or, if you "
                f"trust the file, load it elsewhere and save only tensors and plain containers."
            ) from None
        kinds = "it is broken, or was not written by safetensors or torch.save"
        raise UserError(f"{path} can't be read as {what}: {kinds}.") from None


def without_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict without prefixes that all its names share, such as ``module.``; ``layers.`` stays."""
    prefixes = {name[: name.find(".") + 1] for name in state}
    if len(prefixes) != 1 or prefixes & {"", "layers."}:
        return dict(state)
    return without_prefix({name.partition(".")[2]: tensor for name, tensor in state.items()})


def abbreviate(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def vocabulary_of(folder: Path) -> WordTokenizer:
    """The words in Hugging Face's ``folder``, in their order; else UserError."""
    vocabulary = load_plain(path := folder / VOCABULARY, "the vocabulary that is published with the weights")
    words = vocabulary.get("idx2sym") if isinstance(vocabulary, dict) else None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"expected {path} to have idx2sym, a list of words, got {str(vocabulary)[:80]}.")
    if vocabulary.get("lower_case") or vocabulary.get("delimiter") is not None:
        raise UserError(f"{path} changes or splits words (lower_case, delimiter); use another.")
    return WordTokenizer(words)


def from_transfo_xl(source: Mapping[str, Tensor] | str | Path, config: Config | None = None) -> MemoryLM:
    """The language model of a published Transformer-XL, in eval mode: same outputs, same memories (Dai et al.
    2019, [arXiv 1901.02860](https://arxiv.org/abs/1901.02860)). Hugging Face's starts with a memory of zeros,
    which it attends to, as to such a [`memformers.Memory`][] here.

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
    ties = merge_shared(state)
    model = MemoryLM(config_of(state, config, is_original, ties))
    model.to(state["word_emb.emb_layers.0.weight"].dtype)
    targets = targets_by_name(model)
    expected = {name: [sum(map(len, parts)), *parts[0].shape[1:]] for name, parts in targets.items()}
    shapes = {name: list(tensor.shape) for name, tensor in state.items()}
    if wrong := [name for name in {**expected, **shapes} if expected.get(name) != shapes.get(name)]:
        pairs = [f"expected {n} {expected.get(n, 'none')}, got {shapes.get(n, 'none')}" for n in wrong]
        raise UserError(f"these are not the weights of a whole Transformer-XL: {abbreviate(pairs)}.")
    for name, parts in targets.items():
        tensor = state[name].detach()
        if is_original and name.startswith("crit.cluster_"):
            tensor = tensor.flip(0)
        for part, rows in zip(parts, tensor.split([len(part) for part in parts]), strict=True):
            part.copy_(rows)
    return model.eval()


def plain_names(state_dict: Mapping[str, Tensor]) -> tuple[State, bool]:
    """The state dict by the original's names, without the fixed sinusoids' rates, and whether the original
    wrote it; UserError for the weights of another model, or without a head."""
    state = without_prefix(state_dict)
    is_original = not any(name.startswith("transformer.word_emb.") for name in state)
    state = {name if is_original else name.removeprefix("transformer."): t for name, t in state.items()}
    if not any(name.startswith("layers.") and ".dec_attn." in name for name in state):
        names = abbreviate(list(state)) or "nothing"
        raise UserError(
            f"expected a state dict of Transformer-XL, layers.0.dec_attn.…, got one with {names}."
        )
    if not any(name.startswith("crit.") for name in state):
        raise UserError("the weights have no head, crit.…; use those of a TransfoXLLMHeadModel, for example.")
    state.pop("pos_emb.inv_freq", None)
    if others := [f"{name} is {t.dtype}" for name, t in state.items() if not t.is_floating_point()]:
        raise UserError(f"expected weights of floating-point numbers, but {abbreviate(others)}.")
    return state, is_original


def merge_shared(state: State) -> dict[str, bool]:
    """Remove what the softmax shares with the embedding, which is equal or, in transformers' safetensors, not
    there. Returns what is tied ([`memformers.AdaptiveConfig`][]). A u and v for all layers become those of
    every layer."""
    n_tables = sum(name.startswith("word_emb.emb_layers.") for name in state)
    tables = [(f"word_emb.emb_layers.{i}.weight", f"crit.out_layers.{i}.weight") for i in range(n_tables)]
    rare = range(1, 1 + len(state.get("crit.cluster_bias", ())))
    maps = [(f"word_emb.emb_projs.{min(i, n_tables - 1)}", f"crit.out_projs.{i}") for i in rare]
    ties = {}
    for tie, pairs in (("tie_weights", tables), ("tie_projections", maps)):
        ties[tie] = bool(pairs) and all(
            first in state and torch.equal(state[first], state.get(copy, state[first]))
            for first, copy in pairs
        )
        for _, copy in pairs if ties[tie] else ():
            state.pop(copy, None)
    for bias in ("r_w_bias", "r_r_bias"):
        if bias in state:
            shared = state.pop(bias)
            state.update({f"layers.{i}.dec_attn.{bias}": shared for i in range(depth(state))})
    return ties


def depth(state: State) -> int:
    return 1 + max(int(match[1]) for name in state if (match := re.match(r"layers\.(\d+)\.", name)))


def config_of(state: State, config: Config, is_original: bool, ties: dict[str, bool]) -> ModelConfig:
    """Our config of the model that has this state dict; UserError if ``config`` requires something that isn't
    implemented here, or lacks a setting that the weights don't show."""
    defaults = ModelConfig()
    # Hugging Face's configs may lack pre_lnorm, and the original's weights could then be of either form.
    settings: dict[str, Any] = {"pre_lnorm": None if is_original else False, "dropout": defaults.dropout}
    settings |= {"clamp_len": -1, "tgt_len": defaults.segment_len, "mem_len": defaults.mem_len, **config}
    for name, value in WITHOUT_COUNTERPART.items():
        if config.get(name, value) != value:
            raise UserError(f"expected {name}={value}, the only one supported, got {name}={config[name]}.")
    if not isinstance(pre_lnorm := settings["pre_lnorm"], bool):
        raise UserError(
            "expected pre_lnorm to be True (norms before each sublayer) or False (after each sum), got "
            f"pre_lnorm={pre_lnorm!r}; set it in config, since the weights don't show it."
        )
    matrices = ["layers.0.dec_attn.r_w_bias", "layers.0.pos_ff.CoreNet.0.weight"]
    embedding = sorted(name for name in state if name.startswith("word_emb.emb_layers."))
    matrices += embedding or ["word_emb.emb_layers.0.weight"]
    if wrong := [name for name in matrices if name not in state or state[name].dim() != 2]:
        raise UserError(f"expected the weights to have matrices {abbreviate(wrong)}.")
    (heads, _), (d_ff, d_model), *tables = (state[name].shape for name in matrices)
    *cutoffs, vocab_size = accumulate(words for words, _ in tables)
    d_embed = tables[0][1]
    div_val = d_embed // max(tables[1][1], 1) if cutoffs else 1
    if not cutoffs and (rare := len(state.get("crit.cluster_bias", ()))):  # in one table, they don't show
        check_value("cutoffs", config.get("cutoffs"), list[int] | tuple[int, ...])
        cutoffs = [cutoff for cutoff in config["cutoffs"] if cutoff != vocab_size]
        if len(cutoffs) != rare:
            raise UserError(f"the weights have {rare} clusters of rare words, the config cutoffs={cutoffs}.")
    return ModelConfig(
        model="transformer-xl",
        vocab_size=vocab_size,
        d_model=d_model,
        heads=heads,
        n_layers=depth(state),
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


def targets_by_name(model: MemoryLM) -> dict[str, list[Tensor]]:
    """For each name of theirs, the tensors of ``model``, of any shape, or parts of them, that its rows fill
    in order. What only our model has becomes 0."""
    targets: dict[str, list[Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if name == "head.bias":
            of_tables = tensor.split([table.num_embeddings for table in model.embed.tables])  # type: ignore[union-attr]
            targets |= {f"crit.out_layers.{i}.bias": [part] for i, part in enumerate(of_tables)}
        elif name.endswith(OURS_ALONE):
            tensor.zero_()
        else:
            for pattern, replacement in RENAMED:
                name = re.sub(pattern, replacement, name)
            targets.setdefault(name, []).append(tensor.mT if name.startswith("crit.out_projs.") else tensor)
    return targets
