"""The loss of an adaptive softmax, computed for the clusters that its targets need.

A target of the first cluster needs that cluster alone, and one of a rarer cluster c the first and c. So each
rare cluster is computed for the tokens whose target lies in it, which are few, and not the whole vocabulary
for all (Grave et al. 2017, arXiv 1609.04309, section 4).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from memformers.models.adaptive import AdaptiveEmbedding, AdaptiveSoftmax
from memformers.models.scores import TokenLosses, upcast

AT_ONCE = 1 << 24
"""The most logits of a rare cluster that are computed at once to see whether a word of it is likelier."""


def adaptive_scores(
    head: AdaptiveSoftmax, embedding: AdaptiveEmbedding, x: Tensor, targets: Tensor
) -> TokenLosses:
    """Of the predictions from ``x [S, B, D]`` for ``targets [S, B]``: what
    [`memformers.models.scores.token_losses`][] gives for the whole vocabulary's log-probabilities.

    Every weight has a gradient, 0 in a cluster without targets, as processes that average theirs need.
    """
    flat, target = x.flatten(0, 1), targets.flatten().contiguous()  # [N, D] and [N]
    words = head.clusters.bounds[0][1]  # of the first cluster; its other logits are the rare clusters'
    first = upcast(head.cluster_logits(0, flat, embedding))  # [N, words + clusters]
    cluster = torch.bucketize(target, target.new_tensor(head.clusters.cutoffs), right=True)
    column = torch.where(cluster > 0, words - 1 + cluster, target)
    losses = F.cross_entropy(first, column, reduction="none")
    # In units of the first cluster's logits, a rare word's is its cluster's plus its log-probability there.
    own = first.detach().gather(1, column.clamp(min=0)[:, None])[:, 0]
    correct = target >= 0
    rare = list(zip(head.clusters.bounds, rows_by_cluster(cluster, len(head.clusters.bounds)), strict=True))
    for c, ((low, _), rows) in enumerate(rare[1:], 1):
        logits, word = upcast(head.cluster_logits(c, flat[rows], embedding)), target[rows] - low
        of_word = F.cross_entropy(logits, word, reduction="none")
        losses = losses.index_add(0, rows, of_word)
        own = own.index_add(0, rows, -of_word.detach())
        correct[rows] = logits.detach().argmax(-1) == word
    correct &= own >= first.detach()[:, :words].amax(-1)
    correct = unless_likelier_elsewhere(head, embedding, flat.detach(), first.detach(), cluster, own, correct)
    loss = losses.sum() / (target >= 0).sum()
    return TokenLosses(loss, losses.detach().view_as(targets), correct.view_as(targets))


def rows_by_cluster(cluster: Tensor, clusters: int) -> list[Tensor]:
    """The rows of ``cluster [N]`` that have the value 0, the value 1, …; on a GPU its values are waited for
    once."""
    sizes = torch.bincount(cluster, minlength=clusters).tolist()
    return list(cluster.argsort(stable=True).split(sizes))


@torch.no_grad()
def unless_likelier_elsewhere(
    head: AdaptiveSoftmax,
    embedding: AdaptiveEmbedding,
    x: Tensor,
    first: Tensor,
    cluster: Tensor,
    own: Tensor,
    correct: Tensor,
) -> Tensor:
    """``correct [N]``, now false where a rare cluster other than the target's has a likelier word.

    A word is no likelier than its cluster, so a cluster is looked into only where it is likelier than the
    target. ``x [N, D]``, the first cluster's logits ``first``, the target's ``cluster [N]`` and ``own [N]``
    logit in their units.
    """
    correct, words = correct.clone(), head.clusters.bounds[0][1]
    for c, (low, high) in list(enumerate(head.clusters.bounds))[1:]:
        of_cluster = first[:, words - 1 + c]
        doubtful = (correct & (cluster != c) & (of_cluster > own)).nonzero()[:, 0]
        for rows in doubtful.split(max(AT_ONCE // (high - low), 1)):
            logits = upcast(head.cluster_logits(c, x[rows], embedding))
            likeliest = logits.amax(-1) - logits.logsumexp(-1)
            correct[rows] = of_cluster[rows] + likeliest <= own[rows]
    return correct
