"""The other implementations, each with the same interface: tokens ``[S, B]`` and memory in; logits
``[S, B, vocabulary]``, the next memory and the reconstruction loss out."""

import importlib
import importlib.util
from typing import Any

import torch
from labml import tracker
from torch import Tensor, nn

tracker.debug = lambda *_: None  # labml-nn calls it; labml 0.5.3 no longer has it

from labml_nn.transformers import compressive as labml_compressive  # noqa: E402
from labml_nn.transformers import xl as labml_xl  # noqa: E402
from labml_nn.transformers.feed_forward import FeedForward  # noqa: E402
from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention  # noqa: E402

from memformers import ModelConfig  # noqa: E402
from memformers.kernels.naive import causal_mask  # noqa: E402

LABML = "labml-nn"
LUCIDRAINS = "compressive-transformer-pytorch"


class LabmlLM(nn.Module):
    """labml-nn's model with the embedding, head and memory rules of its own experiments."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        parts: dict[str, Any] = {
            "d_model": config.d_model,
            "self_attn": RelativeMultiHeadAttention(config.heads, config.d_model, 0.0),
            "feed_forward": FeedForward(config.d_model, config.d_ff, 0.0),
            "dropout_prob": 0.0,
        }
        self.src_embed = nn.Embedding(config.vocab_size, config.d_model)
        self.transformer: Any
        if config.model == "compressive":
            f_c = labml_compressive.Conv1dCompression(config.compression_rate, config.d_model)
            layer = labml_compressive.CompressiveTransformerLayer(compress=f_c, **parts)
            self.transformer = labml_compressive.CompressiveTransformer(layer, config.n_layers)
            self.loss = labml_compressive.AttentionReconstructionLoss(self.transformer.layers)
        else:
            layer = labml_xl.TransformerXLLayer(**parts)
            self.transformer = labml_xl.TransformerXL(layer, config.n_layers)
        self.generator = nn.Linear(config.d_model, config.vocab_size)
        for name, parameter in self.named_parameters():  # zeros would hide a wrong position
            if name.endswith(("key_pos_embeddings", "key_pos_bias", "query_pos_bias")):
                nn.init.normal_(parameter, std=0.1)

    def forward(self, tokens: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        """Logits, the next memory and the reconstruction loss."""
        mem: list[Tensor]
        c_mem: list[Tensor]
        mem, c_mem = memory or ([], [])
        S = len(tokens)
        past = (len(mem[0]) if mem else 0) + (len(c_mem[0]) if c_mem else 0)
        mask = causal_mask(S, past + S, tokens.device)[:, :, None]
        x, no_loss = self.src_embed(tokens), torch.zeros(())
        if self.config.model != "compressive":
            hidden, new_mem = self.transformer(x, mem, mask)
            mem = [torch.cat(pair) for pair in zip(mem, new_mem, strict=True)] if mem else new_mem
            return (
                self.generator(hidden),
                ([m[-self.config.layer_lengths[0].mem_len :] for m in mem], []),
                no_loss,
            )
        hidden, new_mem = self.transformer(x, mem, c_mem, mask)
        mem = [torch.cat(pair) for pair in zip(mem, new_mem, strict=True)] if mem else new_mem
        lengths = self.config.layer_lengths[0]
        c = lengths.compression_rate
        n = max(-(-(len(mem[0]) - lengths.mem_len) // c), 0)
        if n:
            old, mem = [m[: n * c] for m in mem], [m[n * c :] for m in mem]
            with torch.no_grad():
                new = [layer.compress(m) for layer, m in zip(self.transformer.layers, old, strict=True)]
            c_mem = [torch.cat(pair) for pair in zip(c_mem, new, strict=True)] if c_mem else new
            c_mem = [m[-lengths.c_mem_len :] for m in c_mem]
            return self.generator(hidden), (mem, c_mem), self.loss(new_mem, old)
        return self.generator(hidden), (mem, c_mem), no_loss


class LucidrainsLM(nn.Module):
    """compressive-transformer-pytorch's model, batch first inside, as similar to ours as its settings
    allow: plain residuals, and each layer reads its own memory."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        package = importlib.import_module("compressive_transformer_pytorch")
        self.model = package.CompressiveTransformer(
            num_tokens=config.vocab_size,
            dim=config.d_model,
            depth=config.n_layers,
            heads=config.heads,
            seq_len=config.segment_len,
            mem_len=config.mem_len,
            cmem_len=config.c_mem_len,
            cmem_ratio=config.compression_rate,
            gru_gated_residual=False,
            enhanced_recurrence=False,
        )

    def forward(self, tokens: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        """Logits, the next memory and the reconstruction loss."""
        logits, memory, loss = self.model(tokens.t(), memories=memory)
        return logits.transpose(0, 1), memory, loss.sum()


def lucidrains_is_installed() -> bool:
    """Whether :class:`LucidrainsLM` can be built; ``make bench`` installs what it needs."""
    return importlib.util.find_spec("compressive_transformer_pytorch") is not None
