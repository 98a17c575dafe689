"""Adaptive embedding and softmax; tests/pretrained compares them with their equations."""

import pytest
import torch
import torch.nn.functional as F

from memformers import AdaptiveConfig, MemoryLM, ModelConfig
from memformers.evaluation.evaluate import evaluate
from memformers.generation.decoding import Decoder
from memformers.models.adaptive import AdaptiveEmbedding, AdaptiveSoftmax, Clusters
from tests.builders import small_lm

D, V = 12, 11


def adaptive(*settings, **more):
    """Changes to a config, for an adaptive embedding."""
    return {"embedding": "adaptive", "adaptive": AdaptiveConfig(*settings, **more)}


def test_cross_entropy_of_the_log_probabilities_is_the_loss_and_its_gradient():
    clusters = Clusters(V, (3, 7), 2, d_embed=D)
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


ADAPTIVE = {"embedding": "adaptive", "adaptive": AdaptiveConfig((3, 7), 2), "norm": "post"}
TIED = ADAPTIVE | {"adaptive": AdaptiveConfig((3, 7), 2, None, True, True)}


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding": "wide"}, "embedding='wide' is unknown; use 'plain' or 'adaptive'"),
        ({"adaptive": AdaptiveConfig((3,))}, r"cutoffs=\(3,\) is for an adaptive embedding; use"),
        ({"adaptive": AdaptiveConfig(tie_weights=True)}, "tie_weights=True is for an adaptive embedding"),
        (adaptive((7, 3)), r"cutoffs=\(7, 3\) must be 1 or more and in ascending order"),
        (adaptive((0,)), r"cutoffs=\(0,\) must be 1 or more and in ascending order"),
        (adaptive(div_val=0), "div_val=0 and d_embed=128 must both be at least 1"),
        (
            adaptive((3, 7), 4, 8),
            "div_val=4 leaves cluster 3, the last, no width of d_embed=8; use d_embed=16 or more",
        ),
    ],
)
def test_an_embedding_that_cannot_be_is_an_error(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**changes)


def test_cutoffs_beyond_the_vocabulary_are_an_error_once_it_is_known():
    config = ModelConfig(**adaptive((300,)))  # a training's text may have more tokens
    with pytest.raises(
        ValueError, match=r"cutoffs=\(300,\) leave no token of vocab_size=256 to the last cluster"
    ):
        MemoryLM(config)
