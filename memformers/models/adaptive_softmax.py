"""Adaptive softmax (Grave et al. 2017, arXiv 1609.04309) and adaptive embedding (Baevski and Auli 2019, arXiv
1809.10853), as in the original Transformer-XL.

Token ids are ordered by frequency and cut into clusters. A rare word has a narrower vector, and its cluster
is computed only where it is needed.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memformers.common.errors import UserError
from memformers.models.losses import TokenLosses, upcast

if TYPE_CHECKING:
    from memformers.common.types import typed_like

MAX_LOGITS = 1 << 24
"""The most logits of a rare cluster that are computed at once in the search for a more likely word: 64 MiB in
float32."""


@dataclass(frozen=True)
class Clusters:
    """Clusters of a vocabulary ([`AdaptiveConfig`][]). Raises ValueError for cutoffs outside it."""

    vocab_size: int
    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    d_embed: int = 128

    def __post_init__(self) -> None:
        if self.cutoffs and self.cutoffs[-1] >= self.vocab_size:
            limit = f"vocab_size={self.vocab_size}"
            raise UserError(f"expected each cutoff to be below {limit}, got cutoffs={self.cutoffs}.")

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The ids ``low ≤ id < high`` of each cluster."""
        return list(zip((0, *self.cutoffs), (*self.cutoffs, self.vocab_size), strict=True))

    @property
    def table_sizes(self) -> list[tuple[int, int]]:
        """Words and width of each table of word vectors. With one width for all, there is one table."""
        if self.div_val == 1:
            return [(self.vocab_size, self.d_embed)]
        return [(high - low, self.width(i)) for i, (low, high) in enumerate(self.bounds)]

    def width(self, cluster: int) -> int:
        """d / kⁱ for the cluster i (Baevski and Auli 2019, section 3)."""
        return self.d_embed // self.div_val**cluster

    def has_maps(self, d_model: int) -> bool:
        """Whether word vectors are mapped to ``d_model`` features; if not, all have that width."""
        return self.div_val > 1 or self.d_embed != d_model


class AdaptiveEmbedding(nn.Module):
    """Tokens ``[S, B]`` to ``[S, B, D]``: √D · W_c e, for the word vector e in a table of its cluster c
    (Baevski and Auli 2019, section 3). The factor √D is the original Transformer-XL's. A cluster's map W_c
    ``[D, d_c]`` is left out where all e have D features."""

    def __init__(self, clusters: Clusters, d_model: int):
        super().__init__()
        self.clusters = clusters
        self.d_model = d_model
        self.tables = nn.ModuleList(nn.Embedding(*size) for size in clusters.table_sizes)  # e
        widths = [width for _, width in clusters.table_sizes] if clusters.has_maps(d_model) else []
        self.maps = nn.ModuleList(nn.Linear(width, d_model, bias=False) for width in widths)  # W_c
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_tables_and_maps(self.tables, self.maps)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens [S, B]``, integers below ``vocab_size``, to ``[S, B, D]``."""
        parts = []
        is_single = len(self.tables) == 1
        for i, table in enumerate(self.tables):
            low, high = self.clusters.bounds[i]
            # Each table embeds all tokens: selecting its tokens would wait for the device to count them.
            vectors = table(tokens if is_single else (tokens - low).clamp(0, high - low - 1))  # [S, B, d_c]
            # Autocast would change the dtype of the residual stream, and so of the memory.
            x = self.maps[i](vectors).to(vectors.dtype) if len(self.maps) else vectors  # [S, B, D]
            if not is_single:
                is_in_cluster = (tokens >= low) & (tokens < high)  # [S, B]
                x = x * is_in_cluster[..., None]
            parts.append(x)
        x = parts[0] if is_single else torch.stack(parts).sum(0)
        return x * math.sqrt(self.d_model)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class AdaptiveSoftmax(nn.Module):
    """Features ``[·, D]`` to log-probabilities ``[·, vocab_size]``, over the whole vocabulary (Grave et al.
    2017, section 4):

        log p(word of cluster 0) = log softmax([E₀; G] P₀ x + b)_word
        log p(word of cluster c) = log softmax([E₀; G] P₀ x + b)_c + log softmax(E_c P_c x + b_c)_word

    with the word vectors E_c of cluster c, the map P_c ``[d_c, D]`` to their width, and a row of G for each
    cluster but the first. ``tie_weights`` and ``tie_projections`` ([`AdaptiveConfig`][]) take E_c, and P_c
    but for the first cluster, from the embedding, which owns them and is given with every call."""

    def __init__(self, clusters: Clusters, d_model: int, *, tie_weights: bool, tie_projections: bool):
        super().__init__()
        self.clusters = clusters
        n_rare = len(clusters.cutoffs)
        sizes = [] if tie_weights else clusters.table_sizes
        self.words = nn.ModuleList(nn.Linear(width, words, bias=False) for words, width in sizes)  # E_c
        self.bias = nn.Parameter(torch.empty(clusters.vocab_size))  # b and b_c
        self.rare = nn.Linear(clusters.d_embed, n_rare) if n_rare else None  # G
        n_maps = 0
        if clusters.has_maps(d_model):
            n_maps = 1 if tie_projections else 1 + n_rare
        widths = map(clusters.width, range(n_maps))
        self.maps = nn.ModuleList(nn.Linear(d_model, width, bias=False) for width in widths)  # P_c
        self.reset_parameters()

    def reset_parameters(self) -> None:
        init_tables_and_maps(self.words, self.maps)
        for parameter in (self.bias, *(self.rare.parameters() if self.rare else ())):
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """``x [·, D]`` to ``[·, vocab_size]``, with tied weights from ``embedding``."""
        n_frequent = self.clusters.bounds[0][1]
        n_rare = len(self.clusters.cutoffs)
        first = F.log_softmax(self.cluster_logits(0, x, embedding), dim=-1)
        words, clusters = first.split((n_frequent, n_rare), dim=-1)
        parts = [words]
        for c in range(1, 1 + n_rare):
            given_cluster = F.log_softmax(self.cluster_logits(c, x, embedding), dim=-1)
            parts.append(given_cluster + clusters[..., c - 1 : c])  # log p(word | c) + log p(c)
        return torch.cat(parts, dim=-1)

    if TYPE_CHECKING:

        @typed_like(forward)
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def cluster_logits(self, i: int, x: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """``x [·, D]`` to the logits ``[·, words]`` of cluster ``i``. The first cluster's end with one for
        each other cluster."""
        low, high = self.clusters.bounds[i]
        has_one_table = self.clusters.div_val == 1

        # E_i, or [E₀; G] for the first cluster: [words, d_i]
        tables = self.words if len(self.words) else embedding.tables
        rows = plain_weight(tables[0])[low:high] if has_one_table else plain_weight(tables[i])
        bias = self.bias[low:high]
        if i == 0 and self.rare is not None:
            rows = torch.cat((rows, plain_weight(self.rare)))
            bias = torch.cat((bias, self.rare.bias))

        # P_i x: [·, d_i]
        if i < len(self.maps):
            x = self.maps[i](x)
        elif len(self.maps):  # tied
            x = F.linear(x, plain_weight(embedding.maps[0 if has_one_table else i]).mT)
        return F.linear(x, rows, bias)


def plain_weight(module: nn.Module) -> Tensor:
    """The weight of an embedding or a linear layer, not quantized; ValueError for any other module."""
    if not isinstance(module, nn.Embedding | nn.Linear):
        name = type(module).__name__
        raise UserError(f"an adaptive vocabulary needs nn.Embedding or nn.Linear, got {name}; unwrap it.")
    # Parts of several weights are concatenated. Quantized tensors can't do that.
    is_quantized = hasattr(module.weight, "__tensor_flatten__")
    return module.weight.dequantize() if is_quantized else module.weight


def init_tables_and_maps(tables: nn.ModuleList, maps: nn.ModuleList) -> None:
    for table in tables:
        nn.init.normal_(plain_weight(table), std=0.02)  # as in the original
    for linear in maps:
        weight = plain_weight(linear)  # [d_out, d_in]
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)


def adaptive_losses(
    head: AdaptiveSoftmax,
    embedding: AdaptiveEmbedding,
    x: Tensor,
    targets: Tensor,
    *,
    by_token: bool = True,
    max_logits: int = MAX_LOGITS,
) -> TokenLosses:
    """The [`token_losses`][memformers.models.losses.token_losses] of predictions from ``x [S, B, D]`` of
    ``targets [S, B]``, computed in the first cluster for all, and in each rarer one for the targets in it
    (Grave et al. 2017, section 4). Every weight has a gradient, 0 in a cluster without targets, as processes
    that average theirs need."""
    features = x.flatten(0, 1)  # [N, D], N = S · B
    target = targets.flatten().contiguous()  # [N]
    (_, n_frequent), *rare_bounds = head.clusters.bounds

    # The first cluster, for all: −log p(word), or −log p(cluster) where the word is rare.
    first = upcast(head.cluster_logits(0, features, embedding))  # [N, frequent words + rare clusters]
    cluster = torch.bucketize(target, target.new_tensor(head.clusters.cutoffs), right=True)  # [N]
    column = torch.where(cluster > 0, n_frequent - 1 + cluster, target)
    losses = F.cross_entropy(first, column, reduction="none")  # [N]
    first = first.detach()
    # A rare word's logit is its cluster's plus the word's log-probability in the cluster.
    score = first.gather(1, column.clamp(min=0)[:, None])[:, 0]  # [N]
    is_correct = target >= 0

    # Each rare cluster, for the targets in it: −log p(word | cluster) is added.
    sizes = torch.bincount(cluster, minlength=1 + len(rare_bounds)).tolist()  # a GPU is waited for once
    rows_of_clusters = cluster.argsort(stable=True).split(sizes)
    for c, (low, _) in enumerate(rare_bounds, 1):
        rows = rows_of_clusters[c]
        word = target[rows] - low
        logits = upcast(head.cluster_logits(c, features[rows], embedding))
        word_losses = F.cross_entropy(logits, word, reduction="none")
        losses = losses.index_add(0, rows, word_losses)
        if by_token:
            score = score.index_add(0, rows, -word_losses.detach())
            is_correct[rows] = logits.detach().argmax(-1) == word

    loss = losses.sum() / (target >= 0).sum()
    if not by_token:
        return TokenLosses(loss)

    # A target is correct if neither a frequent word nor a rare word of another cluster is more likely.
    is_correct &= score >= first[:, :n_frequent].amax(-1)
    with torch.no_grad():
        # p(word) ≤ p(cluster), so only clusters more likely than the target can contain a more likely word.
        for c, (low, high) in enumerate(rare_bounds, 1):
            cluster_score = first[:, n_frequent - 1 + c]  # [N]
            is_open = is_correct & (cluster != c) & (cluster_score > score)
            open_rows = is_open.nonzero()[:, 0]
            for rows in open_rows.split(max(max_logits // (high - low), 1)):
                logits = upcast(head.cluster_logits(c, features[rows], embedding))
                best_log_prob = logits.amax(-1) - logits.logsumexp(-1)
                is_correct[rows] = cluster_score[rows] + best_log_prob <= score[rows]
    return TokenLosses(loss, losses.detach().view_as(targets), is_correct.view_as(targets))
