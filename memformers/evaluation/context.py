"""How much context helps: relative effective context length (RECL).

The loss of a model falls as it gets more of the text before a token, until more context doesn't help. A model
that predicts well from little context can gain less from more. So each gain is measured relative to the best
prediction that any model of the group makes from the shorter context. Source: Transformer-XL (Dai et al.
2019, arXiv 1901.02860), section 4.3 and appendix C. With l_i(c, t) the loss of model i on token t when it has
read the c tokens before it:

    b(c, t) = min over i of l_i(c, t)
    f_i(c, c′) = mean over t in T of min(b(c, t), l_i(c′, t))
    g_i(c, c′) = (exp f_i(c, c) − exp f_i(c, c′)) / exp f_i(c, c)

where T is the fraction r of tokens with the largest b(c, t), the hardest ones. RECL is the first of c = Δ,
2Δ, … for which g_i(c, c + Δ) is below 1 %.

The tokens are a sample of the text, so both are uncertain. The intervals are percentiles over resamples
of the tokens (Efron 1979), for each of which T, g and RECL are computed anew.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.common.errors import UserError
from memformers.common.fields import Count, check_arguments
from memformers.common.text_format import counted
from memformers.data.streams import streams_and_places
from memformers.models.base import eval_mode
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.vocabulary import upcast

THRESHOLD = 0.01
"""The relative gain below which more context counts as useless; the paper's value."""
HARDEST = (0.1, 0.5, 1.0)
"""The fractions r of tokens, as in the paper."""
RESAMPLES = 500
"""The number of resamples of the tokens, from which the intervals come."""
STREAMS = 250
"""The number of tokens whose contexts are read in parallel."""


@dataclass(frozen=True)
class EffectiveContext:
    """How far back each model of a group uses the text."""

    step: int
    """Δ, in tokens."""
    positions: int
    """The number of tokens of the text that were measured."""
    recl: dict[str, dict[str, int | None]]
    """For each r as text and each model: RECL in tokens; None where the longest context still helped."""
    gains: dict[str, dict[str, list[float]]]
    """For each r and model: g(c, c + Δ) at c = Δ, 2Δ, …, as far as it was measured."""
    recl_intervals: dict[str, dict[str, tuple[int | None, int | None]]]
    """For each r and model: the ends of RECL's 95 % interval over resamples; None as above."""
    gain_intervals: dict[str, dict[str, list[tuple[float, float]]]]
    """For each r and model: the 95 % intervals of ``gains``."""


@check_arguments
def effective_context(
    models: Mapping[str, MemoryLM],
    tokens: Tensor,
    *,
    step: Count = 32,
    positions: Count = 1000,
    longest: int = 2048,
    documents: Sequence[int] = (),
    progress: Callable[[int], object] = lambda tokens: None,
) -> EffectiveContext:
    """RECL of ``models``, by name, on ``positions`` tokens evenly spread over the text ``tokens [n]``. If
    the text consists of documents, ``documents`` are their numbers of tokens, and no context reaches into
    another document.

    Contexts grow by ``step`` tokens until they help none of the models, or reach ``longest`` or what half of
    the tokens have before them. ``progress`` is called with the number of further tokens that were read.
    Raises ValueError for a step or a number of positions below 1, and for a text too short for two steps.
    """
    _, before = streams_and_places(documents or (len(tokens),))
    longest = min(longest, int(before.median()))
    if longest < 2 * step:
        of_documents = f" in {counted(len(documents), 'document')}" if documents else ""
        raise UserError(
            f"a text of {len(tokens):,} tokens{of_documents} is too short to compare contexts of {step} and "
            f"{2 * step} tokens; use a longer text or a smaller step."
        )
    enough = (before >= longest).nonzero()[:, 0]
    count = min(positions, len(enough))
    last = longest + len(enough) - 1  # so that in a plain text, these are the tokens themselves
    at = enough[torch.linspace(longest, last, count, dtype=torch.float64).long().unique() - longest]

    @cache
    def losses_of(name: str, context: int) -> Tensor:
        return losses_with_context(models[name], tokens, at, context)

    def losses(context: int) -> dict[str, Tensor]:
        progress(len(models) * context * len(at))
        # Beyond its sight, nothing changes.
        return {name: losses_of(name, context_in_sight(model, context)) for name, model in models.items()}

    # The tokens themselves, and draws of as many with replacement, always the same: [1 + RESAMPLES, n].
    drawn = torch.randint(len(at), (RESAMPLES, len(at)), generator=torch.Generator().manual_seed(0))
    samples = torch.cat((torch.arange(len(at))[None], drawn))
    gains: dict[str, dict[str, list[Tensor]]] = {str(r): {name: [] for name in models} for r in HARDEST}
    context, short, helped = step, losses(step), True
    while helped and context + step <= longest:
        helped, long = False, losses(context + step)
        baseline = torch.stack(list(short.values())).amin(0)[samples]
        for r in HARDEST:
            hardest = baseline.topk(max(round(r * len(at)), 1)).indices
            b = baseline.gather(1, hardest)
            for name in models:
                best = torch.minimum(b, long[name][samples].gather(1, hardest))
                gain = -torch.expm1(best.mean(1) - b.mean(1))  # g, [1 + RESAMPLES]
                gains[str(r)][name].append(gain)
                helped |= gain[0].item() >= THRESHOLD
        context, short = context + step, long

    def each(of: Callable[[Tensor], Any]) -> dict[str, dict[str, Any]]:
        """For each r and model, this function of its gains ``[1 + RESAMPLES, contexts]``."""
        return {r: {n: of(torch.stack(g, dim=1)) for n, g in of_r.items()} for r, of_r in gains.items()}

    return EffectiveContext(
        step=step,
        positions=len(at),
        recl=each(lambda gain: first_below(gain[0].tolist(), step)),
        gains=each(lambda gain: gain[0].tolist()),
        recl_intervals=each(lambda gain: recl_interval(gain[1:], step)),
        gain_intervals=each(lambda gain: gain_intervals(gain[1:])),
    )


def first_below(gains: list[float], step: int) -> int | None:
    """The context length, in tokens, of the first gain below the threshold."""
    return next((step * (i + 1) for i, gain in enumerate(gains) if gain < THRESHOLD), None)


def recl_interval(gains: Tensor, step: int) -> tuple[int | None, int | None]:
    """The 2.5 % and 97.5 % percentiles of RECL over resamples with ``gains [samples, contexts]``; None for
    one beyond the longest context."""
    found = [first_below(gain, step) for gain in gains.tolist()]
    lengths, last = sorted(found, key=lambda length: length or math.inf), len(found) - 1
    return lengths[round(0.025 * last)], lengths[round(0.975 * last)]


def gain_intervals(gains: Tensor) -> list[tuple[float, float]]:
    """The 2.5 % and 97.5 % percentiles of ``gains [samples, contexts]``, of each context."""
    return [(low, high) for low, high in gains.quantile(gains.new_tensor([0.025, 0.975]), dim=0).T.tolist()]


def context_in_sight(model: MemoryLM, context: int) -> int:
    """How many of ``context`` tokens before another one reach its prediction: without memory a segment."""
    return context if model.config.remembered_positions else min(context, model.config.segment_len)


@torch.no_grad()
def losses_with_context(model: MemoryLM, tokens: Tensor, at: Tensor, context: int) -> Tensor:
    """The loss of the tokens at ``at [n]`` when only the ``context`` tokens before each were read, in nats,
    float64 ``[n]``. The context is read in segments; the last one is complete and ends at the token."""
    context, S = context_in_sight(model, context), model.config.segment_len
    lengths = [context % S] * (context % S > 0) + [S] * (context // S)
    found = []
    with eval_mode(model):
        for some in at.split(STREAMS):
            memory = Memory(())
            for segment in tokens[some + torch.arange(-context, 0)[:, None]].to(model.device).split(lengths):
                logits, memory, _ = model(segment, memory)  # segments [S, B]
            target = tokens[some].to(model.device)
            found.append(F.cross_entropy(upcast(logits[-1]), target, reduction="none").double().cpu())
    return torch.cat(found)
