"""Compare this checkout with another one, or two settings: the seconds of a step in training, of an agent, in
decoding and of an evaluation, in turns, and whether both compute the same numbers, bit by bit.

    git worktree add --detach ../before a37ff72
    python -m experiments.benchmarks.against ../before
    python -m experiments.benchmarks.against . --cases compare:transformer-xl --ours '{"token_shift": true}'
"""

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import tyro

from experiments.benchmarks.checkouts import HERE
from experiments.benchmarks.decoding import CONFIG, CORE
from experiments.benchmarks.training import MODELS, SIZES, Case
from memformers import CoreConfig, ModelConfig
from memformers.common.command_line import cli_errors, parse_arguments

WORKER = Path(__file__).with_name("against_worker.py")
TRAINING_CASES = [f"{size}:{model}" for size in SIZES for model in MODELS]
AGENT_CASES = ["agent:1", "agent:16"]
DECODING_CASES = [f"decoding:{model}" for model in MODELS]
EVALUATION_CASES = [f"evaluation:{model}" for model in MODELS]


@dataclass(frozen=True)
class Options:
    """What to compare."""

    checkout: Annotated[Path, tyro.conf.Positional]
    """The folder of the other checkout."""
    cases: tuple[str, ...] = (*TRAINING_CASES, *AGENT_CASES, *DECODING_CASES, *EVALUATION_CASES)
    """Training by size and model, an agent by its streams, decoding and evaluation by model."""
    rounds: int = 5
    """How often the two take turns."""
    ours: str = "{}"
    """Settings of the model in this checkout, as JSON."""
    theirs: str = "{}"
    """Settings of the model in the other one."""


class Measured(NamedTuple):
    seconds: float
    """Seconds of a step."""
    checksum: str
    """A checksum of what was computed."""


class Side:
    """A checkout with ``settings`` of the model, in which a process builds models and takes steps."""

    def __init__(self, checkout: Path, settings: dict[str, Any]):
        self.settings = settings
        # As a command, not as a file, so that the checkout is where the process imports from.
        command = [sys.executable, "-c", WORKER.read_text(encoding="utf-8")]
        self.process: Any = subprocess.Popen(
            command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def build(self, case: "ComparedCase") -> None:
        """Build the model of a ``case``, and fill its memory."""
        config = changed_settings(case.config) | self.settings
        self.ask(kind=case.kind, config=config, n_streams=case.n_streams, steps=case.filling_steps)

    def take_steps(self, n_steps: int) -> Measured:
        return self.ask(steps=n_steps)

    def ask(self, **request: Any) -> Measured:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return Measured(*json.loads(self.process.stdout.readline()))


class ComparedCase(NamedTuple):
    kind: str
    config: ModelConfig | CoreConfig
    n_streams: int
    filling_steps: int
    """Steps until the memory is full."""
    steps: int
    """Steps in a round."""


def read_case(text: str) -> ComparedCase:
    """The case of an option, such as ``agent:16``, ``decoding:compressive`` or ``mid:transformer-xl``."""
    name, variant = text.split(":")
    if name == "agent":
        return ComparedCase(name, CORE, int(variant), filling_steps=8 * CORE.segment_len, steps=200)
    if name == "decoding":
        settings = {**changed_settings(CONFIG), "model": variant}
        if variant == "compressive":
            assert isinstance(CONFIG.mem_len, int)
            half = CONFIG.mem_len // 2
            settings |= {"mem_len": half, "c_mem_len": half}
        return ComparedCase(name, ModelConfig(**settings), n_streams=1, filling_steps=8, steps=40)
    if name == "evaluation":
        case = Case.of("compare", variant)  # type: ignore[arg-type]
        return ComparedCase(name, case.config, case.batch_size, filling_steps=1, steps=1)
    case = Case.of(name, variant)  # type: ignore[arg-type]
    n_segments = -(-case.config.remembered_positions // case.config.segment_len)
    return ComparedCase("training", case.config, case.batch_size, 3 + n_segments, case.steps)


def changed_settings(config: ModelConfig | CoreConfig) -> dict[str, Any]:
    """The settings that differ from the defaults, which both checkouts know."""
    defaults = asdict(type(config)(config.model))
    changed = {}
    for name, value in asdict(config).items():
        if name in ("model", "d_input") or value != defaults[name]:
            changed[name] = value
    return changed


def compare(case: ComparedCase, ours: Side, theirs: Side, rounds: int) -> str:
    """The seconds of our steps, beside those of the other side, and whether the numbers are equal."""
    for side in (ours, theirs):
        side.build(case)
    our_seconds = []
    ratios = []
    is_equal = True
    # In turns, so that both sides meet the same other work on the machine.
    for _ in range(rounds):
        our_steps = ours.take_steps(case.steps)
        their_steps = theirs.take_steps(case.steps)
        our_seconds.append(our_steps.seconds)
        ratios.append(our_steps.seconds / their_steps.seconds)
        is_equal &= our_steps.checksum == their_steps.checksum
    return (
        f"{1000 * median(our_seconds):.2f} ms a step, {median(ratios):.3f} times the other's "
        f"[{min(ratios):.3f}, {max(ratios):.3f}]; numbers {'equal' if is_equal else 'differ'}"
    )


def main(options: Options) -> None:
    """Print a line for each case."""
    ours = Side(HERE, json.loads(options.ours))
    theirs = Side(options.checkout, json.loads(options.theirs))
    for text in options.cases:
        print(f"{text}: {compare(read_case(text), ours, theirs, options.rounds)}", flush=True)


if __name__ == "__main__":
    with cli_errors():
        main(parse_arguments(Options))
