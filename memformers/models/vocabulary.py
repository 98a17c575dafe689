"""Losses, and the adaptive softmax (Grave et al. 2017, arXiv 1609.04309) and embedding (Baevski and Auli
2019, arXiv 1809.10853), as in the original Transformer-XL: clusters of ids by frequency, the rare narrow."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memformers.common.text import UserError
from memformers.models.config import ModelConfig

MAX_LOGITS = 1 << 24
"""The most logits of a rare cluster that are computed at once to see whether a word of it is likelier."""


class TokenLosses(NamedTuple):
    loss: Tensor
    """Mean cross-entropy, a scalar in nats per token, to train with."""
    losses: Tensor | None = None
    """``[S, B]``: the cross-entropy of each token, without gradient; 0 if there is no target. None while the
    model is in training mode, which needs only their mean."""
    correct: Tensor | None = None
    """bool ``[S, B]``: whether the target was the most likely token; None in training mode."""


def token_losses(logits: Tensor, targets: Tensor, *, by_token: bool = True) -> TokenLosses:
    """The loss of ``logits [S, B, vocab_size]`` for ``targets [S, B]``, and if ``by_token`` each token's."""
    # What F.cross_entropy computes, in two steps, so that a mean and the losses share a normalization.
    log_probs, flat = F.log_softmax(upcast(logits).flatten(0, 1), dim=-1), targets.flatten()
    loss = F.nll_loss(log_probs, flat)
    if not by_token:
        return TokenLosses(loss)
    losses = F.nll_loss(log_probs.detach(), flat, reduction="none")
    return TokenLosses(loss, losses.view_as(targets), logits.detach().argmax(-1) == targets)


def upcast(logits: Tensor) -> Tensor:
    """Logits ``[·]``, in float32 where they are in half precision, to which losses would be rounded."""
    return logits.float() if logits.element_size() < 4 else logits


@dataclass(frozen=True)
class Clusters:
    """Clusters of a vocabulary ([`AdaptiveConfig`][]). Raises ValueError for cutoffs outside it."""

    vocab_size: int
    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    d_embed: int = 128

    def __post_init__(self) -> None:
        if self.cutoffs and self.cutoffs[-1] >= self.vocab_size:
            size, cutoffs = self.vocab_size, self.cutoffs
            raise UserError(f"expected each cutoff to be below vocab_size={size}, got cutoffs={cutoffs}.")

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return list(zip((0, *self.cutoffs), (*self.cutoffs, self.vocab_size), strict=True))

    @property
    def tables(self) -> list[tuple[int, int]]:
        if self.div_val == 1:
            return [(self.vocab_size, self.d_embed)]
        return [(high - low, self.d_embed // self.div_val**i) for i, (low, high) in enumerate(self.bounds)]

    def maps(self, d_model: int) -> bool:
        return self.div_val > 1 or self.d_embed != d_model


class AdaptiveEmbedding(nn.Module):
    """Tokens ``[S, B]`` to ``[S, B, D]``: √D · W_c e, for the word vector e in a table of its cluster c. The
    factor √D is the original's. A cluster's map W_c ``[D, d_c]`` is left out where all e have D features."""

    def __init__(self, clusters: Clusters, d_model: int):
        super().__init__()
        self.clusters, self.d_model = clusters, d_model
        self.tables = nn.ModuleList(nn.Embedding(*table) for table in clusters.tables)
        maps = clusters.tables if clusters.maps(d_model) else []
        self.maps = nn.ModuleList(nn.Linear(width, d_model, bias=False) for _, width in maps)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_tables_and_projections(self.tables, self.maps)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens [S, B]``, integers below ``vocab_size``, to ``[S, B, D]``."""
        parts, is_single = [], len(self.tables) == 1
        for i, table in enumerate(self.tables):
            low, high = self.clusters.bounds[i]
            # Each table embeds all tokens: selecting its own would wait until their number is known.
            vectors = table(tokens if is_single else (tokens - low).clamp(0, high - low - 1))
            # Autocast would make the residual stream, and so the memory, of another dtype than the weights.
            x = self.maps[i](vectors).to(vectors.dtype) if len(self.maps) else vectors
            parts.append(x if is_single else x * ((tokens >= low) & (tokens < high))[..., None])
        return (parts[0] if is_single else torch.stack(parts).sum(0)) * math.sqrt(self.d_model)


class AdaptiveSoftmax(nn.Module):
    """Features ``[·, D]`` to log-probabilities ``[·, vocab_size]``, over the whole vocabulary:

        log p(word of cluster 0) = log softmax([E₀; G] P₀ x + b)_word
        log p(word of cluster c) = log softmax([E₀; G] P₀ x + b)_c + log softmax(E_c P_c x + b_c)_word

    with the word vectors E_c of cluster c, the map P_c ``[d_c, D]`` to their width, and a row of G for each
    cluster but the first. ``tie_weights`` and ``tie_projections`` ([`AdaptiveConfig`][]) take E_c, and P_c
    but for the first cluster, from the embedding, which owns them and is given with every call."""

    def __init__(self, clusters: Clusters, d_model: int, *, tie_weights: bool, tie_projections: bool):
        super().__init__()
        self.clusters = clusters
        tables = [] if tie_weights else clusters.tables
        self.words = nn.ModuleList(nn.Linear(width, words, bias=False) for words, width in tables)
        self.bias = nn.Parameter(torch.empty(clusters.vocab_size))
        rare = len(clusters.cutoffs)
        self.rare = nn.Linear(clusters.d_embed, rare) if rare else None  # G
        n_maps = (1 if tie_projections else 1 + rare) if clusters.maps(d_model) else 0
        widths = [clusters.d_embed // clusters.div_val**i for i in range(n_maps)]
        self.maps = nn.ModuleList(nn.Linear(d_model, width, bias=False) for width in widths)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_tables_and_projections(self.words, self.maps)
        for parameter in (self.bias, *(self.rare.parameters() if self.rare else ())):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """``x [·, D]`` to ``[·, vocab_size]``, with what is tied from ``embedding``."""
        clusters = range(len(self.clusters.bounds))
        frequent, *others = (F.log_softmax(self.cluster_logits(i, x, embedding), dim=-1) for i in clusters)
        frequent, of_cluster = frequent.split((self.clusters.bounds[0][1], len(others)), dim=-1)
        tails = [tail + of_cluster[..., i : i + 1] for i, tail in enumerate(others)]
        return torch.cat((frequent, *tails), dim=-1)

    def cluster_logits(self, i: int, x: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """``x [·, D]`` to the logits ``[·, words]`` of cluster ``i``; the first ends with the others' own."""
        (low, high), one_table = self.clusters.bounds[i], self.clusters.div_val == 1
        tables = self.words if len(self.words) else embedding.tables
        rows = weight(tables[0])[low:high] if one_table else weight(tables[i])  # [words, d_i]
        bias = self.bias[low:high]
        if i == 0 and self.rare is not None:
            rows, bias = torch.cat((rows, weight(self.rare))), torch.cat((bias, self.rare.bias))
        if i < len(self.maps):
            x = self.maps[i](x)
        elif len(self.maps):  # tied
            x = F.linear(x, weight(embedding.maps[0 if one_table else i]).mT)
        return F.linear(x, rows, bias)


def weight(module: nn.Module) -> Tensor:
    if not isinstance(module, nn.Embedding | nn.Linear):
        name = type(module).__name__
        raise UserError(f"an adaptive vocabulary needs nn.Embedding or nn.Linear, got {name}; unwrap it.")
    # Parts of several weights are joined to one, which classes of quantized tensors can't do.
    is_quantized = hasattr(module.weight, "__tensor_flatten__")
    return module.weight.dequantize() if is_quantized else module.weight


def init_tables_and_projections(tables: nn.ModuleList, maps: nn.ModuleList) -> None:
    for table in tables:
        nn.init.normal_(weight(table), std=0.02)  # as in the original
    for linear in maps:
        nn.init.normal_(weight(linear), std=weight(linear).shape[1] ** -0.5)


def adaptive_losses(
    head: AdaptiveSoftmax, embedding: AdaptiveEmbedding, x: Tensor, targets: Tensor, *, by_token: bool = True
) -> TokenLosses:
    """What [`token_losses`][] returns for predictions from ``x [S, B, D]`` of ``targets [S, B]``, computed in
    the first cluster for all, and in each rarer one for the targets in it (Grave et al. 2017, section 4).
    Every weight has a gradient, 0 in a cluster without targets, as processes that average theirs need."""
    flat, target = x.flatten(0, 1), targets.flatten().contiguous()  # [N, D] and [N]
    (_, words), *rare = head.clusters.bounds
    first = upcast(head.cluster_logits(0, flat, embedding))  # [N, words + rare clusters]
    cluster = torch.bucketize(target, target.new_tensor(head.clusters.cutoffs), right=True)
    column = torch.where(cluster > 0, words - 1 + cluster, target)
    losses, first = F.cross_entropy(first, column, reduction="none"), first.detach()
    # In units of the first cluster's logits, a rare word's is its cluster's plus its log-probability there.
    score = first.gather(1, column.clamp(min=0)[:, None])[:, 0]
    correct = target >= 0
    sizes = torch.bincount(cluster, minlength=1 + len(rare)).tolist()  # a GPU is waited for once
    rows_of = cluster.argsort(stable=True).split(sizes)
    for c, (low, _) in enumerate(rare, 1):
        rows, word = rows_of[c], target[rows_of[c]] - low
        logits = upcast(head.cluster_logits(c, flat[rows], embedding))
        of_word = F.cross_entropy(logits, word, reduction="none")
        losses = losses.index_add(0, rows, of_word)
        if by_token:
            score = score.index_add(0, rows, -of_word.detach())
            correct[rows] = logits.detach().argmax(-1) == word
    loss = losses.sum() / (target >= 0).sum()
    if not by_token:
        return TokenLosses(loss)
    correct &= score >= first[:, :words].amax(-1)
    with torch.no_grad():
        # A word is no likelier than its cluster, so only clusters likelier than the target are looked into.
        for c, (low, high) in enumerate(rare, 1):
            of_cluster = first[:, words - 1 + c]
            doubtful = (correct & (cluster != c) & (of_cluster > score)).nonzero()[:, 0]
            for rows in doubtful.split(max(MAX_LOGITS // (high - low), 1)):
                logits = upcast(head.cluster_logits(c, flat[rows], embedding))
                likeliest = logits.amax(-1) - logits.logsumexp(-1)
                correct[rows] = of_cluster[rows] + likeliest <= score[rows]
    return TokenLosses(loss, losses.detach().view_as(targets), correct.view_as(targets))


def clusters_of(config: ModelConfig) -> Clusters:
    return Clusters(config.n_tokens, config.adaptive.cutoffs, config.adaptive.div_val, config.d_embed)


def build_embedding(config: ModelConfig) -> nn.Embedding | AdaptiveEmbedding:
    if config.embedding == "adaptive":
        return AdaptiveEmbedding(clusters_of(config), config.d_model)
    return nn.Embedding(config.n_tokens, config.d_model)


def build_head(config: ModelConfig) -> nn.Linear | AdaptiveSoftmax:
    if config.embedding == "adaptive":
        tied = {name: getattr(config.adaptive, name) for name in ("tie_weights", "tie_projections")}
        return AdaptiveSoftmax(clusters_of(config), config.d_model, **tied)
    return nn.Linear(config.d_model, config.n_tokens)


def initialise_vocabulary(embed: nn.Module, head: nn.Module) -> None:
    """Draw fresh weights for embedding and head; the head starts with nearly equal probabilities."""
    for module, std in ((embed, 0.3), (head, 0.02)):
        if isinstance(module, AdaptiveEmbedding | AdaptiveSoftmax):
            module.reset_parameters()
        elif isinstance(module, nn.Embedding | nn.Linear):
            nn.init.normal_(module.weight, std=std)
    if isinstance(head, nn.Linear):
        nn.init.zeros_(head.bias)
