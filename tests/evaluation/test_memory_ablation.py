"""How much memory helps models that ignore it, that copy, and small ones, against plain loops."""

from collections import defaultdict
from dataclasses import asdict, replace
from itertools import chain, islice, pairwise

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
    """Stands for a model that remembers and makes no use of it: its loss is its next token, and
    ``added_loss``."""

    device = torch.device("cpu")

    def __init__(self, model="compressive", added_loss=0.0, **changes):
        super().__init__()
        self.config = replace(SMALL, model=model, **changes)
        self.added_loss = added_loss

    def forward(self, inputs, memory, targets):
        losses = targets + self.added_loss
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
    parts = choose_streams(n_tokens, warm_up=21, segment_len=7, tokens=800)
    if parts:
        length = (n_tokens - 1) // streams
        assert parts.begins == tuple(range(0, length * streams, length))
        assert parts.lengths == (min(21 + 800 // streams, length),) * streams


def test_one_document_that_fills_the_memory_is_not_read_alone():
    documents = (28, 28, 44)
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
    length_by_begin = {sum(documents[:number]): length for number, length in enumerate(documents)}
    assert len(set(parts.begins)) == len(parts.begins) == len(parts.lengths) >= 2
    for begin, length in zip(parts.begins, parts.lengths, strict=True):
        assert warm_up + segment_len <= length < length_by_begin[begin]
    assert [*chain(*parts.groups)] == list(range(len(parts.begins)))
    for group in parts.groups:
        lengths = [parts.lengths[number] for number in group]
        assert lengths == [lengths[1], *sorted(lengths[1:], reverse=True)]
        assert len(lengths) <= MAX_STREAMS
    counted = sum(parts.lengths) - len(parts.lengths) * warm_up
    assert counted <= max(tokens, len(parts.lengths) * segment_len)


# Of TEXT; 21 tokens fill the memories, and two of these documents have fewer than a segment of 7 beyond.
DOCUMENTS = (40, 12, 75, 29, 3, 60, 33, 90)


def joined(positions, slots):
    """The positions of one memory and the slots of another."""
    mem = [layer.mem for layer in positions.layers]
    return memory_of(mem, [layer.slots for layer in slots.layers])


def under_controls(memory, swapped):
    """A stream's memory as it is and under each control, which may swap it with that of another stream."""
    zeros = memory.map(torch.zeros_like)
    return {
        "plain": memory,
        "slots zeroed": joined(memory, zeros),
        "slots swapped": joined(memory, swapped),
        "memory zeroed": joined(zeros, memory),
        "memory swapped": joined(swapped, memory),
    }


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("documents", "streams", "counted"), [((), 16, 10), (DOCUMENTS, 6, 20)])
def test_losses_and_costs_are_those_of_streams_read_alone(documents, streams, counted):
    """A stream's memory is swapped with that of one at the same position."""
    S = 7
    warm_up = 21
    lm = small_lm("compressive").train()
    text = TEXT[: sum(documents) or len(TEXT)]
    received = []
    ablation = memory_ablation(
        {"lm": lm}, text, tokens=streams * counted, documents=documents, progress=received.append
    )
    assert lm.training
    lm.eval()  # which gives the loss of each token

    # The beginnings of documents, or of equal parts, that are long enough; the longest first.
    lengths = documents or (len(TEXT) - 1) // 16
    parts = text.split(lengths)[: len(documents) or 16]
    texts = [part[: 1 + warm_up + counted] for part in parts if len(part) > warm_up + S]
    order = sorted(range(streams), key=lambda i: -len(texts[i]))

    # Losses by stream, summed over the tokens after the warm-up.
    memories = [Memory(())] * streams
    counts = [0] * streams
    sums = defaultdict(lambda: [0.0] * streams)
    for start in range(0, warm_up + counted, S):
        unfinished = [i for i in order if len(texts[i]) - 1 > start]
        swapped = {}
        for i, j in zip(unfinished, [unfinished[-1], *unfinished], strict=False):
            swapped[i] = memories[j]
        for i in unfinished:
            segment = texts[i][start : start + S + 1, None]
            inputs = segment[:-1]
            targets = segment[1:]
            if start >= warm_up:
                counts[i] += len(targets)
                for name, memory in under_controls(memories[i], swapped[i]).items():
                    sums[name][i] += lm(inputs, memory, targets).scores.losses.sum().item()
            memories[i] = lm(inputs, memories[i], targets).memory

    n = sum(counts)
    assert ablation.of_documents == bool(documents)
    if not documents:  # which are padded
        assert sum(received) == streams * (warm_up + counted) + 4 * n, "controls read only what counts"
    assert (ablation.streams, ablation.tokens, ablation.warm_up) == (streams, n, warm_up)
    assert ablation.loss["lm"] == pytest.approx(sum(sums["plain"]) / n, abs=1e-9)
    costs = ablation.costs["lm"]
    assert costs.keys() == sums.keys() - {"plain"}
    for name, cost in costs.items():
        differences = [changed - plain for changed, plain in zip(sums[name], sums["plain"], strict=True)]
        assert asdict(cost) == pytest.approx(asdict(mean_of_groups(differences, counts)), abs=1e-9)


STREAM = RecallStream(keys=6, values=4, set_probability=0.15)
S, M, C = 8, 16, 5
RATE = 4
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
        past = [tokens[:0]]
        for layer in memory.layers:
            past += [rearrange(layer.slots, "n b c -> (n c) b"), layer.mem[..., 0]]
        past = torch.cat(past)
        answers = torch.full_like(tokens, -1)
        for b in range(tokens.shape[1]):
            answers[:, b] = torch.tensor(self.answer(past[:, b].tolist(), tokens[:, b].tolist()))
        inputs = torch.zeros(*tokens.shape, RATE, dtype=torch.long)
        inputs[..., 0] = tokens
        memory = updated([CompressiveRule(M, C, Holds(), loss="none")], memory, [inputs])
        scores = TokenLosses(torch.zeros(()), torch.ones(tokens.shape), answers == targets)
        return LMScores(scores, memory, torch.zeros(()))

    def answer(self, past, tokens):
        """The answer to each of ``tokens`` that asks, of what was set before it; −1 elsewhere."""
        first_set = STREAM.values
        first_ask = STREAM.values * (1 + STREAM.keys)
        value_by_key = {}
        answers = []
        for token in past + tokens:
            answer = -1
            if first_set <= token < first_ask:
                value_by_key[token // STREAM.values - 1] = token % STREAM.values
            elif token >= first_ask:
                answer = value_by_key.get(token - first_ask, -1)
            answers.append(answer)
        return answers[len(past) :]


def first_segments(n):
    """The first ``n`` segments of four streams."""
    return list(islice(recall_segments(STREAM, 4, S, 3), n))


@pytest.fixture(scope="module")
def measured():
    controls = controls_of(Copies().config.memory_sizes)
    return recall_by_distance(Copies(), first_segments(60), EDGES, warm_up=10 * S, controls=controls)


def test_a_copying_model_recalls_exactly_what_it_holds(measured):
    recall = measured["untouched"]
    assert recall.by_place == {"segment": 1.0, "memory": 1.0, "slots": 1.0, "beyond": 0.0}
    # Nothing nearer than M + RATE · C is beyond the memory.
    assert recall.accuracy[:4] == (1.0, 1.0, 1.0, 1.0)
    assert recall.accuracy[-1] == 0.0
    assert recall.within_reach == 1.0
    assert recall.loss == 1.0
    asks = recall.asks_by_place
    assert recall.correct() == 1 - asks["beyond"] / sum(asks.values())


@pytest.mark.parametrize(
    ("control", "unharmed"),
    [
        ("slots zeroed", ["segment", "memory"]),
        ("slots swapped", ["segment", "memory"]),
        ("memory zeroed", ["segment", "slots"]),  # which are not made of what was zeroed
        ("memory swapped", ["segment"]),  # what another stream set later hides what slots hold
    ],
)
def test_a_control_loses_only_the_part_that_it_touches(control, unharmed, measured):
    by_part = measured[control].by_place
    assert all(by_part[part] == 1.0 for part in unharmed)
    touched, _ = control.split()
    # What is older, or another stream's, is right by chance.
    assert by_part[touched] < 0.4


def test_asks_are_counted_after_the_warm_up_alone():
    recall = recall_by_distance(Copies(), first_segments(12), EDGES, warm_up=10 * S)["untouched"]
    # After ten segments, memories are full.
    late = torch.cat([distances for _, distances in first_segments(12)[10:]])
    assert sum(recall.asks_by_place.values()) == int((late >= 0).sum())
    assert list(recall.asks) == [int(((late >= a) & (late < b)).sum()) for a, b in pairwise(EDGES)]


def test_bins_reach_beyond_what_a_model_sees():
    assert distance_edges(384) == (0, 64, 128, 192, 256, 320, 384, 448, 512, 1024)
    assert distance_edges(2112) == (0, 64, 128, *range(256, 2817, 256), 5632)
    assert distance_edges(20) == (0, 64, 128)
