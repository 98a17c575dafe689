"""A Gated DeltaNet state (Yang et al. 2024, arXiv 2412.06464) beside attention over a window of positions.

    memformers train --model experiments/memories/gated_delta.py:GatedDelta

By head, for the positions t of a document in order of time (section 3.1), with E features each:

    S_t = α_t S_{t−1} (I − β_t k_t k_tᵀ) + β_t v_t k_tᵀ        decay, erase, write
    A = (1 − sigmoid(g)) ⊙ A_dot + sigmoid(g) ⊙ S_t q_t        g: a learned scalar

A_dot is attention over the newest M positions and the segment; q, k and v are its projections, q and k of
length 1; α_t = exp(−exp(a) · softplus(w_α z_t + b)) and β_t = sigmoid(w_β z_t). A memory holds S before the
newest M; these and the segment are written where they are read, so the loss reaches α and β, all at once:
with γ_t = α_1 ⋯ α_t and u_t = β_t (v_t − α_t S_{t−1} k_t),

    S_t = γ_t S_0 + Σ_{i≤t} (γ_t / γ_i) u_i k_iᵀ
    u_t = β_t (v_t − γ_t S_0 k_t − Σ_{i<t} (γ_t / γ_i) (k_i·k_t) u_i)        a triangular system
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, softplus

from memformers import LayerMemory, MemoryLayer, MemoryRule, MemorySizes, NetworkConfig, UpdateContext


class GatedDeltaLayer(MemoryLayer):
    def __init__(self, **parts: Any):
        super().__init__(**parts)
        H = self.self_attn.n_heads
        self.gates = nn.Linear(self.d_model, 2 * H, bias=False)  # w_α and w_β
        self.log_rate = nn.Parameter(torch.zeros(H))  # a
        # −log α starts at 0.001 to 0.1, by head: S lasts about 1,000 to 10 positions.
        self.rate_bias = nn.Parameter(torch.logspace(-3, -1, H).expm1().log())  # b
        self.share = nn.Parameter(torch.zeros(H))  # g

    def attend(
        self, x: Tensor, kv_input: Tensor, past: LayerMemory | None, mask: Any, key_start: Tensor | None
    ) -> Tensor:
        """A of ``x [S, B, D]``, projected; queries whose ``key_start [B, S]`` is 0 see the slots, S."""
        if mask is not None:
            raise ValueError("Gated DeltaNet can't read its state through a mask; give doc_starts instead.")
        past = LayerMemory.nothing(x) if past is None else past
        attention = self.self_attn
        z = self.attention_input(torch.cat((past.mem, x)))  # [T, B, D], T = M + S
        q = attention.by_head(attention.query(z[past.mem_len :]))  # [B, H, S, E]
        k, v = (attention.by_head(project(z)) for project in (attention.key, attention.value))  # [B, H, T, E]
        key_start = x.new_zeros(x.shape[1], len(x)).long() if key_start is None else key_start
        # Attention over positions, whose first key comes after the slots.
        A_dot = attention.attend_by_head(q, k, v, key_start=(key_start - past.n_slots).clamp(min=0))
        # The state. The newest M are written if they are of the first query's document.
        write_start = torch.cat((key_start[:, :1].expand(-1, past.mem_len), key_start), 1)  # [B, T]
        A_state, _ = self.delta_rule(q, k, v, z, past.slots, write_start)
        A = A_dot.lerp(A_state.to(A_dot.dtype), self.share.sigmoid()[:, None, None].to(A_dot.dtype))
        return attention.output(A.permute(2, 0, 1, 3).flatten(2))  # [S, B, D]

    def delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, z: Tensor, slots: Tensor, write_start: Tensor
    ) -> tuple[Tensor, Tensor]:
        """S_t q_t of ``q [B, H, n, E]``, the newest of T positions, and S_T; each is written after those of
        ``slots``, S_0, and of ``k``, ``v [B, H, T, E]``, ``z [T, B, D]`` from ``write_start [B, T]`` on."""
        B, H, T, E = k.shape
        rate, beta = self.gates(z).permute(1, 2, 0).chunk(2, dim=1)  # [B, H, T]
        log_alpha = -self.log_rate.exp()[:, None] * softplus(rate + self.rate_bias[:, None])
        S_0 = self.self_attn.by_head(slots) if len(slots) else k.new_zeros(B, H, E, E)
        dtype = torch.promote_types(k.dtype, torch.float32)  # sums over T positions need at least float32
        q, k = normalize(q.to(dtype), dim=3), normalize(k.to(dtype), dim=3)
        v, log_alpha, beta, S_0 = (part.to(dtype) for part in (v, log_alpha, beta.sigmoid(), S_0))
        i = torch.arange(T, device=k.device)
        is_written = (write_start[..., None] <= len(slots) + i) & (i <= i[:, None])  # [B, T, T], i before t
        with torch.autocast("cpu" if k.is_meta else k.device.type, enabled=False):
            # γ_t [B, H, T, 1] and γ_t / γ_i [B, H, T, T], 0 where t isn't written after S_0, or i
            log_gamma = log_alpha.cumsum(2)[..., None]
            gamma = log_gamma.exp().where((write_start == 0)[:, None, :, None], 0.0)
            decay = (log_gamma - log_gamma.mT).masked_fill(~is_written[:, None], -torch.inf).exp()
            # u [B, H, T, E], of a triangular system with ones on its diagonal
            pairs = beta[..., None] * decay * (k @ k.mT)
            values = beta[..., None] * (v - gamma * (k @ S_0.mT))
            u = torch.linalg.solve_triangular(pairs, values, upper=False, unitriangular=True)
            newest = slice(T - q.shape[2], T)
            read = gamma[:, :, newest] * (q @ S_0.mT) + (decay[:, :, newest] * (q @ k.mT)) @ u  # S_t q_t
            return read, gamma[:, :, -1:] * S_0 + (decay[:, :, -1, :, None] * u).mT @ k  # S_T

    def state_after(self, x: Tensor, belongs: Tensor, slots: Tensor) -> Tensor:
        """S ``[B, H, E, E]`` after ``slots`` and those of ``x [n, B, D]`` that ``belongs [n, B]`` has."""
        z = self.attention_input(x)
        k, v = (self.self_attn.by_head(project(z)) for project in (self.self_attn.key, self.self_attn.value))
        # The document begins with a slot, or after the inputs that don't belong to it.
        n_hidden = (~belongs).sum(0)  # [B]
        write_start = (n_hidden + len(slots)).where(n_hidden > 0, 0)[:, None].expand(-1, len(x))
        return self.delta_rule(k[:, :, :0], k, v, z, slots, write_start)[1]


class GatedDelta(MemoryRule):
    """The newest ``mem_len`` inputs, and S of all heads as E slots of D = H·E features: slot e is row e."""

    layer = GatedDeltaLayer

    @classmethod
    def sizes(cls, config: NetworkConfig) -> list[MemorySizes]:
        """E slots, which are no keys. A product takes 2·D operations by pair of positions, with S 2·D·E."""
        D = config.d_model
        S = config.segment_len
        E = D // config.n_heads
        sizes = []
        for M in config.per_layer("mem_len"):
            T = M + S
            read = 3 * T * T + 4 * S * T + 2 * E * (T + S)
            write = 3 * S * S + 4 * S * E + 4 * S * D
            sizes.append(MemorySizes(M, E, n_keys=M, extra_operations=(read + write) * D // S))
        return sizes

    def update(self, past: LayerMemory, x: Tensor, context: UpdateContext) -> tuple[LayerMemory, None]:
        window = self.push(past, x, context)
        if not len(window.evicted):
            return LayerMemory(window.mem, window.slots), None
        inputs = (context.layer, window.evicted, window.belongs, window.slots)
        S = context.layer.compute(GatedDeltaLayer.state_after, *inputs)
        return LayerMemory(window.mem, S.permute(2, 0, 1, 3).flatten(2).to(x.dtype)), None
