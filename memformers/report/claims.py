"""What runs show and what they don't: warnings, what the seeds support, and the verdict on a single model."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from memformers.common.command_line import OF_A_FOLDER, without_options
from memformers.common.intervals import MIN_FOR_A_CLAIM
from memformers.report.arms import ArmRuns, Measure, Quantity, most_seeds
from memformers.report.data import Block, Bullets, Code, Paragraphs, Prose, Text, prose
from memformers.report.keys import unequal_keys
from memformers.report.numbers import number
from memformers.runs.folder import CONFIG, FACTS, METRICS, flatten
from memformers.runs.metrics import SECONDS, TOKENS
from memformers.runs.plan import Plan, read_plan
from memformers.runs.reader import Run, differing_settings, finite_number

MEMORY_SETTINGS = {
    "seed", "data", "recall.frozen", "model.model", "model.mem_len", "model.c_mem_len",
    "model.compression_rate", "model.compression", "model.compression_start", "model.compression_loss",
    "model.bptt",
}  # fmt: skip
"""The settings that an experiment may vary: the memory and the seed, and the path of the text, which its
checksum identifies. The plan of another task adds its own."""
TRIAL_OPTIONS = {"text": ("--scale",), "recall": ("--quick", "--tokens")}
"""The options that make an experiment on each task a trial."""
SEEDS_TO_TRAIN = 5
"""How many seeds a report advises: with five, an interval is half as wide as with three."""


def all_runs(arms: Sequence[ArmRuns]) -> list[Run]:
    return [run for arm in arms for run in arm.runs]


# Warnings


def warnings(arms: Sequence[ArmRuns], base: ArmRuns, folder: Path) -> list[Text]:
    """What a reader must know before trusting the numbers."""
    runs = all_runs(arms)
    corpus = runs[0].facts["corpus"]
    notes: list[Text] = []
    # The text
    if corpus.get("stands_in_for_tiny_shakespeare"):
        notes.append(prose("stand_in"))
    if corpus.get("tokenizer") == "ids":
        notes.append(prose("token_ids"))
    if any(run.facts["corpus"].get("loses_text") for run in runs):
        notes.append(prose("loses_text"))
    # The training
    notes += trial(folder)
    for arm in arms:
        for run in arm.runs:
            if run.result is None:
                seed = run.seed if len(arm.runs) > 1 else None
                has_others = bool(arm.results)
                notes.append(prose("not_finished", label=arm.label, seed=seed, has_others=has_others))
    for reason, names in missing(folder).items():
        notes.append(prose("missing", names=names, reason=reason))
    # What is compared
    if unfair := unfair_settings(arms, base):
        notes.append(prose("differing", names=unfair))
    return [*notes, *unequal_keys({arm.label: arm.first.facts for arm in arms})]


def trial(folder: Path) -> list[Prose]:
    """The warning that the experiment in ``folder`` is a trial with a part of the usual number of tokens."""
    plan = read_plan(folder)
    if plan is None or plan.scale >= 1:
        return []
    return [prose("trial", percent=f"{100 * plan.scale:.2g} %")]


def missing(folder: Path) -> dict[str, list[str]]:
    """The names of planned runs without results, by the reason."""
    plan = read_plan(folder)
    planned = plan.runs if plan else {}
    runs = [folder / name for name in planned]
    runs += [path.parent for path in folder.glob(f"*/{CONFIG}")]
    by_reason: dict[str, list[str]] = {}
    for run in dict.fromkeys(runs):
        if (run / FACTS).exists():
            continue
        if (run / METRICS).exists():
            reason = f"{FACTS} is lost"
        elif (run / CONFIG).exists():
            reason = "no step was made"
        else:
            reason = "not started"
        by_reason.setdefault(reason, []).append(run.name)
    return by_reason


def unfair_settings(arms: Sequence[ArmRuns], base: ArmRuns) -> list[str]:
    """The settings besides the memory in which the arms differ; seeds if an arm shares none with ``base``."""
    settings = []
    checksums = set()
    for run in all_runs(arms):
        settings.append(dict(flatten(run.config)))
        checksums.add(run.facts["corpus"].get("sha256"))
    of_memory = MEMORY_SETTINGS | {*base.first.task_info.memory_settings}
    unfair = []
    for name in differing_settings(settings):
        if name not in of_memory and ".memory_config." not in name:
            unfair.append(name)
    # The text, by its checksum
    if len(checksums) > 1:
        unfair.append("text")
    # Seeds, of which arms may have different numbers
    base_seeds = seeds_of(base)
    if any(base_seeds.isdisjoint(seeds_of(arm)) for arm in arms):
        unfair.append("seed")
    return unfair


def seeds_of(arm: ArmRuns) -> set[int]:
    return {run.seed for run in arm.runs}


# Claims


def claims(arms: Sequence[ArmRuns], base: ArmRuns, measure: Measure, folder: Path) -> list[Block]:
    """What the seeds support about each arm against ``base``; of fewer than three, how to train more. Of one
    arm, its verdict."""
    compared = [arm for arm in arms if arm is not base]
    if not compared:
        return verdict(base, measure)
    if not base.results:
        return [prose("no_base", base=base.label)]
    differences = {arm.label: arm.minus(base, measure.of) for arm in compared}
    n_seeds = most_seeds(differences.values())
    if n_seeds < MIN_FOR_A_CLAIM:
        return few_seeds(arms, n_seeds, measure, folder)
    shared = {"base": base.label, "measure": measure, "least": MIN_FOR_A_CLAIM}
    level = base.mean(measure.of)
    claimed = []
    for label, difference in differences.items():
        claimed.append(prose("claim", label=label, difference=difference, level=level, **shared))
    method = prose(
        "how_compared",
        n=n_seeds,
        own_streams="recall" in base.first.config,
        many=len(compared) > 2,
        **shared,
    )
    return [Bullets(claimed), method]


def few_seeds(arms: Sequence[ArmRuns], n_seeds: int, measure: Measure, folder: Path) -> list[Block]:
    """That nothing is claimed from ``n_seeds`` common seeds, and the command for more, or for more than a
    trial."""
    # The two best, whose order may be chance
    means = {}
    for arm in arms:
        if mean := arm.mean(measure.of):
            means[arm.label] = mean.mean
    best = sorted(means, key=lambda label: -measure.better * means[label])[:2]
    gap = abs(means[best[0]] - means[best[-1]]) if best else 0.0
    nothing = prose("few_seeds", n=n_seeds, best=best, gap=gap, measure=measure)
    # How to train more
    plan = read_plan(folder)
    command = command_for_more(plan, folder) if plan else ""
    if plan is None or not command:
        return [nothing]
    return [nothing, prose("more_training", is_trial=plan.scale < 1), Code(command)]


def command_for_more(plan: Plan, folder: Path) -> str:
    """The command that trained the plan in ``folder``, for more seeds or without the options of a trial;
    empty if it isn't one of ours."""
    words = shlex.split(plan.commands[0]) if plan.commands else []
    module = words[2] if words[:2] == ["python", "-m"] else "".join(words[:1])
    if module.partition(".")[0] not in ("memformers", "experiments"):
        return ""
    if plan.scale < 1:
        command = without_options(words, (*OF_A_FOLDER, *TRIAL_OPTIONS.get(plan.task, ())))
        return shlex.join([*command, "--out", f"{folder}-whole"])
    command = without_options(words, (*OF_A_FOLDER, "--seeds"))
    return shlex.join([*command, "--seeds", f"{SEEDS_TO_TRAIN}", "--resume", "--out", f"{folder}"])


# A single model


def verdict(arm: ArmRuns, measure: Measure) -> list[Block]:
    """How good one model became, and whether it still improved at the end; nothing before its end."""
    mean = arm.mean(measure.of)
    if mean is None:
        return []
    reached = prose(
        "reached",
        value=measure.shown(mean),
        measure=measure,
        n_seeds=mean.n,
        tokens=number(arm.mean(finite(TOKENS)), ",.0f"),
        seconds=number(arm.mean(finite(SECONDS)), ",.0f", " s"),
    )
    return [Paragraphs([reached, *improvement(arm, measure)])]


def finite(name: str) -> Quantity:
    """A number of a result; none for anything else that its file may contain."""
    return lambda result: finite_number(result.get(name))


def improvement(arm: ArmRuns, measure: Measure) -> list[Text]:
    """Where the held-out loss of a training was lowest, if it was evaluated often enough to see that."""
    curve = arm.curve(f"{measure.of}.valid")
    if len(curve) < MIN_FOR_A_CLAIM:
        return []
    losses = [mean.mean for _, mean in curve]
    best = losses.index(min(losses))
    if best == len(losses) - 1:
        return [prose("still_improving")]
    gap = measure.shown_difference(losses[-1] - losses[best], signed=False)
    return [prose("best_earlier", tokens=f"{curve[best][0]:,.0f}", gap=gap, measure=measure)]


def memory_verdict(arm: ArmRuns, findings: Sequence[Text], folder: Path) -> list[Block]:
    """What a probe found about the memory of one model, or how to measure it."""
    if findings:
        return [Bullets(findings)]
    if not arm.results or not arm.first.facts["keys"]:
        return []
    return [prose("not_measured"), Code(shlex.join(["memformers", "probe", f"{folder}"]))]
