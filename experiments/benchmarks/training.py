"""Whole training steps of ours beside labml-nn 0.5.1's: tokens/s, interleaved in one run.

Both sides get the same weights, read the same text, and carry their own memories; before anything is
timed, their logits are compared. A step is forward, backward, clip and AdamW. Run it with
``make bench`` or ``python experiments/benchmarks/training.py``; it writes ``RESULTS.md`` and
``results.json`` beside itself.
"""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.nn.functional as F
from labml import tracker
from torch import Tensor, nn
from tqdm import tqdm

tracker.debug = lambda *_: None  # labml-nn calls it; labml 0.5.3 has it no more

from labml_nn.transformers import compressive as labml_compressive  # noqa: E402
from labml_nn.transformers import xl as labml_xl  # noqa: E402
from labml_nn.transformers.feed_forward import FeedForward  # noqa: E402
from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention  # noqa: E402

from memformers import MemoryLM, ModelConfig, from_labml  # noqa: E402
from memformers.environment import describe_environment  # noqa: E402
from memformers.files import write_json, write_text  # noqa: E402
from memformers.kernels.naive import causal_mask  # noqa: E402

VOCABULARY = 65
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Case:
    """A model's shape and how it is fed."""

    name: str
    config: ModelConfig
    batch_size: int
    steps: int


def case(name: str, steps: int, batch_size: int, **shape: int) -> Case:
    """A case with labml-nn's learned positions, which both sides have."""
    return Case(name, ModelConfig(vocab_size=VOCABULARY, positions="learned", **shape), batch_size, steps)  # type: ignore[arg-type]


CASES = [
    case("seed", 40, 32, d_model=128, heads=4, d_ff=256, n_layers=6, segment_len=8, mem_len=8,
         c_mem_len=128, compression_rate=2),
    case("mid", 12, 8, d_model=256, heads=4, d_ff=1024, n_layers=4, segment_len=128, mem_len=128,
         c_mem_len=128, compression_rate=4),
    case("base", 5, 2, d_model=512, heads=8, d_ff=2048, n_layers=4, segment_len=512, mem_len=512,
         c_mem_len=128, compression_rate=4),
    case("long", 5, 2, d_model=256, heads=4, d_ff=1024, n_layers=2, segment_len=512, mem_len=2048,
         c_mem_len=512, compression_rate=4),
]  # fmt: skip


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
        self.src_embed = nn.Embedding(VOCABULARY, config.d_model)
        self.transformer: Any
        if config.model == "compressive":
            f_c = labml_compressive.Conv1dCompression(config.compression_rate, config.d_model)
            layer = labml_compressive.CompressiveTransformerLayer(compress=f_c, **parts)
            self.transformer = labml_compressive.CompressiveTransformer(layer, config.n_layers)
            self.loss = labml_compressive.AttentionReconstructionLoss(self.transformer.layers)
        else:
            layer = labml_xl.TransformerXLLayer(**parts)
            self.transformer = labml_xl.TransformerXL(layer, config.n_layers)
        self.generator = nn.Linear(config.d_model, VOCABULARY)

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
            return self.generator(hidden), ([m[-self.config.mem_len :] for m in mem], []), no_loss
        hidden, new_mem = self.transformer(x, mem, c_mem, mask)
        mem = [torch.cat(pair) for pair in zip(mem, new_mem, strict=True)] if mem else new_mem
        c = self.config.compression_rate
        n = max(-(-(len(mem[0]) - self.config.mem_len) // c), 0)
        if n:
            old, mem = [m[: n * c] for m in mem], [m[n * c :] for m in mem]
            with torch.no_grad():
                new = [layer.compress(m) for layer, m in zip(self.transformer.layers, old, strict=True)]
            c_mem = [torch.cat(pair) for pair in zip(c_mem, new, strict=True)] if c_mem else new
            c_mem = [m[-self.config.c_mem_len :] for m in c_mem]
            return self.generator(hidden), (mem, c_mem), self.loss(new_mem, old)
        return self.generator(hidden), (mem, c_mem), no_loss


def trainer(model: nn.Module, batches: list[Tensor], fused: bool) -> Callable[[], Tensor]:
    """A function that takes the next training step and returns its logits."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    memory, step = None, 0

    def train_step() -> Tensor:
        nonlocal memory, step
        tokens = batches[step % len(batches)]
        logits, memory, auxiliary_loss = model(tokens, memory)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + auxiliary_loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        return logits.detach()

    return train_step


def measure(case: Case) -> dict[str, Any]:
    """Tokens/s of both sides, after they agreed; quartiles over interleaved steps."""
    torch.manual_seed(0)
    theirs, ours = LabmlLM(case.config), MemoryLM(case.config)
    weights = from_labml(theirs.state_dict(), max_positions=case.config.longest_attention)
    ours.load_state_dict(weights)
    shape = (case.config.segment_len, case.batch_size)
    batches = [torch.randint(VOCABULARY, shape) for _ in range(4)]
    sides = {"ours": trainer(ours, batches, True), "labml-nn": trainer(theirs, batches, False)}
    # As many steps as it takes until both memories are full, and a little more.
    full = case.config.mem_len
    if case.config.model == "compressive":
        full += case.config.c_mem_len * case.config.compression_rate
    warm_up = min(-(-full // case.config.segment_len) + 2, 40)
    error = 0.0
    for step in tqdm(range(warm_up), desc=f"{case.name} {case.config.model}: warm-up", leave=False):
        logits = {name: train_step() for name, train_step in sides.items()}
        if step == 0:  # later, two trainings drift apart by rounding
            error = (logits["ours"] - logits["labml-nn"]).abs().max().item()
            assert error < 1e-3, f"the two sides differ by {error}"
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in tqdm(range(case.steps), desc=f"{case.name} {case.config.model}", leave=False):
        for name, train_step in sides.items():
            start = time.perf_counter()
            train_step()
            seconds[name].append(time.perf_counter() - start)
    tokens = case.config.segment_len * case.batch_size
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["labml-nn"], strict=True)]
    return {
        "case": case.name,
        "model": case.config.model,
        "largest difference of logits": error,
        "tokens/s": {name: tokens / median(times) for name, times in seconds.items()},
        "ratio": median(ratios),
        "ratio quartiles": quantiles(ratios, n=4),
    }


def matrix_multiply_rate(size: int = 1024, repeats: int = 20) -> float:
    """Floating-point operations a second of ``torch.mm``, float32."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return 2 * size**3 / median(times)


def report(results: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """The results as Markdown."""
    packages = ", ".join(f"{k} {v}" for k, v in facts["environment"]["packages"].items())
    lines = [
        "# Training speed beside labml-nn 0.5.1",
        "",
        "Whole steps (forward, backward, clip, AdamW) in float32, eager, interleaved; the model is "
        "embedding, layers and head, with learned positions. Medians; in brackets the quartiles of the "
        "ratio. Made by `make bench`.",
        "",
        f"{facts['environment']['device']}, {facts['environment']['threads']} threads, "
        f"`torch.mm` at {facts['matrix multiply, GFLOP/s']:.0f} GFLOP/s; {packages}.",
        "",
        "| case | model | ours, tokens/s | labml-nn, tokens/s | ratio |",
        "| --- | --- | --- | --- | --- |",
    ]
    for r in results:
        low, _, high = r["ratio quartiles"]
        lines.append(
            f"| {r['case']} | {r['model']} | {r['tokens/s']['ours']:,.0f} | "
            f"{r['tokens/s']['labml-nn']:,.0f} | {r['ratio']:.2f} ({low:.2f} – {high:.2f}) |"
        )
    lines += ["", "| case | D | H | FFN | layers | S | M | C, c | B |", "| --- " * 9 + "|"]
    for c in CASES:
        m = c.config
        lines.append(
            f"| {c.name} | {m.d_model} | {m.heads} | {m.d_ff} | {m.n_layers} | {m.segment_len} | "
            f"{m.mem_len} | {m.c_mem_len}, {m.compression_rate} | {c.batch_size} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure every case with both models, and write the results."""
    facts = {
        "environment": describe_environment(torch.device("cpu")),
        "matrix multiply, GFLOP/s": matrix_multiply_rate() / 1e9,
    }
    results = []
    for one in CASES:
        for model in ("transformer-xl", "compressive"):
            config = replace(one.config, model=model)
            results.append(measure(replace(one, config=config)))
            print(json.dumps(results[-1]))
    write_json(HERE / "results.json", {"facts": facts, "results": results})
    write_text(HERE / "RESULTS.md", report(results, facts))
    print(report(results, facts))


if __name__ == "__main__":
    main()
