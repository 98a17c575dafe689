"""How much context helps: relative effective context length (RECL).

A model's loss falls as it is given more of the text before a token, until more doesn't help. Models
that predict well from little context have less to gain from more, so each gain is counted over the
best that any model of the group makes of the shorter context. Source: Transformer-XL (Dai et al. 2019,
arXiv 1901.02860), section 4.3 and appendix C. With l_i(c, t) the loss of model i on token t when it
has read the c tokens before it:

    b(c, t) = min over i of l_i(c, t)
    f_i(c, c′) = mean over t in T of min(b(c, t), l_i(c′, t))
    g_i(c, c′) = (exp f_i(c, c) − exp f_i(c, c′)) / exp f_i(c, c)

where T are the fraction r of tokens with the largest b(c, t), the hardest. RECL is the first of
c = Δ, 2Δ, … for which g_i(c, c + Δ) is below 1 %.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.common.errors import UserError
from memformers.models.language_model import MemoryLM
from memformers.models.memory import Memory
from memformers.models.scores import in_full
from memformers.models.stack import eval_mode

THRESHOLD = 0.01
"""Relative gain below which more context counts as no help, the paper's."""
HARDEST = (0.1, 0.5, 1.0)
"""The fractions r of tokens that are looked at, the paper's."""
STREAMS = 250
"""Tokens whose contexts are read at once."""


@dataclass(frozen=True)
class EffectiveContext:
    """How far back each model of a group makes use of the text."""

    step: int
    """Δ, in tokens."""
    positions: int
    """Over how many tokens of the text it was measured."""
    recl: dict[str, dict[str, int | None]]
    """For each r as text and each model: RECL in tokens; None where the longest context still helped."""
    gains: dict[str, dict[str, list[float]]]
    """For each r and model: g(c, c + Δ) at c = Δ, 2Δ, …, as far as it was measured."""


def effective_context(
    models: Mapping[str, MemoryLM],
    tokens: Tensor,
    *,
    step: int = 32,
    positions: int = 1000,
    longest: int = 2048,
    documents: Sequence[int] = (),
    progress: Callable[[int], object] = lambda tokens: None,
) -> EffectiveContext:
    """RECL of ``models``, by name, on ``positions`` tokens evenly spread over the text ``tokens [n]``; where
    it consists of ``documents`` of so many tokens, a context never reaches into another one.

    Contexts grow by ``step`` tokens until they help none of the models, or reach ``longest`` or what
    half of the tokens have before them. ``progress`` is told how many tokens more were read. Raises
    ValueError for a step or a number of positions below 1, and for a text too short for two steps.
    """
    if step < 1 or positions < 1:
        raise UserError(f"step={step} and positions={positions} must both be at least 1.")
    before = tokens_before(documents or (len(tokens),))
    longest = min(longest, int(before.median()))
    if longest < 2 * step:
        of_documents = f" in {len(documents):,} documents" if documents else ""
        raise UserError(
            f"a text of {len(tokens):,} tokens{of_documents} is too short to compare contexts of {step} and "
            f"{2 * step} tokens; use a longer text or a smaller step."
        )
    enough = (before >= longest).nonzero()[:, 0]
    count = min(positions, len(enough))
    last = longest + len(enough) - 1  # so that in a plain text, these are the tokens themselves
    at = enough[torch.linspace(longest, last, count, dtype=torch.float64).long().unique() - longest]

    def losses(context: int) -> dict[str, Tensor]:
        progress(len(models) * context * len(at))
        return {name: losses_with_context(model, tokens, at, context) for name, model in models.items()}

    gains: dict[str, dict[str, list[float]]] = {str(r): {name: [] for name in models} for r in HARDEST}
    context, short = step, losses(step)
    helped = True
    while helped and context + step <= longest:
        helped, long = False, losses(context + step)
        baseline = torch.stack(list(short.values())).amin(0)
        for r in HARDEST:
            hardest = baseline.topk(max(round(r * len(at)), 1)).indices
            for name in models:
                gain = relative_gain(baseline[hardest], long[name][hardest])
                gains[str(r)][name].append(gain)
                helped |= gain >= THRESHOLD
        context, short = context + step, long
    recl = {
        r: {name: first_below(gain, step) for name, gain in of_models.items()}
        for r, of_models in gains.items()
    }
    return EffectiveContext(step, len(at), recl, gains)


def tokens_before(documents: Sequence[int]) -> Tensor:
    """How many tokens of its document are before each token of ``documents`` of so many tokens, int64
    ``[n]``."""
    lengths = torch.tensor(documents)
    return torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)


def relative_gain(baseline: Tensor, losses: Tensor) -> float:
    """g of tokens with these baselines and losses over the longer context, in nats, both ``[n]``."""
    short, long = baseline.mean(), torch.minimum(baseline, losses).mean()
    return -torch.expm1(long - short).item()


def first_below(gains: list[float], step: int) -> int | None:
    """The context length, in tokens, of the first gain that is no help."""
    return next((step * (i + 1) for i, gain in enumerate(gains) if gain < THRESHOLD), None)


@torch.no_grad()
def losses_with_context(model: MemoryLM, tokens: Tensor, at: Tensor, context: int) -> Tensor:
    """The loss of the tokens at ``at [n]`` when only the ``context`` tokens before each were read, in
    nats, float64 ``[n]``. Read as always: by segments, the last one whole and ending there."""
    device, segment_len = model.device, model.config.segment_len
    if not model.config.remembered_positions:
        context = min(context, segment_len)  # nothing of the segments before is known in the last one
    first = context % segment_len
    lengths = [first] * (first > 0) + [segment_len] * (context // segment_len)
    found = []
    with eval_mode(model):
        for some in at.split(STREAMS):
            text = tokens[some + torch.arange(-context, 0)[:, None]].to(device)  # [context, B]
            memory = Memory(())
            for segment in text.split(lengths):
                logits, memory, _ = model(segment, memory)
            target = tokens[some].to(device)
            found.append(F.cross_entropy(in_full(logits[-1]), target, reduction="none").double().cpu())
    return torch.cat(found)
