"""What every memory must satisfy, checked with a small network in double precision: ``memformers check``, and
[`assert_conforms`][] in a test."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from memformers.common.errors import UserError
from memformers.generation.incremental import Stepper
from memformers.models.base import MemoryStack, operations
from memformers.models.config import ModelConfig, is_used
from memformers.models.custom_memory import CustomMemory
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory, memory_from_tensors, memory_tensors

SMALL: dict[str, Any] = {
    "vocab_size": 11, "d_model": 12, "heads": 3, "n_layers": 2, "d_ff": 16, "segment_len": 6, "mem_len": 8,
    "c_mem_len": 4, "compression_rate": 2,
}  # fmt: skip
TOLERANCE = 1e-9
"""The largest difference between what must be equal."""


def conformance(model: str | type[MemoryStack], **settings: Any) -> Iterator[tuple[str, str, str]]:
    """For each check its name, what it asks, and one sentence that says what differs, or what the memory's
    own code raised; an empty one if nothing does. ``model`` and ``settings`` are those of a
    [`ModelConfig`][memformers.models.config.ModelConfig]. Raises UserError for one that can't be built."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = ModelConfig(**{**SMALL, **settings, "model": model})
        try:
            lm = MemoryLM(config).double().eval()
        except UserError:
            raise
        except Exception as error:  # of the code that is checked
            yield "building", "The network can be built.", f"{type(error).__name__}: {error}"
            return
        for parameter in lm.parameters():
            if not parameter.any():  # what begins at zero would hide what it does
                torch.nn.init.normal_(parameter, std=0.5)
        for check in CHECKS:
            asked = " ".join((check.__doc__ or "").split())
            try:
                yield check.__name__, asked, check(lm)
            except Exception as error:  # of the code that is checked
                plain = isinstance(error, UserError)
                yield check.__name__, asked, str(error) if plain else f"{type(error).__name__}: {error}"


def assert_conforms(model: str | type[MemoryStack], **settings: Any) -> None:
    """Raise AssertionError, with a line for each check of [`conformance`][] that failed; the arguments and
    other errors are those of it."""
    failed = [f"{name}: {said}" for name, _, said in conformance(model, **settings) if said]
    if failed:
        raise AssertionError("\n".join(failed))


def segments(lm: MemoryLM) -> str:
    """Reading in segments equals reading in one pass, as long as the memory keeps every position."""
    M, S = min(own.mem_len for own in lm.config.memory_sizes), lm.config.segment_len
    if not M:
        return ""  # nothing is kept as it is
    text = _tokens(lm, M + S)
    found, _, _ = _read(lm, text, [*_whole(M, S), S])
    return _differs(found, lm(text).logits, "a text read in segments", "the same text in one pass")


def documents(lm: MemoryLM) -> str:
    """A stream that was reset equals a fresh one, and changes no other."""

    def differs(found: Tensor, fresh: Tensor, other: Tensor, by: str) -> str:
        return _differs(
            found[-len(fresh) :, :1], fresh, f"a stream after {by}", "a fresh stream"
        ) or _differs(found[:, 1:], other[:, 1:], f"a stream beside one with {by}", "the same without it")

    S, sizes = lm.config.segment_len, lm.config.memory_sizes
    rate, M = math.lcm(*(own.compression_rate for own in sizes)), max(own.mem_len for own in sizes)
    begin = rate * ((M + S) // rate + 1)  # the edge of a slot
    text = _tokens(lm, begin + 3 * S)
    starts = torch.zeros_like(text, dtype=torch.bool)
    starts[begin, 0] = True
    first = S - begin % S
    fresh, _, _ = _read(lm, text[begin:, :1], [first, *_whole(3 * S - first, S)])
    if said := differs(_read(lm, text, starts=starts)[0], fresh, _read(lm, text)[0], "doc_starts"):
        return said
    both = math.lcm(S, rate)
    _, memory, _ = _read(lm, _tokens(lm, both * (M // both + 2)))
    text, reset = _tokens(lm, 3 * S), memory.reset(torch.tensor([True, False]))
    found, fresh, other = (
        _read(lm, part, memory=of)[0] for part, of in ((text, reset), (text[:, :1], None), (text, memory))
    )
    return differs(found, fresh, other, "Memory.reset")


def streams(lm: MemoryLM) -> str:
    """The streams of a batch don't change each other."""
    text = _tokens(lm, _filling(lm), 3)
    wanted = torch.cat([_read(lm, one)[0] for one in text.split(1, dim=1)], dim=1)
    return _differs(_read(lm, text)[0], wanted, "a stream in a batch", "the stream alone")


def causality(lm: MemoryLM) -> str:
    """No output depends on a later token, nor has a gradient from it."""
    _, memory, _ = _read(lm, _tokens(lm, _filling(lm)))
    text = _tokens(lm, lm.config.segment_len)
    before = lm(text, memory).logits
    for t in range(1, len(text)):
        changed = text.clone()
        changed[t] = (changed[t] + 1) % lm.config.vocab_size
        what = f"the output before token {t} of a segment, when that token is another one,"
        if said := _differs(lm(changed, memory).logits[:t], before[:t], what, "what it was"):
            return said
    x = lm.embed(text).detach().requires_grad_()
    output, _ = lm.transformer(x, memory, sizes=lm.config.memory_sizes)
    for t, score in enumerate((output * torch.rand_like(output)).sum((1, 2))):
        (grad,) = torch.autograd.grad(score, x, retain_graph=True)
        by_position = grad.abs().flatten(1).amax(1)  # [S]
        later = (~(by_position[t + 1 :] <= TOLERANCE)).nonzero()
        if len(later):
            last = t + 1 + int(later[-1])
            return (
                f"the output at position {t} of a segment has a gradient from the input at position {last}, "
                f"up to {by_position[last]:.2g}."
            )
    return ""


def size(lm: MemoryLM) -> str:
    """The memory stops growing."""
    memory, sizes, whole = Memory(()), [], _filling(lm) // lm.config.segment_len
    for text in _tokens(lm, 4 * whole * lm.config.segment_len).split(lm.config.segment_len):
        memory = lm(text, memory).memory
        sizes.append(sum(x[:, 0].numel() for part in memory.parts.values() for x in part))
    early, late = max(sizes[: 2 * whole]), max(sizes[2 * whole :])
    said = f"a stream's memory has {early} numbers after {2 * whole} segments and {late} after {4 * whole}."
    return said * (late > early)


def keys(lm: MemoryLM) -> str:
    """Each layer remembers as many positions and slots as it declares, and reads them all."""
    _, memory, _ = _read(lm, _tokens(lm, _filling(lm)))
    lengths = memory.lengths(lm.config.n_layers)
    for layer, ((M, C), own) in enumerate(zip(lengths, lm.config.memory_sizes, strict=True)):
        if not own.mem_len - _waiting(lm) <= M <= own.longest_memory or own.c_mem_len != C:
            return (
                f"layer {layer} remembers {M} positions and {C} slots, but memory_sizes declares "
                f"{own.mem_len} and {own.c_mem_len}."
            )
    parts = {"position": memory.mem, "slot": memory.c_mem}
    read = [(what, i, x.requires_grad_()) for what, xs in parts.items() for i, x in enumerate(xs) if len(x)]
    score = lm(_tokens(lm, lm.config.segment_len), memory).logits.square().sum()
    of_all = [x for _, _, x in read]
    grads = torch.autograd.grad(score, of_all, allow_unused=True, materialize_grads=True) if read else ()
    for (what, layer, _), grad in zip(read, grads, strict=True):
        unread = (grad == 0).flatten(1).all(1)
        if what == "position" and lm.config.same_length:
            unread[0] = False  # the query's own position takes its place in the window
        if unread.any():
            at = int(unread.nonzero()[0])
            return f"{what} {at} of layer {layer} changes no output of the next segment."
    return ""


def cost(lm: MemoryLM) -> str:
    """Attention gets as many keys, and a token takes as many operations, as the memory declares."""
    S, D, kind = lm.config.segment_len, lm.config.d_model, type(lm.transformer)
    shared = {
        each.name: getattr(lm.config, each.name)
        for each in fields(lm.config)
        if is_used(each.name, "transformer") and each.name not in ("model", "own")
    }
    if S == 1:
        return ""  # PyTorch doesn't count products of single numbers
    found, sizes = _counted(lm.config)
    without, own_alone = _counted(ModelConfig(model="transformer", **shared))
    declared, more = kind.attention_sizes(lm.config), kind.more_operations(lm.config)
    pairs = zip(sizes, declared, strict=False)
    if len(sizes) != len(declared) or any(Q != R or abs(K - L) > _waiting(lm) for (Q, K), (R, L) in pairs):
        said = (
            ", ".join(f"{Q} queries and {K} keys" for Q, K in each) or "nothing" for each in (sizes, declared)
        )
        return f"attention gets {next(said)}, declared are {next(said)}."
    of_attention = sum(operations(D, *each) for each in sizes) - sum(
        operations(D, *each) for each in own_alone
    )
    beside = (found - without - of_attention) // S
    if beside == more:
        return ""
    return (
        f"beside attention, a token takes {beside:,} operations to read and write the memory, but "
        f"more_operations declares {more:,}."
    )


def saving(lm: MemoryLM) -> str:
    """A model and a memory that were saved and loaded compute the same."""
    _, memory, _ = _read(lm, _tokens(lm, _filling(lm)))
    text = _tokens(lm, lm.config.segment_len)
    with TemporaryDirectory() as folder:
        lm.save_pretrained(Path(folder) / "model")
        loaded = MemoryLM.from_pretrained(Path(folder) / "model", model=type(lm.transformer))
    again = loaded(text, memory_from_tensors(memory_tensors(memory), lm.config.n_layers)).logits
    return _differs(again, lm(text, memory).logits, "a model that was loaded", "the saved one")


def stepping(lm: MemoryLM) -> str:
    """Reading token by token, as generation does, equals reading in segments."""
    if lm.config.model == "transformer":
        return ""  # it is read with a sliding window
    text, decoder = _tokens(lm, _filling(lm)), Stepper(lm, 2)
    found = torch.stack([decoder.read(token)[-1] for token in text.split(1)])
    return _differs(found, _read(lm, text)[0], "a text read token by token", "the same text in segments")


def gradients(lm: MemoryLM) -> str:
    """Every parameter gets a gradient from the losses."""
    lm.train()  # where a compression may learn from the language model's loss
    text = _tokens(lm, _filling(lm))
    logits, _, losses = _read(lm, text, through_memory=is_used("tbptt", lm.config.model))
    loss = cross_entropy(logits[:-1].flatten(0, 1), text[1:].flatten()) + losses
    names, parameters = zip(*lm.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    lm.eval()
    for name, parameter, grad in zip(names, parameters, grads, strict=True):
        if grad is None or not grad.any():
            return f"{name} {list(parameter.shape)} gets no gradient from any loss."
        if not grad.isfinite().all():
            return f"{name} {list(parameter.shape)} gets a gradient that is not finite."
    return ""


CHECKS: Sequence[Callable[[MemoryLM], str]] = (
    segments, documents, streams, causality, size, keys, cost, saving, stepping, gradients,
)  # fmt: skip


class Softmaxes(TorchDispatchMode):
    """Keeps the two last sizes of every softmax: those of an attention are its queries and its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation of PyTorch."""
        result = function(*args, **(kwargs or {}))
        if "softmax" in str(function):
            self.sizes.append((result.shape[-2], result.shape[-1]))
        return result


def _counted(config: ModelConfig) -> tuple[int, list[tuple[int, int]]]:
    """The operations of matrix products for a segment of one stream, with a full memory and without what all
    streams share; and how many queries and keys each of its attentions gets."""
    # The naive kernel computes every score, as is declared.
    lm, counts = MemoryLM(replace(config, kernel="naive")).double().eval(), []
    for streams in (1, 2):
        _, memory, _ = _read(lm, _tokens(lm, _filling(lm), streams))
        text = _tokens(lm, config.segment_len, streams)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            with Softmaxes() as attentions:
                x = lm.embed(text)
                _, inputs = lm.transformer(x, memory, sizes=config.memory_sizes)
            if isinstance(lm.transformer, CustomMemory):
                lm.transformer.remember(memory, inputs, config.memory_sizes, segment_len=len(x))
        counts.append(counter.get_total_flops())
    return counts[1] - counts[0], attentions.sizes


def _waiting(lm: MemoryLM) -> int:
    """How many positions of a layer wait at most until they fill a slot."""
    rates = [own.compression_rate for own in lm.config.memory_sizes]
    return max(rates) - 1 if is_used("compression_rate", lm.config.model) else 0


def _filling(lm: MemoryLM) -> int:
    """A number of tokens in whole segments after which every memory is full."""
    return (lm.config.remembered_positions // lm.config.segment_len + 3) * lm.config.segment_len


def _tokens(lm: MemoryLM, length: int, batch: int = 2) -> Tensor:
    return torch.randint(lm.config.vocab_size, (length, batch))


def _whole(length: int, S: int) -> list[int]:
    """The lengths of the segments of ``length`` tokens."""
    return [min(S, length - at) for at in range(0, length, S)]


def _read(
    lm: MemoryLM,
    text: Tensor,
    lengths: Sequence[int] = (),
    starts: Tensor | None = None,
    memory: Memory | None = None,
    through_memory: bool = False,
) -> tuple[Tensor, Memory, Tensor]:
    """The logits ``[T, B, ·]`` of ``text [T, B]``, read in segments of these ``lengths`` or of the model's,
    with these ``starts [T, B]``; the memory after it, and the sum of the auxiliary losses."""
    logits, losses = [], torch.zeros((), dtype=torch.float64)
    parts = list(lengths) or _whole(len(text), lm.config.segment_len)
    all_starts = [None] * len(parts) if starts is None else starts.split(parts)
    for part, part_starts in zip(text.split(parts), all_starts, strict=True):
        output = lm(part, memory, doc_starts=part_starts, through_memory=through_memory)
        logits.append(output.logits)
        memory, losses = output.memory, losses + output.auxiliary_loss
    assert memory is not None
    return torch.cat(logits), memory, losses


def _differs(found: Tensor, wanted: Tensor, what: str, than: str) -> str:
    """A sentence if ``found [T, B, ·]`` is not ``wanted``, of the same shape."""
    difference = (found - wanted).abs().amax(-1)
    wrong = (~(difference <= TOLERANCE)).nonzero()  # NaN too
    if not len(wrong):
        return ""
    t, b = wrong[0].tolist()
    return (
        f"{what} differs from {than} by up to {difference.max():.2g}, first at position {t} of "
        f"{len(found)} in stream {b}."
    )
