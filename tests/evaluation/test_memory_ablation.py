"""How much memory helps models that ignore it, that copy, and small ones, against plain loops."""

from collections import defaultdict
from dataclasses import asdict, replace
from itertools import islice, pairwise

import pytest
import torch
from einops import rearrange
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from memformers.common.intervals import mean_of_groups
from memformers.comparison.recall.measurement import distance_edges, recall_by_distance
from memformers.data.recall_stream import RecallStream, recall_segments
from memformers.evaluation.controls import MAX_STREAMS, choose_streams, controls_of, memory_ablation
from memformers.models.config import ModelConfig
from memformers.models.language_model import LMScores
from memformers.models.losses import TokenLosses
from memformers.models.memory import Memory
from memformers.models.rules.compressive import CompressiveRule
from tests.builders import SMALL, small_lm
from tests.texts import memory_of, updated

TEXT = torch.randint(0, 3, (3_000,), generator=torch.Generator().manual_seed(0))


class Ignores(nn.Module):
    """Stands for a model that remembers and makes no use of it: its loss is ``more`` than its next token."""

    device = torch.device("cpu")

    def __init__(self, model="compressive", more=0.0, **changes):
        super().__init__()
        self.config, self.more = replace(SMALL, model=model, **changes), more

    def forward(self, inputs, memory, targets):
        losses = targets + self.more
        B = inputs.shape[1]
        memory = memory_of([torch.randn(5, B, 2)] * 2, [torch.randn(4, B, 2)] * 2)
        return LMScores(TokenLosses(losses.mean(), losses, targets == 0), memory, torch.zeros(()))


def test_models_are_measured_on_the_same_tokens():
    models = {
        "xl": Ignores("transformer-xl", 0.25, segment_len=6),
        "none": Ignores("transformer", segment_len=5),
    }
    ablation = memory_ablation(models, TEXT, tokens=500)
    assert ablation.loss["xl"] - ablation.loss["none"] == pytest.approx(0.25, abs=1e-6)
    assert ablation.costs["none"] == {}
    assert {name: cost.mean for name, cost in ablation.costs["xl"].items()} == {
        "memory zeroed": 0.0, "memory swapped": 0.0
    }  # fmt: skip


@pytest.mark.parametrize(("n_tokens", "streams"), [(56, None), (57, 2), (141, 5), (3_000, 16)])
def test_a_text_is_cut_into_equal_parts_as_long_as_they_must_be(n_tokens, streams):
    """21 tokens fill the memories, and a segment has 7."""
    ablation = memory_ablation({"lm": Ignores()}, TEXT[:n_tokens], tokens=800)
    assert (ablation and ablation.streams) == streams
    if parts := choose_streams(n_tokens, warm_up=21, segment_len=7, tokens=800):
        length = (n_tokens - 1) // streams
        assert parts.begins == tuple(range(0, length * streams, length))
        assert parts.lengths == (min(21 + 800 // streams, length),) * streams
    documents = (28, 28, 44)  # of which one fills the memory
    assert memory_ablation({"lm": Ignores()}, TEXT[:100], tokens=800, documents=documents) is None


@given(
    documents=st.lists(st.integers(1, 90), min_size=1, max_size=60), warm_up=st.integers(0, 30),
    segment_len=st.integers(1, 9), tokens=st.integers(1, 500),
)  # fmt: skip
@example(documents=[90] * 17, warm_up=0, segment_len=1, tokens=500)
def test_a_part_begins_a_document_and_is_not_read_alone(documents, warm_up, segment_len, tokens):
    parts = choose_streams(sum(documents), warm_up, segment_len, tokens, documents)
    assert (parts is None) == (sum(length > warm_up + segment_len for length in documents) < 2)
    if parts is None:
        return
    firsts = {sum(documents[:number]): length for number, length in enumerate(documents)}
    assert len(set(parts.begins)) == len(parts.begins) == len(parts.lengths) >= 2
    for begin, length in zip(parts.begins, parts.lengths, strict=True):
        assert warm_up + segment_len <= length < firsts[begin]
    assert [number for group in parts.groups for number in group] == list(range(len(parts.begins)))
    for group in parts.groups:
        lengths = [parts.lengths[number] for number in group]
        assert lengths == [lengths[1], *sorted(lengths[1:], reverse=True)]
        assert len(lengths) <= MAX_STREAMS
    counted = sum(parts.lengths) - len(parts.lengths) * warm_up
    assert counted <= max(tokens, len(parts.lengths) * segment_len)


DOCUMENTS = (40, 12, 75, 29, 3, 60, 33, 90)
"""Of TEXT; 21 tokens fill the memories, and two of these documents have fewer than a segment of 7 beyond."""


def joined(memory, other):
    """The positions of one memory and the slots of another."""
    mem = [layer.mem for layer in memory.layers]
    return memory_of(mem, [layer.slots for layer in other.layers])


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("documents", "streams", "counted"), [((), 16, 10), (DOCUMENTS, 6, 20)])
def test_losses_and_costs_are_those_of_streams_read_alone(documents, streams, counted):
    """A stream's memory is swapped with that of one at the same place."""
    lm, S, warm_up, received = small_lm("compressive").train(), 7, 21, []
    text = TEXT[: sum(documents) or len(TEXT)]
    ablation = memory_ablation(
        {"lm": lm}, text, tokens=streams * counted, documents=documents,
        progress=received.append,
    )  # fmt: skip
    assert lm.training
    lm.eval()  # which gives the loss of each token
    parts = text.split(documents or (len(TEXT) - 1) // 16)[: len(documents) or 16]
    texts = [part[: 1 + warm_up + counted] for part in parts if len(part) > warm_up + S]
    order = sorted(range(streams), key=lambda i: -len(texts[i]))
    memories, counts, sums = [Memory(())] * streams, [0] * streams, defaultdict(lambda: [0.0] * streams)
    for start in range(0, warm_up + counted, S):
        going = [i for i in order if len(texts[i]) - 1 > start]
        before = {i: memories[j] for i, j in zip(going, [going[-1], *going], strict=False)}
        for i in going:
            part, past, other = texts[i][start : start + S + 1, None], memories[i], before[i]
            inputs, targets = part[:-1], part[1:]
            if start >= warm_up:
                counts[i] += len(targets)
                zeros = past.map(torch.zeros_like)
                changed = {
                    "plain": past,
                    "slots zeroed": joined(past, zeros),
                    "slots swapped": joined(past, other),
                    "memory zeroed": joined(zeros, past),
                    "memory swapped": joined(other, past),
                }
                for name, memory in changed.items():
                    sums[name][i] += lm(inputs, memory, targets).scores.losses.sum().item()
            memories[i] = lm(inputs, past, targets).memory

    n = sum(counts)
    assert ablation.of_documents == bool(documents)
    if not documents:  # which are padded
        assert sum(received) == streams * (warm_up + counted) + 4 * n, "controls read only what counts"
    assert (ablation.streams, ablation.tokens, ablation.warm_up) == (streams, n, warm_up)
    assert ablation.loss["lm"] == pytest.approx(sum(sums["plain"]) / n, abs=1e-9)
    costs = ablation.costs["lm"]
    assert costs.keys() == sums.keys() - {"plain"}
    for name, cost in costs.items():
        differences = [a - b for a, b in zip(sums[name], sums["plain"], strict=True)]
        assert asdict(cost) == pytest.approx(asdict(mean_of_groups(differences, counts)), abs=1e-9)


STREAM = RecallStream(keys=6, values=4, set_probability=0.15)
S, M, C, RATE = 8, 16, 5, 4
EDGES = (0, 8, 16, 24, 32, 40, 48, 96)


class Holds(nn.Module):
    """An f_c whose slots hold the first number of each of their positions."""

    compression_rate = RATE

    def forward(self, mem):
        return rearrange(mem[..., 0], "(n c) b -> n b c", c=RATE)


class Copies(nn.Module):
    """Stands for a model whose memory is its tokens, and whose slots hold ``RATE`` tokens each: it answers
    with what was last set in what it is given, and with nothing where that isn't in it."""

    device = torch.device("cpu")

    def __init__(self):
        super().__init__()
        self.config = ModelConfig(
            model="compressive", n_layers=1, segment_len=S, mem_len=M, c_mem_len=C, compression_rate=RATE
        )

    def forward(self, tokens, memory, targets):
        slots = [rearrange(layer.slots, "n b c -> (n c) b") for layer in memory.layers]
        past = torch.cat([*slots, *(layer.mem[..., 0] for layer in memory.layers), tokens])
        start = len(past) - len(tokens)
        answers = torch.full_like(tokens, -1)
        for b in range(tokens.shape[1]):
            known = {}
            for place, token in enumerate(past[:, b].tolist()):
                first_ask = STREAM.values * (1 + STREAM.keys)
                if STREAM.values <= token < first_ask:
                    known[token // STREAM.values - 1] = token % STREAM.values
                elif token >= first_ask and place >= start:
                    answers[place - start, b] = known.get(token - first_ask, -1)
        inputs = torch.zeros(*tokens.shape, RATE, dtype=torch.long)
        inputs[..., 0] = tokens
        memory = updated([CompressiveRule(M, C, Holds(), loss="none")], memory, [inputs])
        scores = TokenLosses(torch.zeros(()), torch.ones(tokens.shape), answers == targets)
        return LMScores(scores, memory, torch.zeros(()))


def heard(segments, streams=4):
    return list(islice(recall_segments(STREAM, streams, S, 3), segments))


@pytest.fixture(scope="module")
def measured():
    controls = controls_of(Copies().config.memory_sizes)
    return recall_by_distance(Copies(), heard(60), EDGES, warm_up=10 * S, controls=controls)


def test_a_copying_model_recalls_exactly_what_it_holds(measured):
    recall = measured["untouched"]
    assert recall.by_place == {"segment": 1.0, "memory": 1.0, "slots": 1.0, "beyond": 0.0}
    assert recall.accuracy[:4] == (1.0, 1.0, 1.0, 1.0)  # nothing nearer than M + RATE · C is beyond
    assert recall.accuracy[-1] == 0.0
    assert (recall.within_reach, recall.loss) == (1.0, 1.0)
    asks = recall.asks_by_place
    assert recall.correct() == 1 - asks["beyond"] / sum(asks.values())


@pytest.mark.parametrize(
    ("control", "kept"),
    [
        ("slots zeroed", ["segment", "memory"]),
        ("slots swapped", ["segment", "memory"]),
        ("memory zeroed", ["segment", "slots"]),  # which are not made of what was zeroed
        ("memory swapped", ["segment"]),  # what another stream set later hides what slots hold
    ],
)
def test_a_control_loses_only_the_part_that_it_touches(control, kept, measured):
    by_place = measured[control].by_place
    assert all(by_place[place] == 1.0 for place in kept)
    assert by_place[control.split()[0]] < 0.4  # what is older, or another stream's, is right by chance


def test_asks_are_counted_after_the_warm_up_alone():
    recall = recall_by_distance(Copies(), heard(12), EDGES, warm_up=10 * S)["untouched"]
    late = torch.cat([distances for _, distances in heard(12)[10:]])
    assert sum(recall.asks_by_place.values()) == int((late >= 0).sum())
    assert list(recall.asks) == [int(((late >= a) & (late < b)).sum()) for a, b in pairwise(EDGES)]


def test_bins_reach_beyond_what_a_model_sees():
    assert distance_edges(384) == (0, 64, 128, 192, 256, 320, 384, 448, 512, 1024)
    assert distance_edges(2112) == (0, 64, 128, *range(256, 2817, 256), 5632)
    assert distance_edges(20) == (0, 64, 128)
