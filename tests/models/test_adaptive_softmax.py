"""The loss of an adaptive softmax is compared with the cross-entropy of the whole vocabulary's
log-probabilities, which tests/convert compares with their equations."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memformers.data.streams import IGNORED
from memformers.models.adaptive_softmax import AdaptiveEmbedding, AdaptiveSoftmax, Clusters, adaptive_losses
from tests.builders import fill_zeros
from tests.texts import gradients, same

D = 13
# Tokens.
V = 37


def build_vocabulary(clusters, tie_weights=False, tie_projections=False):
    embedding = AdaptiveEmbedding(clusters, D)
    head = AdaptiveSoftmax(clusters, D, tie_weights=tie_weights, tie_projections=tie_projections)
    for module in (embedding, head):
        fill_zeros(module)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.7)
    return embedding, head


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("cutoffs", "tied"),
    [((), (True, False)), ((1,), (True, True)), ((5, 11, 29), (False, False)), ((5, 6, 36), (True, True))],
)
@pytest.mark.parametrize(("div_val", "d_embed"), [(1, D), (1, 9), (2, 17)])
def test_loss_and_every_gradient_are_those_of_the_whole_vocabulary(cutoffs, tied, div_val, d_embed):
    embedding, head = build_vocabulary(Clusters(V, cutoffs, div_val, d_embed), *tied)
    x = torch.randn(7, 11, D, requires_grad=True)
    targets = torch.randint(0, V, (7, 11))
    targets[2, 3] = IGNORED

    # The log-probabilities of all tokens, [S, B, V].
    dense = head(x, embedding)
    loss = F.cross_entropy(dense.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    scores = adaptive_losses(head, embedding, x, targets, max_logits=100)
    losses = F.cross_entropy(dense.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    same([scores.loss, scores.losses], [loss, losses.detach()])
    assert torch.equal(scores.correct, dense.argmax(-1) == targets)
    learning = [x, *embedding.parameters(), *head.parameters()]
    same(gradients(learning, scores.loss), gradients(learning, loss))


def test_an_adaptive_head_claims_no_single_weight():
    """It has a table for each cluster, or those of the embedding."""
    for tied in (True, False):
        _, head = build_vocabulary(Clusters(V, (5, 11), 2, 17), tie_weights=tied)
        assert not hasattr(head, "weight")
