# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.10", "numpy"]
# ///
"""The Compressive Transformer (Rae et al. 2020, arXiv 1911.05507): transformer_xl.py, and slots. That file
must be in the same folder.

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
        self.c_mem_len = c_mem_len
        self.rate = rate  # c
        d_model = self.embed.embedding_dim
        self.compress = nn.ModuleList(nn.Conv1d(d_model, d_model, rate, stride=rate) for _ in self.layers)

    def forward(self, tokens: Tensor, memory: list[tuple[Tensor, Tensor]] | None = None):
        """As in Transformer-XL, and the auxiliary loss, which trains the compression functions alone."""
        x = self.embed(tokens)  # [S, B, D]
        memory = memory or [(x[:0].detach(), x[:0].detach())] * len(self.layers)
        new_memory = []
        losses = []
        for layer, f_c, (slots, mem) in zip(self.layers, self.compress, memory, strict=True):
            context = torch.cat((slots, mem, x))  # [K, B, D]
            mem = torch.cat((mem, x)).detach()

            # What exceeds M is compressed: the oldest n·c vectors become n slots, of which the newest C stay
            n = max(0, min(math.ceil((len(mem) - self.mem_len) / self.rate), len(mem) // self.rate))
            old, mem = mem.split((n * self.rate, len(mem) - n * self.rate))
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
    """The layer's attention without positions, with its weights as constants: ``[B, H, S, E]``."""
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    norm = (h.shape[-1:], weights["norm1.weight"], weights["norm1.bias"])
    h = F.layer_norm(h, *norm)  # [S, B, D]
    memory = F.layer_norm(memory, *norm)  # [n, B, D]
    q = F.linear(h, weights["attention.query.weight"])
    k = F.linear(memory, weights["attention.key.weight"])
    v = F.linear(memory, weights["attention.value.weight"], weights["attention.value.bias"])
    q, k, v = (layer.attention.heads(x).permute(1, 2, 0, 3) for x in (q, k, v))  # [B, H, ·, E]
    return F.scaled_dot_product_attention(q, k, v)


if __name__ == "__main__":
    main(CompressiveTransformer, *sys.argv[1:])
