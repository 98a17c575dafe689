# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.10", "numpy"]
# ///
"""The Compressive Transformer (Rae et al. 2020, arXiv 1911.05507): transformer_xl.py, and slots.

python compressive.py              trains on Tiny Shakespeare for about a minute and prints a sample
python compressive.py novel.txt    trains on this text instead
uv run compressive.py              does so in an environment with PyTorch, which uv makes

C slots, each compressed from c vectors, come before the M vectors of the memory: K = C + M + S keys.
"""

import math
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformer_xl import Layer, TransformerXL, main


class CompressiveTransformer(TransformerXL):
    def __init__(self, vocab_size: int, mem_len: int = 32, c_mem_len: int = 32, rate: int = 4, **sizes: int):
        super().__init__(vocab_size, mem_len=mem_len, **sizes)
        self.c_mem_len, self.rate, d_model = c_mem_len, rate, self.embed.embedding_dim
        self.compress = nn.ModuleList(nn.Conv1d(d_model, d_model, rate, stride=rate) for _ in self.layers)

    def forward(self, tokens, memory=None):
        x, new_memory, losses = self.embed(tokens), [], []
        memory = memory or [(x[:0].detach(),) * 2] * len(self.layers)
        for layer, f_c, (slots, mem) in zip(self.layers, self.compress, memory, strict=True):
            context = torch.cat((slots, mem, x))  # [K, B, D]
            mem = torch.cat((mem, x)).detach()
            n = max(0, min(math.ceil((len(mem) - self.mem_len) / self.rate), len(mem) // self.rate))
            old, mem = mem[: n * self.rate], mem[n * self.rate :]
            if n:
                new = f_c(old.permute(1, 2, 0)).permute(2, 0, 1)  # [n·c, B, D] to [n, B, D]
                losses.append(reconstruction_loss(layer, x.detach(), old, new))
                slots = torch.cat((slots, new.detach()))[-self.c_mem_len :]
            new_memory.append((slots, mem))
            x = layer(x, context)
        return self.head(self.norm(x)), new_memory, sum(losses)


def reconstruction_loss(layer: Layer, h: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """How much attention changes when the slots ``new`` replace ``old``. Its gradient reaches only f_c."""
    return F.mse_loss(content_attention(layer, h, new), content_attention(layer, h, old))


def content_attention(layer: Layer, h: Tensor, memory: Tensor) -> Tensor:
    """The layer's attention without positions, with its weights as constants: [B, H, S, E]."""
    weight = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    norm = weight["norm1.weight"], weight["norm1.bias"]
    h, memory = (F.layer_norm(x, x.shape[-1:], *norm) for x in (h, memory))
    q, k = F.linear(h, weight["attention.query.weight"]), F.linear(memory, weight["attention.key.weight"])
    v = F.linear(memory, weight["attention.value.weight"], weight["attention.value.bias"])
    q, k, v = (t.unflatten(-1, (layer.attention.n_heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v)


if __name__ == "__main__":
    main(CompressiveTransformer, *sys.argv[1:])
