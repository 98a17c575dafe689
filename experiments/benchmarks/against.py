"""Compare this checkout with another one, or two settings: the seconds of a step in training, of an agent and
in decoding, in turns, and whether both compute the same numbers, bit by bit.

    git worktree add --detach ../before a37ff72
    python -m experiments.benchmarks.against ../before
    python -m experiments.benchmarks.against . --cases compare:transformer-xl --ours '{"token_shift": true}'
"""

import inspect
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import tyro

from experiments.benchmarks.decoding import CONFIG, CORE
from experiments.benchmarks.training import MODELS, SIZES, Case
from memformers import CoreConfig, ModelConfig
from memformers.common.command_line import cli_errors, parse_arguments

CASES = (*(f"{name}:{model}" for name in SIZES for model in MODELS), "agent:1", "agent:16")


@dataclass(frozen=True)
class Options:
    """What to compare."""

    checkout: Annotated[Path, tyro.conf.Positional]
    """The folder of the other checkout."""
    cases: tuple[str, ...] = (*CASES, *(f"decoding:{model}" for model in MODELS))
    """Training by size and model, an agent by its streams, decoding by model."""
    rounds: int = 5
    """How often the two take turns."""
    ours: str = "{}"
    """Settings of the model in this checkout, as JSON."""
    theirs: str = "{}"
    """Settings of the model in the other one."""


def worker() -> None:
    """Build the model of each line of standard input, or take its number of steps; print the seconds of a
    step and a checksum. It runs in the other checkout too, so it imports for itself."""
    import hashlib
    import time

    import torch
    import torch.nn.functional as F

    from memformers import CoreConfig, MemoryCore, MemoryLM, ModelConfig, Stepper

    for line in sys.stdin:
        request = json.loads(line)
        if "config" in request:
            torch.manual_seed(0)
            kind, B, number = request["kind"], request["B"], 0
            config: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in request["config"].items()}
            if kind == "agent":
                reader: Any = Stepper(MemoryCore(CoreConfig(**config)).eval(), B)
                features = torch.randn(B, config["d_input"])
            else:
                model, memory = MemoryLM(ModelConfig(**config)), None
                segments = torch.randint(config["vocab_size"], (4, model.config.segment_len, B))
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
                reader = Stepper(model, B)
                for _ in range(40 if kind == "decoding" else 0):  # fills the memory
                    reader.read(segments[0])
        began = time.perf_counter()
        for _ in range(request["steps"]):
            if kind == "agent":
                result = reader.step(features)
            elif kind == "decoding":
                result = reader.read(segments[0, :1])
            else:
                tokens = segments[number % 4]
                logits, memory, auxiliary_loss = model(tokens, memory)
                optimizer.zero_grad()
                (F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) + auxiliary_loss).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                number += 1
        seconds = (time.perf_counter() - began) / request["steps"]
        numbers = [result] if kind != "training" else model.parameters()
        checksum = hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in numbers)).hexdigest()
        print(json.dumps([seconds, checksum]), flush=True)


def start(checkout: Path) -> Any:
    source = f"import json, sys\n{inspect.getsource(worker)}\nworker()"
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", source], cwd=checkout, **pipes)


def ask(process: Any, **request: Any) -> tuple[float, str]:
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    seconds, checksum = json.loads(process.stdout.readline())
    return seconds, checksum


def case_of(name: str, what: str) -> tuple[str, ModelConfig | CoreConfig, int, int, int]:
    """The kind of a case, its model and streams, steps that fill its memory, and steps in a round."""
    if name == "agent":
        return name, CORE, int(what), 2 * CORE.segment_len * 4, 200
    if name == "decoding":
        M: Any = CONFIG.mem_len
        model: Any = {"mem_len": M // 2, "c_mem_len": M // 2} if what == "compressive" else {}
        return name, ModelConfig(**{**chosen(CONFIG), "model": what, **model}), 1, 8, 40
    case = Case.of(name, what)  # type: ignore[arg-type]
    full = -(-case.config.remembered_positions // case.config.segment_len)
    return "training", case.config, case.batch_size, 3 + full, case.steps


def chosen(config: ModelConfig | CoreConfig) -> dict[str, Any]:
    """The settings that differ from the defaults, which both checkouts know."""
    usual = asdict(type(config)(config.model))
    return {k: v for k, v in asdict(config).items() if k in ("model", "d_input") or v != usual[k]}


def main(options: Options) -> None:
    """Print a line for each case."""
    sides = start(Path(__file__).parents[2]), start(options.checkout)
    settings = [json.loads(text) for text in (options.ours, options.theirs)]
    for text in options.cases:
        kind, config, B, fill, steps = case_of(*text.split(":"))
        for side, of_side in zip(sides, settings, strict=True):
            ask(side, kind=kind, config=chosen(config) | of_side, B=B, steps=fill)
        rounds = [[ask(side, steps=steps) for side in sides] for _ in range(options.rounds)]
        ratios = sorted(ours[0] / theirs[0] for ours, theirs in rounds)
        equal = all(ours[1] == theirs[1] for ours, theirs in rounds)
        print(f"{text}: {1000 * median(ours[0] for ours, _ in rounds):.2f} ms a step, "
              f"{median(ratios):.3f} times the other's [{ratios[0]:.3f}, {ratios[-1]:.3f}]; "
              f"numbers {'equal' if equal else 'differ'}", flush=True)  # fmt: skip


if __name__ == "__main__":
    with cli_errors():
        main(parse_arguments(Options))
