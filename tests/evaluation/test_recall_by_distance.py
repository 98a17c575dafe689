from itertools import islice, pairwise

import pytest
import torch
from einops import rearrange
from torch import nn

from memformers.data.recall_stream import RecallStream, recall_segments
from memformers.evaluation.memory_ablation import controls_of, distance_edges, recall_by_distance
from memformers.models.config import ModelConfig
from memformers.models.language_model import LMScores
from memformers.models.memory import compress_memory
from memformers.models.vocabulary import TokenLosses

STREAM = RecallStream(keys=6, values=4, set_probability=0.15)
S, M, C, RATE = 8, 16, 5, 4
EDGES = (0, 8, 16, 24, 32, 40, 48, 96)


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
        slots = [rearrange(x, "n b c -> (n c) b") for x in memory.c_mem]
        past = torch.cat([*slots, *(x[..., 0] for x in memory.mem), tokens])
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
        compress = [lambda old: rearrange(old[..., 0], "(n c) b -> n b c", c=RATE)]
        memory, _ = compress_memory(memory, [inputs], compress, self.config.memory_sizes)
        scores = TokenLosses(torch.zeros(()), torch.ones(tokens.shape), answers == targets)
        return LMScores(scores, memory, torch.zeros(()))


def heard(segments, streams=4):
    return list(islice(recall_segments(STREAM, streams, S, 3), segments))


@pytest.fixture(scope="module")
def measured():
    controls = controls_of(Copies().config.memory_sizes)
    return recall_by_distance(Copies(), heard(60), EDGES, warm_up=10 * S, controls=controls)


def test_a_model_that_copies_recalls_all_that_it_holds_and_nothing_else(measured):
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
def test_a_control_loses_the_part_that_it_touches_and_nothing_else(control, kept, measured):
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
