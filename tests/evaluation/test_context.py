"""Relative effective context length, against its definition spelled out."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from memformers.evaluation import context
from memformers.evaluation.context import (
    effective_context,
    gain_intervals,
    losses_with_context,
    recl_interval,
)
from memformers.models.memory import Memory
from tests.builders import MODELS, small_lm

AT = torch.tensor([40, 41, 77, 199])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("context", [1, 6, 7, 8, 20])
def test_the_loss_with_a_context_is_that_of_a_text_which_begins_there(model, context):
    lm, tokens, read = small_lm(model), torch.randint(0, 11, (200,)), []
    lm.register_forward_pre_hook(lambda _, arguments: read.append(len(arguments[0])))
    got = losses_with_context(lm, tokens, AT, context).tolist()
    assert sum(read) == (min(context, 7) if model == "transformer" else context), "nothing more is seen"
    for t, loss in zip(AT.tolist(), got, strict=True):
        text, memory = tokens[t - context : t, None], Memory(())
        for segment in text.split([context % 7] * (context % 7 > 0) + [7] * (context // 7)):
            logits, memory, _ = lm(segment, memory)
        assert loss == pytest.approx(F.cross_entropy(logits[-1], tokens[t, None]).item(), abs=1e-10)


def spelled_out(losses, r, step):
    """The paper's algorithm, loop by loop; ``losses[name][c]`` is a list."""
    found = {}
    for name in losses:
        for c in itertools.count(step, step):
            b = [min(losses[n][c][t] for n in losses) for t in range(len(losses[name][c]))]
            hardest = sorted(range(len(b)), key=lambda t, b=b: -b[t])[: max(round(r * len(b)), 1)]
            short = sum(b[t] for t in hardest) / len(hardest)
            long = sum(min(b[t], losses[name][c + step][t]) for t in hardest) / len(hardest)
            if (math.exp(short) - math.exp(long)) / math.exp(short) < 0.01:
                found[name] = c
                break
    return found


def test_a_group_is_measured_as_the_paper_says_with_intervals_that_hold_it_each_time_the_same():
    models = {"short": small_lm("transformer"), "long": small_lm("transformer-xl", mem_len=20)}
    for model in models.values():
        model.head.weight.data *= 20  # so that what was read makes a difference
    tokens = torch.randint(0, 11, (400,))
    result = effective_context(models, tokens, step=3, positions=50, longest=90)
    assert result == effective_context(models, tokens, step=3, positions=50, longest=90)
    assert result.positions == 50
    at = torch.linspace(90, 399, 50).long()
    losses = {
        name: {c: losses_with_context(model, tokens, at, c).tolist() for c in range(3, 93, 3)}
        for name, model in models.items()
    }
    assert result.recl == {str(r): spelled_out(losses, r, 3) for r in (0.1, 0.5, 1.0)}
    assert max(max(lengths.values()) for lengths in result.recl.values()) > 3, "something helped"
    for r, name in itertools.product(result.gains, models):
        gains, ends = result.gains[r][name], result.gain_intervals[r][name]
        assert len(ends) == len(gains)
        assert all(low <= high for low, high in ends)
        if r == "1.0":  # the hardest of a resample are another choice of tokens
            assert ends[0][0] <= gains[0] <= ends[0][1]
        first, last = (math.inf if end is None else end for end in result.recl_intervals[r][name])
        assert first <= last


def test_intervals_are_percentiles_over_resamples():
    at_64, beyond, at_32 = [0.5, 0.0], [0.5, 0.5], [0.0, 0.5]
    gains = torch.tensor([at_64] * 90 + [beyond] * 8 + [at_32] * 3, dtype=torch.float64)
    assert recl_interval(gains, 32) == (32, None)
    assert recl_interval(gains[:90], 32) == (64, 64)
    ends = gain_intervals(torch.linspace(0, 1, 101, dtype=torch.float64)[:, None])
    assert ends == [pytest.approx((0.025, 0.975))]


def test_a_context_never_reaches_into_another_document(monkeypatch):
    documents, read = (100, 30, 90, 7, 80), []
    ends = list(itertools.accumulate(documents))
    monkeypatch.setattr(context, "losses_with_context", lambda _, tokens, at, context: (
        read.append((at.tolist(), context)), 10.0 / context * torch.ones(len(at)))[1])  # fmt: skip
    models, tokens = {"long": small_lm("transformer-xl")}, torch.zeros(307, dtype=torch.long)
    assert effective_context(models, tokens, step=5, positions=50, documents=documents).positions == 50
    assert max(context for _, context in read) == 35  # half of all tokens have 38 before them
    for at, context_len in read:
        for t in at:
            end = next(end for end in ends if end > t)
            assert t - context_len >= end - documents[ends.index(end)]


@pytest.mark.parametrize(
    ("n", "how", "message"),
    [(100, {}, "100 tokens .* 32 and 64"), (100, {"step": 0}, "step=0"),
     (307, {"documents": (100, 30, 90, 7, 80)}, "307 tokens in 5 documents .* 32 and 64")],
)  # fmt: skip
def test_a_text_too_short_and_other_mistakes_are_named(n, how, message):
    with pytest.raises(ValueError, match=message):
        effective_context({"none": small_lm("transformer")}, torch.zeros(n, dtype=torch.long), **how)
