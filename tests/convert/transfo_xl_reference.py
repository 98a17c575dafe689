"""The original Transformer-XL, written from the papers' equations: weights by its names, and its forward
pass, one einsum an equation (Dai et al. 2019, section 3.3; Grave et al. 2017; Baevski and Auli 2019)."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """A small one."""

    cutoffs: tuple[int, ...] = ()
    div_val: int = 1
    d_embed: int = 12
    tied: bool = False
    """Word vectors, and the projections of all clusters but the first."""
    untie_r: bool = False
    """u and v for each layer, not for all."""
    original: bool = True
    """Names and order of clusters are the original repository's, not Hugging Face's."""
    clamp_len: int = -1
    same_length: bool = False
    pre_lnorm: bool = False
    """Norms stand before each sublayer, and none after the last layer."""
    mem_len: int = 8
    V: int = 11
    D: int = 12
    H: int = 3
    layers: int = 2
    d_ff: int = 16

    @property
    def config(self):
        """What the weights alone don't show."""
        return {
            "cutoffs": list(self.cutoffs),
            "tgt_len": 5,
            "mem_len": self.mem_len,
            "clamp_len": self.clamp_len,
            "same_length": self.same_length,
            "pre_lnorm": self.pre_lnorm,
        }

    @property
    def bounds(self):
        return list(pairwise((0, *self.cutoffs, self.V)))

    def weights(self) -> dict[str, Tensor]:
        """Random leaves, by name; what is tied is one tensor of two names."""
        weights = {}
        for name, shape in self.shapes().items():
            weights[name] = (0.4 * torch.randn(shape)).requires_grad_()
        for name in weights if self.tied else ():
            if name.startswith("crit.out_layers.") and name.endswith("weight"):
                weights[name] = weights[name.replace("crit.out_layers", "word_emb.emb_layers")]
            if name.startswith("crit.out_projs.") and not name.endswith(".0"):
                i = int(name[-1]) if self.div_val > 1 else 0
                weights[name] = weights[f"word_emb.emb_projs.{i}"]
        return weights

    def shapes(self) -> dict[str, tuple[int, ...]]:
        D = self.D
        E = D // self.H
        shapes = self.vocabulary_shapes()
        for i in range(self.layers):
            layer: dict[str, tuple[int, ...]] = {
                "dec_attn.qkv_net.weight": (3 * D, D),
                "dec_attn.r_net.weight": (D, D),
                "dec_attn.o_net.weight": (D, D),
                "dec_attn.layer_norm.weight": (D,),
                "dec_attn.layer_norm.bias": (D,),
                "pos_ff.CoreNet.0.weight": (self.d_ff, D),
                "pos_ff.CoreNet.0.bias": (self.d_ff,),
                "pos_ff.CoreNet.3.weight": (D, self.d_ff),
                "pos_ff.CoreNet.3.bias": (D,),
                "pos_ff.layer_norm.weight": (D,),
                "pos_ff.layer_norm.bias": (D,),
            }
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        for bias in ("r_w_bias", "r_r_bias"):
            names = [bias]
            if self.untie_r:
                names = [f"layers.{i}.dec_attn.{bias}" for i in range(self.layers)]
            shapes |= dict.fromkeys(names, (self.H, E))
        return shapes

    def vocabulary_shapes(self) -> dict[str, tuple[int, ...]]:
        """Tables of words, projections to and from their widths, and clusters of rare words."""
        D = self.D
        widths = [self.d_embed // self.div_val**i for i in range(len(self.bounds))]
        sizes = [self.V]
        if self.div_val > 1:
            sizes = [high - low for low, high in self.bounds]
        shapes: dict[str, tuple[int, ...]] = {}
        for i, size in enumerate(sizes):
            shapes[f"word_emb.emb_layers.{i}.weight"] = (size, widths[i])
            shapes[f"crit.out_layers.{i}.weight"] = (size, widths[i])
            shapes[f"crit.out_layers.{i}.bias"] = (size,)
        if self.div_val > 1 or self.d_embed != D:
            shapes |= {f"word_emb.emb_projs.{i}": (D, widths[i]) for i in range(len(sizes))}
            shapes |= {f"crit.out_projs.{i}": (D, width) for i, width in enumerate(widths)}
        n_rare = len(self.cutoffs)
        if n_rare:
            shapes["crit.cluster_weight"] = (n_rare, self.d_embed)
            shapes["crit.cluster_bias"] = (n_rare,)
        return shapes

    def named(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """As a state dict of the layout, with the buffer that both have."""
        state = {}
        for name, tensor in {**weights, "pos_emb.inv_freq": torch.ones(self.D // 2)}.items():
            has_prefix = not self.original and not name.startswith("crit.")
            state[f"transformer.{name}" if has_prefix else name] = tensor
        return state

    def forward(
        self, weights: dict[str, Tensor], tokens: Tensor, mems: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Log-probabilities ``[S, B, V]`` and the new memories ``[M, B, D]``, of tokens ``[S, B]``."""
        x = self.embed(weights, tokens)
        new_mems = []
        for i in range(self.layers):
            w = self.layer_weights(weights, i)
            h = torch.cat((mems[i], x)) if mems else x
            new_mems.append(h[max(len(h) - self.mem_len, 0) :].detach())
            x = self.layer(w, x, h)
        return self.predict(weights, x), new_mems

    def layer_weights(self, weights: dict[str, Tensor], i: int) -> dict[str, Tensor]:
        """The weights of layer i without its prefix, and the biases that all layers may share."""
        w = {}
        for bias in ("r_w_bias", "r_r_bias"):
            if bias in weights:
                w[f"dec_attn.{bias}"] = weights[bias]
        for name, tensor in weights.items():
            if name.startswith(f"layers.{i}."):
                w[name.removeprefix(f"layers.{i}.")] = tensor
        return w

    def embed(self, w: dict[str, Tensor], tokens: Tensor) -> Tensor:
        vectors = []
        for i in range(len(self.bounds) if self.div_val > 1 else 1):
            e = w[f"word_emb.emb_layers.{i}.weight"]
            W = w.get(f"word_emb.emb_projs.{i}")
            vectors.append(e if W is None else torch.einsum("de,we->wd", W, e))
        return math.sqrt(self.D) * torch.cat(vectors)[tokens]

    def layer(self, w: dict[str, Tensor], x: Tensor, h: Tensor) -> Tensor:
        D = self.D
        H = self.H
        E = D // H
        S = len(x)
        K = len(h)

        def norm(name: str, x: Tensor) -> Tensor:
            return F.layer_norm(x, (D,), w[f"{name}.layer_norm.weight"], w[f"{name}.layer_norm.bias"])

        def pre_norm(name: str, x: Tensor) -> Tensor:
            return norm(name, x) if self.pre_lnorm else x

        def post_norm(name: str, x: Tensor) -> Tensor:
            return x if self.pre_lnorm else norm(name, x)

        # What is remembered, h, is not normalized; the norm is applied to memory and segment together.
        read = pre_norm("dec_attn", h)
        w_q, w_k, w_v = w["dec_attn.qkv_net.weight"].view(3, H, E, D)
        w_r = w["dec_attn.r_net.weight"].view(H, E, D)
        q = torch.einsum("hed,ibd->bhie", w_q, read[K - S :])
        k = torch.einsum("hed,jbd->bhje", w_k, read)
        v = torch.einsum("hed,jbd->bhje", w_v, read)
        d = K - S + torch.arange(S)[:, None] - torch.arange(K)  # [S, K]
        clamped = d.clamp(0, self.clamp_len if self.clamp_len > 0 else K)
        rates = 1 / 10_000 ** (torch.arange(0, D, 2) / D)
        angles = clamped[..., None] * rates
        R = torch.cat((angles.sin(), angles.cos()), -1)  # [S, K, D]
        r = torch.einsum("hed,ijd->hije", w_r, R)
        u = w["dec_attn.r_w_bias"]
        v_r = w["dec_attn.r_r_bias"]
        a = torch.einsum("bhie,bhje->bhij", q, k)  # the paper's terms (a) to (d)
        b = torch.einsum("bhie,hije->bhij", q, r)
        c = torch.einsum("he,bhje->bhj", u, k)[:, :, None]
        d_term = torch.einsum("he,hije->hij", v_r, r)
        visible = d >= 0
        if self.same_length:
            visible &= d < self.mem_len
        scores = ((a + b + c + d_term) / math.sqrt(E)).masked_fill(~visible, -math.inf)
        o = torch.einsum("bhij,bhje->ibhe", scores.softmax(-1), v).flatten(2)
        x = post_norm("dec_attn", x + torch.einsum("dc,ibc->ibd", w["dec_attn.o_net.weight"], o))
        z = pre_norm("pos_ff", x)
        hidden = torch.einsum("fd,ibd->ibf", w["pos_ff.CoreNet.0.weight"], z) + w["pos_ff.CoreNet.0.bias"]
        out = torch.einsum("df,ibf->ibd", w["pos_ff.CoreNet.3.weight"], hidden.clamp(min=0))
        return post_norm("pos_ff", x + out + w["pos_ff.CoreNet.3.bias"])

    def predict(self, w: dict[str, Tensor], x: Tensor) -> Tensor:
        def logits(i: int, rows: Tensor, bias: Tensor) -> Tensor:
            P = w.get(f"crit.out_projs.{i}")
            narrow = x if P is None else torch.einsum("de,ibd->ibe", P, x)
            return torch.einsum("we,ibe->ibw", rows, narrow) + bias

        def words(i: int) -> tuple[Tensor, Tensor]:
            table = i if self.div_val > 1 else 0
            rows = w[f"crit.out_layers.{table}.weight"]
            bias = w[f"crit.out_layers.{table}.bias"]
            if self.div_val > 1:
                return rows, bias
            low, high = self.bounds[i]
            return rows[low:high], bias[low:high]

        if not self.cutoffs:
            return logits(0, *words(0)).log_softmax(-1)
        rows, bias = words(0)
        rows = torch.cat((rows, w["crit.cluster_weight"]))
        head = logits(0, rows, torch.cat((bias, w["crit.cluster_bias"]))).log_softmax(-1)
        parts = [head[..., : self.cutoffs[0]]]
        for i in range(1, len(self.bounds)):
            column = -i if self.original else self.cutoffs[0] + i - 1
            parts.append(head[..., column, None] + logits(i, *words(i)).log_softmax(-1))
        return torch.cat(parts, -1)
