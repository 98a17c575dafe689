"""Adaptive embedding and softmax, against their equations one token and one word at a time."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from memformers import MemoryLM, ModelConfig
from memformers.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, Clusters
from memformers.decoding import Decoder
from memformers.evaluation import evaluate
from tests.builders import SMALL, fill_zeros, small_lm

D, V = 12, 11
SHAPES = {
    "one cluster": Clusters(V, d_embed=D),
    "one narrow cluster": Clusters(V, d_embed=8),
    "three clusters": Clusters(V, (3, 7), d_embed=D),
    "three narrow clusters": Clusters(V, (3, 7), d_embed=8),
    "three clusters of falling width": Clusters(V, (3, 7), 2, d_embed=D),
    "three narrow clusters of falling width": Clusters(V, (3, 7), 2, d_embed=8),
}


def table_of(clusters: Clusters, word: int) -> tuple[int, int]:
    """The table that a word is in, and its row."""
    cluster = sum(word >= cutoff for cutoff in clusters.cutoffs)
    return (0, word) if clusters.div_val == 1 else (cluster, word - (0, *clusters.cutoffs)[cluster])


@pytest.mark.parametrize("clusters", SHAPES.values(), ids=SHAPES)
def test_an_embedding_is_a_mapped_vector_times_the_root_of_its_width(clusters):
    embedding = AdaptiveEmbedding(clusters, D)
    tokens = torch.randint(0, V, (9, 2))
    x = embedding(tokens)
    assert x.shape == (9, 2, D)
    for t, b in torch.cartesian_prod(torch.arange(9), torch.arange(2)).tolist():
        table, row = table_of(clusters, int(tokens[t, b]))
        vector = embedding.tables[table].weight[row]
        if len(embedding.maps):
            vector = embedding.maps[table].weight @ vector
        torch.testing.assert_close(x[t, b], vector * math.sqrt(D))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("clusters", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("tied", [False, True])
def test_log_probabilities_of_all_words_are_those_of_the_two_steps(clusters, tied):
    embedding = AdaptiveEmbedding(clusters, D)
    head = fill_zeros(AdaptiveSoftmax(clusters, D, tie_weights=tied, tie_projections=tied))
    x = torch.randn(3, 2, D)
    log_p = head(x, embedding)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(3, 2))
    tables = embedding.tables if tied else head.words
    scores = torch.empty(3, 2, V)
    for word in range(V):
        cluster = sum(word >= cutoff for cutoff in clusters.cutoffs)
        table, row = table_of(clusters, word)
        narrow = x
        if clusters.maps(D):
            from_embedding = tied and cluster > 0
            narrow = x @ (embedding.maps[table].weight if from_embedding else head.maps[cluster].weight.T)
        scores[..., word] = narrow @ tables[table].weight[row] + head.bias[word]
        if cluster == 0:
            first = narrow
    rare = [first @ g + b for g, b in zip(head.rare.weight, head.rare.bias, strict=True)] if head.rare else []
    bounds = clusters.bounds
    frequent = torch.stack([*scores[..., : bounds[0][1]].unbind(-1), *rare], dim=-1).log_softmax(-1)
    wanted = [frequent[..., : bounds[0][1]]]
    for i, (low, high) in enumerate(bounds[1:]):
        wanted.append(frequent[..., bounds[0][1] + i, None] + scores[..., low:high].log_softmax(-1))
    torch.testing.assert_close(log_p, torch.cat(wanted, -1), rtol=0, atol=1e-12)


def test_cross_entropy_of_the_log_probabilities_is_the_loss_and_its_gradient():
    clusters = SHAPES["three clusters of falling width"]
    embedding = AdaptiveEmbedding(clusters, D).double()
    head = AdaptiveSoftmax(clusters, D, tie_weights=True, tie_projections=True).double()
    x, target = torch.randn(6, D, dtype=torch.float64, requires_grad=True), torch.randint(0, V, (6,))
    losses = (
        F.cross_entropy(head(x, embedding), target),
        -head(x, embedding).gather(1, target[:, None]).mean(),
    )
    grads = [torch.autograd.grad(loss, x)[0] for loss in losses]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(grads[0], grads[1])


ADAPTIVE = {"embedding": "adaptive", "cutoffs": (3, 7), "div_val": 2, "norm": "post"}
TIED = ADAPTIVE | {"tie_weights": True, "tie_projections": True}


def test_what_is_tied_is_stored_once():
    tied, untied = small_lm("transformer-xl", **TIED), small_lm("transformer-xl", **ADAPTIVE)
    assert not [name for name in tied.state_dict() if name.startswith("head.words")]
    assert [name for name in tied.state_dict() if name.startswith("head.maps")] == ["head.maps.0.weight"]
    assert len([name for name in untied.state_dict() if name.startswith(("head.words", "head.maps"))]) == 6


@pytest.mark.parametrize("changes", [ADAPTIVE, TIED])
@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_cached_logits_are_the_log_probabilities_of_the_forward_pass(model, changes):
    lm = small_lm(model, **changes).double()
    text, decoder, memory = torch.randint(0, V, (70, 2)), Decoder(lm, 2), None
    for segment in text.split(lm.config.segment_len):
        wanted, memory, _ = lm(segment, memory)
        for token, logits in zip(segment, wanted, strict=True):
            torch.testing.assert_close(decoder.read(token[None]), logits, rtol=0, atol=1e-10)


def test_it_is_saved_evaluated_and_written_like_any_model(tmp_path):
    lm = small_lm("compressive", **TIED).eval()
    lm.save_pretrained(tmp_path)
    again = MemoryLM.from_pretrained(tmp_path)
    assert again.config == lm.config
    text = torch.randint(0, V, (60,))
    assert evaluate(again, text, 2).loss == evaluate(lm, text, 2).loss
    prompt = text[:5, None]
    greedy = torch.stack(list(lm.generate(prompt, 20, temperature=0.0)))
    assert torch.equal(greedy, torch.stack(list(again.generate(prompt, 20, temperature=0.0))))


def test_it_learns_every_word_of_a_repeated_text():
    torch.manual_seed(1)
    lm = MemoryLM(replace(SMALL, **TIED))
    text = torch.arange(70)[:, None] % V
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    for _ in range(60):
        memory = None
        for inputs, targets in zip(text[:-1].split(23), text[1:].split(23), strict=True):
            logits, memory, _ = lm(inputs, memory)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad is not None for p in lm.parameters())
            optimizer.step()
    assert torch.equal(logits.argmax(-1), targets)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding": "wide"}, "embedding='wide' is unknown; use 'plain' or 'adaptive'"),
        ({"cutoffs": (3,)}, r"cutoffs=\(3,\) is for an adaptive embedding; use embedding='adaptive' with it"),
        ({"tie_weights": True}, "tie_weights=True is for an adaptive embedding"),
        ({"embedding": "adaptive", "cutoffs": (7, 3)}, r"cutoffs=\(7, 3\) must ascend from 1 or more"),
        ({"embedding": "adaptive", "cutoffs": (0,)}, r"cutoffs=\(0,\) must ascend from 1 or more"),
        ({"embedding": "adaptive", "div_val": 0}, "div_val=0 and d_embed=128 must both be at least 1"),
        (
            {"embedding": "adaptive", "cutoffs": (3, 7), "div_val": 4, "d_embed": 8},
            "div_val=4 leaves the last of 3 clusters no width of d_embed=8; use d_embed=16 or more",
        ),
    ],
)
def test_an_embedding_that_cannot_be_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


def test_cutoffs_beyond_the_vocabulary_are_an_error_once_it_is_known():
    config = ModelConfig(embedding="adaptive", cutoffs=(300,))  # a training's text may have more tokens
    with pytest.raises(
        ValueError, match=r"cutoffs=\(300,\) leave the last cluster nothing of vocab_size=256"
    ):
        MemoryLM(config)
