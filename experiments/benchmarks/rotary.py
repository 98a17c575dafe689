"""Seconds of whole training steps of a Transformer-XL, with all position features and with few, and of
x-transformers with rotary positions and flash attention: of one thread, by CPU time and by wall time.

The models differ, so no numbers can be compared. What is checked is that x-transformers' queries read the
whole memory, as ours do, and nothing later than themselves.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from experiments.benchmarks.measuring import Result, in_turns, one_thread
from experiments.benchmarks.training import VOCABULARY, Case, Trainer, fill_memories
from memformers import MemoryLM, ModelConfig

PEER = "x-transformers"
NAMES = ("compare", "mid", "base", "long")
"""Of the sizes of training."""
P = 16
"""Few position features."""
OURS = "ours, P = D"
OURS_FLASH = f"ours, P = {P}, flash"
ROUNDS = 15


class RotaryLM(nn.Module):
    """x-transformers' model with the interface of ours."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        from x_transformers import Decoder, TransformerWrapper

        assert isinstance(config.mem_len, int)
        D = config.d_model
        layers = Decoder(
            dim=D,
            depth=config.n_layers,
            heads=config.n_heads,
            attn_dim_head=D // config.n_heads,
            ff_mult=config.d_ff // D,
            rotary_pos_emb=True,
            attn_flash=True,
        )
        self.model: Any = TransformerWrapper(
            num_tokens=config.n_tokens,
            max_seq_len=config.segment_len,
            max_mem_len=config.mem_len,
            attn_layers=layers,
        )

    def forward(self, tokens: Tensor, memory: Any) -> tuple[Tensor, Any, Tensor]:
        logits, memory = self.model(tokens.T, mems=memory, return_mems=True)
        return logits.transpose(0, 1), memory, torch.zeros(())


def check_keys(model: RotaryLM, tokens: Tensor, memory: list[Tensor], mem_len: int) -> None:
    """That queries read all ``mem_len`` positions of a full ``memory``, ``[B, M, D]`` of each layer, and no
    later token; ValueError otherwise."""
    lengths = {layer.shape[1] for layer in memory}
    if lengths != {mem_len}:
        raise ValueError(f"{PEER} remembers {lengths} positions in place of {mem_len}.")

    # One change at each end of what queries see.
    changed_tokens = tokens.clone()
    changed_tokens[-1] = (tokens[-1] + 1) % VOCABULARY
    changed_memory = [layer.clone() for layer in memory]
    for layer in changed_memory:
        layer[:, 0] += 1  # the oldest position
    with torch.no_grad():
        logits, _, _ = model(tokens, memory)
        after_change_of_last, _, _ = model(changed_tokens, memory)
        after_change_of_oldest, _, _ = model(tokens, changed_memory)
    # The last token may change its own logits alone; the oldest position must change them.
    if not torch.allclose(after_change_of_last[:-1], logits[:-1], atol=1e-5):
        raise ValueError(f"{PEER} reads the future.")
    if torch.equal(after_change_of_oldest[-1], logits[-1]):
        raise ValueError(f"{PEER} does not read its oldest position.")


def build_sides(case: Case) -> dict[str, Trainer]:
    """The models with full memories."""
    batches = case.batches()
    few = replace(case.config, position_features=P, kernel="flash")
    sides = {
        OURS: Trainer(MemoryLM(case.config), batches),
        OURS_FLASH: Trainer(MemoryLM(few), batches),
        PEER: Trainer(RotaryLM(case.config), batches),
    }
    fill_memories(case, sides)
    return sides


def measure(case: Case, *, quick: bool = False) -> Result:
    torch.manual_seed(0)
    sides = build_sides(case)
    peer = sides[PEER]
    assert isinstance(peer.model, RotaryLM)
    check_keys(peer.model, peer.batches[0], peer.memory, case.config.remembered_positions)

    cpu_seconds: dict[str, list[float]] = {side: [] for side in sides}
    steps = {side: with_cpu_time(trainer.step, cpu_seconds[side]) for side, trainer in sides.items()}
    in_turns(steps, 1 if quick else 2)
    for values in cpu_seconds.values():  # those steps only warmed up
        values.clear()
    seconds = in_turns(steps, 2 if quick else ROUNDS, f"{case.name}, beside {PEER}")
    n_parameters = {}
    for side, trainer in sides.items():
        n_parameters[side] = sum(parameter.numel() for parameter in trainer.model.parameters())
    return {
        "case": case.name,
        "parameters": n_parameters,
        "seconds": seconds,
        "CPU seconds": cpu_seconds,
    }


def with_cpu_time(step: Callable[[], object], cpu_seconds: list[float]) -> Callable[[], None]:
    """The ``step``, which also appends the CPU time that it took."""

    def timed_step() -> None:
        start = time.process_time()
        step()
        cpu_seconds.append(time.process_time() - start)

    return timed_step


def measure_all(*, quick: bool) -> list[Result]:
    """Nothing if x-transformers is not installed."""
    if not find_spec("x_transformers"):
        print(f"{PEER} is not installed, so nothing is measured beside it: pip install {PEER}")
        return []
    results = []
    with one_thread():
        for name in NAMES[:1] if quick else NAMES:
            case = Case.of(name, "transformer-xl")
            case = replace(case, config=replace(case.config, positions="sinusoidal"))
            results.append(measure(case, quick=quick))
    return results


def installed_version() -> dict[str, str]:
    """The version by the package's name, as an environment has it; empty if it is not installed."""
    return {PEER: version(PEER)} if find_spec("x_transformers") else {}
