"""The arms and the presets of the recall experiment."""

import os
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, replace_nested
from memformers.comparison.arms import SAME_FOR_ALL, Arm, keys_of_layers, read_arms, with_settings
from memformers.comparison.experiment import Experiment
from memformers.comparison.recall.task import RECALL, RecallRun, RecallSettings, layer_reach
from memformers.data.recall_stream import RecallStream
from memformers.models.config import Lengths, ModelConfig
from memformers.training.config import EvaluationConfig, OptimConfig, StepConfig

# Enough to see that everything works, in a minute or two.
QUICK_TOKENS = 65_536
QUICK_EVALUATED = 256
USUAL_JOBS: int = min(os.cpu_count() or 1, 2)
Reach = Literal["near", "far"]
STREAM_SETTINGS = (*(field.name for field in fields(RecallStream)), "reach", "evaluated", "measured_for")
SAME_IN_RECALL = SAME_FOR_ALL | dict.fromkeys(STREAM_SETTINGS, "don't set it")
"""Settings that can't differ between arms, which are asked the same questions."""


def network(mem_len: int, c_mem_len: int, compression_rate: int) -> ModelConfig:
    """The network of all arms, with the lengths of the Compressive Transformer's memories."""
    return ModelConfig(
        model="compressive",
        vocab_size=RecallStream().vocab_size,
        d_model=64,
        n_heads=4,
        n_layers=2,
        d_ff=256,
        segment_len=64,
        positions="sinusoidal",
        mem_len=mem_len,
        c_mem_len=c_mem_len,
        compression_rate=compression_rate,
    )


def recall_run(model: ModelConfig, recall: RecallSettings) -> RecallRun:
    """The training that all arms share; ``model`` reaches as far as any of them."""
    return RecallRun(
        model=model,
        max_tokens=3_000_000,
        batch_size=32,
        chunk_len=0,
        memory_warmup=0.0,  # the distances grow instead
        optim=OptimConfig(learning_rate=3e-3, muon_learning_rate=0.02),
        evaluation=EvaluationConfig(evaluations=8, log_every=20),
        step=StepConfig(precision="float32"),  # casts would take as much time as faster products save
        recall=replace(recall, reach=layer_reach(model)),
    )


def compressive(name: str, base: RecallRun, label: str = "", **settings: Any) -> Arm:
    """An arm that is ``base`` with other ``settings``, and a label with its lengths."""
    model = base.model
    lengths = f"M = {model.mem_len}, C = {model.c_mem_len}, c = {model.compression_rate}"
    label = ", ".join(filter(None, ("Compressive", label, lengths)))
    return Arm(name, with_settings(base, model="compressive", **settings), label)


def transformer_xl(name: str, base: RecallRun, mem_len: Lengths, label: str = "") -> Arm:
    label = ", ".join(filter(None, ("Transformer-XL", label, f"M = {mem_len}")))
    return Arm(name, with_settings(base, model="transformer-xl", mem_len=mem_len), label)


def paper_ablation(base: RecallRun) -> list[Arm]:
    """The arms that the paper compares (Rae et al. 2020, section 3.2); f_c that learns from both losses; and
    slots only in the upper half of the layers (Rae and Razavi 2020, arXiv 2007.03356)."""
    n_lower = base.model.n_layers // 2
    slots = base.model.per_layer("c_mem_len")
    upper = (*[0] * n_lower, *slots[n_lower:])
    # The task's loss alone trains f_c in the first one, and both losses in the third.
    return [
        compressive("bptt", base, "conv. by BPTT", compression_loss="none", bptt=1),
        compressive("max", base, "max pooling", compression="max"),
        compressive("both-losses", base, "f_c learns from both losses", compression_start="mean", bptt=1),
        compressive("dilated", base, "dilated conv.", compression="dilated"),
        compressive("conv", base, "conv. from random weights"),
        compressive("upper-half", base, "conv., slots in the upper layers", c_mem_len=upper),
    ]


@dataclass(frozen=True)
class RecallSetup:
    """What all arms of an experiment share, and the arms."""

    base: RecallRun
    """With the lengths of the Compressive Transformer's memories."""
    ceiling: bool = False
    """Whether there is a Transformer-XL that sees as far back as the slots."""

    @property
    def arms(self) -> list[Arm]:
        """The arms that are trained if none is named: memories with equal keys, and controls."""
        base = self.base
        # Equal keys are M of Transformer-XL, and M + C of the others.
        arms = [
            Arm("no-memory", with_settings(base, model="transformer"), "No memory"),
            transformer_xl("transformer-xl", base, keys_of_layers(base.model)),
            compressive("compressive", base, compression_start="mean"),
            compressive("frozen", base, "f_c as drawn", frozen=True),
            compressive("mean", base, "mean pooling", compression="mean"),
        ]
        if self.ceiling:
            arms.append(transformer_xl("ceiling", base, base.model.remembered_positions, "ceiling"))
        return arms

    def arm(self, name: str) -> Arm:
        """The arm of this ``name``, which may be one of the paper's ablation; else UserError."""
        arms = {arm.name: arm for arm in (*self.arms, *paper_ablation(self.base))}
        if name not in arms:
            raise UserError(f"arm {name!r} is unknown; this reach has {', '.join(arms)}.")
        return arms[name]

    def run(self, name: str, seed: int = 0) -> RecallRun:
        """The training of the arm of this ``name``."""
        config = self.arm(name).config
        assert isinstance(config, RecallRun)
        return replace(config, seed=seed)


SETTINGS: dict[Reach, RecallSetup] = {
    "near": RecallSetup(recall_run(network(64, 64, 4), RecallSettings()), ceiling=True),
    "far": RecallSetup(
        recall_run(
            network(32, 224, 9),
            RecallSettings(
                stream=RecallStream(set_probability=16 / 600),
                growing=0.75,  # there are more octaves of distances
                evaluated=4096,
            ),
        )
    ),
}
"""The settings by how far slots reach: 320 or 2,048 tokens before the segment."""


@dataclass(frozen=True)
class RecallConfig(Checked):
    """A recall experiment."""

    reach: Reach = "near"
    """How many tokens before the segment the slots reach: 320 (near) or 2,048 (far)."""
    seeds: Count = 3
    """How many times each arm is trained, each time with different initial weights and another stream. Claims
    need at least 3."""
    quick: bool = False
    """Whether to only check in a minute or two that everything works, with one seed and few tokens."""
    tokens: Count | None = None
    """The number of tokens of each training run, instead of the default of --reach."""
    arms: tuple[str, ...] = ()
    """Which arms to train; if none is named, no-memory, transformer-xl, compressive, frozen, mean, and near
    the ceiling. Others are bptt, max, both-losses, dilated, conv and upper-half, or a name and settings, such
    as "c2: compression_rate=2"."""
    jobs: Count = USUAL_JOBS
    """The number of training runs at a time, each with --threads threads."""
    threads: Count = 1
    """The number of threads of each training run. Models of this size are hardly faster with two."""
    device: str = "auto"
    """Where to train, such as cpu or cuda:1; auto takes a GPU if there is one."""

    @property
    def setup(self) -> RecallSetup:
        """The preset of this reach, with the number of tokens and the device of this experiment."""
        preset = SETTINGS[self.reach]
        tokens = self.tokens or (QUICK_TOKENS if self.quick else preset.base.max_tokens)
        base = replace_nested(preset.base, max_tokens=tokens, device=self.device)
        if self.quick:
            base = replace_nested(base, evaluations=1, log_every=5, evaluated=QUICK_EVALUATED)
        return replace(preset, base=base)

    def experiment(self) -> Experiment:
        """The experiment; UserError for an arm that can't be trained."""
        setup = self.setup
        named = []
        described = []
        for text in self.arms:
            if ":" in text or Path(text).is_file():
                described.append(text)
            else:
                named.append(setup.arm(text))
        arms = [*named, *read_arms(described, setup.base, same_for_all=SAME_IN_RECALL)]
        return Experiment(
            RECALL,
            setup.base,
            tuple(arms if self.arms else setup.arms),
            seeds=1 if self.quick else self.seeds,
            jobs=self.jobs,
            threads=self.threads,
            scale=setup.base.max_tokens / SETTINGS[self.reach].base.max_tokens,
        )
