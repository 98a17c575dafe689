"""What memory is worth, of models that ignore it and of small ones, against plain loops."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

from memformers.evaluation.controls import controls_of
from memformers.evaluation.intervals import mean_over_streams
from memformers.evaluation.memory_ablation import N_GRAM, Difference, memory_ablation
from memformers.models.language_model import LMScores
from memformers.models.memory import Memory
from memformers.models.scores import TokenLosses
from tests.builders import SMALL, small_lm

TEXT = torch.randint(0, 3, (3_000,), generator=torch.Generator().manual_seed(0))
WORDS = torch.randint(-1, 3, (3_000,), generator=torch.Generator().manual_seed(1))


class Ignores(nn.Module):
    """Stands for a model that remembers and makes no use of it: its loss is ``more`` than its next token."""

    device = torch.device("cpu")

    def __init__(self, model="compressive", more=0.0, **changes):
        super().__init__()
        self.config, self.more = replace(SMALL, model=model, **changes), more

    def forward(self, inputs, memory, targets):
        losses = targets + self.more
        memory = Memory((torch.randn(5, inputs.shape[1], 2),), (torch.randn(4, inputs.shape[1], 2),))
        return LMScores(TokenLosses(losses.mean(), losses, targets == 0), memory, torch.zeros(()))


class Reads(Ignores):
    """Stands for a model that loses what the absolute numbers in its compressed memory add up to, which it
    writes there itself: 1 in each even stream, 2 in each odd one."""

    def forward(self, inputs, memory, targets):
        slots = memory.c_mem[0] if memory.c_mem else torch.zeros(4, inputs.shape[1], 2)
        losses = torch.ones(targets.shape) * slots.abs().mean((0, 2))
        written = (1.0 + torch.arange(inputs.shape[1]) % 2)[:, None].expand(4, -1, 2)
        memory = Memory((torch.randn(5, inputs.shape[1], 2),), (written,))
        return LMScores(TokenLosses(losses.mean(), losses, targets == 0), memory, torch.zeros(()))


def test_memory_that_is_ignored_is_worth_exactly_nothing():
    found = memory_ablation({"ignores": Ignores()}, TEXT, WORDS, tokens=800)
    nothing, controls = Difference(0.0, 0.0), controls_of(Ignores().config.lengths)
    assert len(controls) == 4
    for group in (found.overall, *found.by_occurrences, *found.by_repeat_distance):
        if group.tokens:
            assert group.less_untouched["ignores"] == dict.fromkeys(controls, nothing)
    assert found.swapped_less_zeroed["ignores"] == {"slots": nothing, "memory": nothing}
    assert found.baseline is None
    assert found.overall.less_baseline == {}


def test_a_model_that_reads_its_slots_loses_by_what_is_there():
    """Streams lose 1 and 2 in turn, so zeros cost −1 and −2, and another stream's slots +1 and −1."""
    found = memory_ablation({"reads": Reads()}, TEXT, WORDS, tokens=800)
    costs = found.overall.less_untouched["reads"]
    half = 2.131 * math.sqrt(16 / 15) / math.sqrt(16)  # Student's t for 15 degrees of freedom
    assert found.streams == 16
    assert found.overall.loss["reads"] == 1.5
    assert costs["slots zeroed"].mean == -1.5
    assert costs["slots zeroed"].half_width == pytest.approx(half / 2, rel=1e-3)
    assert costs["slots swapped"].mean == 0.0
    assert costs["slots swapped"].half_width == pytest.approx(half, rel=1e-3)
    assert costs["memory zeroed"] == Difference(0.0, 0.0)
    assert found.swapped_less_zeroed["reads"]["slots"].mean == 1.5


def test_what_a_model_does_not_have_is_not_measured():
    found = memory_ablation(
        {"none": Ignores("transformer"), "xl": Ignores("transformer-xl")}, TEXT, WORDS, tokens=200
    )
    assert found.overall.less_untouched["none"] == {}
    assert set(found.overall.less_untouched["xl"]) == {"memory zeroed", "memory swapped"}
    assert set(found.swapped_less_zeroed["xl"]) == {"memory"}


@pytest.mark.usefixtures("float64")
def test_losses_and_costs_are_those_of_streams_read_one_segment_at_a_time():
    lm, S, warm_up = small_lm("compressive").train(), 7, 21
    found = memory_ablation({"lm": lm}, TEXT, WORDS, tokens=16 * 10)
    length, plain, without = (len(TEXT) - 1) // 16, 0.0, 0.0
    at = torch.arange(16) * length + torch.arange(warm_up + 11)[:, None]
    tokens, memory = TEXT[at], Memory(())
    for start in range(0, warm_up + 10, S):
        inputs = tokens[start : min(start + S, warm_up + 10)]
        targets = tokens[start + 1 :][: len(inputs)]
        zeros = Memory(memory.mem, tuple(torch.zeros_like(x) for x in memory.c_mem))
        scores, after, _ = lm(inputs, memory, targets)
        if start >= warm_up:
            plain += scores.losses.sum().item()
            without += lm(inputs, zeros, targets).scores.losses.sum().item()
        memory = after
    n = found.overall.tokens
    assert (n, found.warm_up) == (160, warm_up)
    assert found.overall.loss["lm"] == pytest.approx(plain / n, abs=1e-9)
    cost = found.overall.less_untouched["lm"]["slots zeroed"].mean
    assert cost == pytest.approx((without - plain) / n, abs=1e-9)
    assert abs(cost) > 1e-4
    assert lm.training


def test_arms_are_compared_on_the_same_tokens_with_the_one_that_looks_back_least():
    models = {"far": Ignores(more=0.25, segment_len=6), "near": Ignores("transformer", segment_len=5)}
    found = memory_ablation(models, TEXT, WORDS, tokens=500)
    assert found.baseline == "near"
    assert set(found.overall.less_baseline) == {"far"}
    for group in (found.overall, *found.by_occurrences, *found.by_repeat_distance):
        if group.tokens:
            assert group.less_baseline["far"].mean == pytest.approx(0.25, abs=1e-6)


def test_every_token_is_in_one_group_of_each_kind():
    found = memory_ablation({"ignores": Ignores()}, TEXT, WORDS, tokens=800)
    counted = found.overall.tokens
    assert counted == 800
    assert sum(group.tokens for group in found.by_occurrences) == counted
    assert sum(group.tokens for group in found.by_repeat_distance) == counted
    at = (
        torch.arange(16) * ((len(TEXT) - 1) // 16)
        + torch.arange(found.warm_up + 1, found.warm_up + 51)[:, None]
    )
    by_name = {group.name: group for group in found.by_occurrences}
    assert by_name["never"].tokens == int((WORDS[at] == 0).sum())
    assert by_name["never"].loss["ignores"] == pytest.approx(TEXT[at][WORDS[at] == 0].double().mean().item())
    assert asdict(by_name["1,000 or more"])["loss"] == {}
    near = found.by_repeat_distance[0]
    assert near.name == "1 – 3"
    repeats = [
        tokens[t - d - N_GRAM + 1 : t - d + 1] == tokens[t - N_GRAM + 1 : t + 1]
        for tokens in TEXT.split((len(TEXT) - 1) // 16)[:16]
        for tokens in [tokens.tolist()]
        for t in range(found.warm_up + 1, found.warm_up + 51)
        for d in (1, 2, 3)
    ]
    assert near.tokens == sum(any(repeats[i : i + 3]) for i in range(0, len(repeats), 3))


def test_a_short_text_is_read_in_fewer_streams_and_one_for_a_single_stream_not_at_all():
    lm = Ignores()  # 21 tokens fill its memories, and a segment has 7
    assert memory_ablation({"lm": lm}, TEXT[: 5 * 28 + 1], WORDS, tokens=800).streams == 5
    assert memory_ablation({"lm": lm}, TEXT[: 2 * 28], WORDS, tokens=800) is None


def test_an_interval_is_that_of_the_streams_means_and_weighs_unequal_ones():
    equal = mean_over_streams(torch.tensor([2.0, 4.0, 6.0]), torch.tensor([2, 2, 2]))
    assert (equal.mean, equal.n) == (2.0, 3)
    assert equal.half_width == pytest.approx(4.303 / math.sqrt(3))
    unequal = mean_over_streams(torch.tensor([1.0, 4.0, 0.0]), torch.tensor([1, 3, 0]))
    assert (unequal.mean, unequal.n) == (1.25, 2)
    assert unequal.half_width == pytest.approx(12.706 * 0.125)  # residuals −1/8 and 1/8, deviation √2 / 8
    assert math.isnan(mean_over_streams(torch.tensor([1.0, 0.0]), torch.tensor([1, 0])).half_width)


DOCUMENTS = (40, 12, 75, 29, 3, 60, 33, 300)
"""Of TEXT; 21 tokens fill the memories, and two of these documents have fewer than a segment of 7 beyond."""


@pytest.mark.usefixtures("float64")
def test_documents_are_read_each_alone_and_swapped_with_one_at_the_same_place():
    lm, S, warm_up = small_lm("compressive"), 7, 21
    n = sum(DOCUMENTS)
    found = memory_ablation({"lm": lm}, TEXT[:n], WORDS[:n], tokens=300, documents=DOCUMENTS)
    read = [min(len(d), 1 + warm_up + 50) for d in TEXT[:n].split(DOCUMENTS) if len(d) > warm_up + S]
    texts = [d for d in TEXT[:n].split(DOCUMENTS) if len(d) > warm_up + S]
    order = sorted(range(len(read)), key=lambda i: -read[i])
    memories, sums, counted = [Memory(())] * len(read), dict.fromkeys(("plain", "zeroed", "swapped"), 0.0), 0
    for start in range(0, max(read) - 1, S):
        going = [i for i in order if read[i] - 1 > start]
        before = {i: memories[j] for i, j in zip(going, [going[-1], *going], strict=False)}
        for i in going:
            stop = min(start + S, read[i] - 1)
            inputs, targets = texts[i][start:stop, None], texts[i][start + 1 : stop + 1, None]
            own = memories[i]
            zeros = tuple(torch.zeros_like(x) for x in own.c_mem)
            given = {
                "plain": own,
                "zeroed": Memory(own.mem, zeros),
                "swapped": Memory(own.mem, before[i].c_mem),
            }
            if start >= warm_up:
                counted += len(targets)
                for name, memory in given.items():
                    sums[name] += lm(inputs, memory, targets).scores.losses.sum().item()
            memories[i] = lm(inputs, own, targets).memory
    assert found.of_documents
    assert (found.streams, found.overall.tokens) == (6, counted)
    assert found.overall.loss["lm"] == pytest.approx(sums["plain"] / counted, abs=1e-9)
    for change in ("zeroed", "swapped"):
        cost = found.overall.less_untouched["lm"][f"slots {change}"].mean
        assert cost == pytest.approx((sums[change] - sums["plain"]) / counted, abs=1e-9)
        assert abs(cost) > 1e-5
    less = found.swapped_less_zeroed["lm"]["slots"].mean
    assert less == pytest.approx((sums["swapped"] - sums["zeroed"]) / counted, abs=1e-9)
    assert sum(group.tokens for group in found.by_occurrences) == counted


def test_documents_that_fill_no_memory_are_not_measured():
    assert (
        memory_ablation({"lm": Ignores()}, TEXT[:100], WORDS[:100], tokens=800, documents=(28, 28, 44))
        is None
    )
