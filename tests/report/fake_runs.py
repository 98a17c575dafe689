"""Folders of runs that were never trained, and of comparisons of them."""

import json
from dataclasses import asdict

from memformers.common.files import read_json, write_json
from memformers.report.document import write_report
from memformers.runs.card import RunCard
from memformers.runs.folder import CARD
from memformers.runs.plan import Plan, PlannedArm, runs_of
from memformers.training.config import describe_settings
from tests.builders import COMPARED, small_training

# The bits per character of three seeds of Transformer-XL.
XL = [2.40, 2.50, 2.45]
FACTS = {
    "corpus": {
        "name": "Tiny Shakespeare", "source": "input.txt", "characters": 1115394, "sha256": "86c4",
        "stands_in_for_tiny_shakespeare": False,
    },
    "parameters": 12345, "memory": {"one_layer": 64, "all_layers": 256}, "keys": 64, "state_bytes": 32_768,
    "attention_operations": 1_234_567,
    "environment": {
        "python": "3.11", "platform": "Linux", "packages": {"torch": "2.13.0"}, "device": "a CPU",
        "cores": 2, "threads": 2,
    },
}  # fmt: skip


def fake_run(folder, model, bits, *, finished=True, facts=FACTS, read=9_000, **changes):
    """A run of ``model`` that came to ``bits`` per character, and whose evaluations ``read`` this number of
    tokens, of 9,000."""
    folder.mkdir(parents=True)
    training = small_training(model=model, **changes)
    write_json(folder / "config.json", asdict(training))
    write_json(folder / "run.json", describe_settings(training) | facts)
    write_json(folder / CARD, RunCard("", run=model))
    with open(folder / "metrics.jsonl", "w") as file:
        for i in range(1, 11):
            train = {"loss.train": 3.0 / i, "bits_per_character.train": 4.0 / i}
            train |= {"tokens_per_second": 1000.0 + i}
            train |= {"reconstruction_loss.train": 0.1 / i} if model == "compressive" else {}
            valid = {"loss.valid": 0.7 * bits, "bits_per_character.valid": bits + 1 / i}
            valid |= {"evaluated_tokens": read, "evaluation_seconds": i}
            for record in (train, valid):
                file.write(json.dumps({"tokens": 100 * i, "seconds": i, **record}) + "\n")
    if finished:
        result = {
            "step": 10, "tokens": 1000, "seconds": 10.0, "loss": 0.7 * bits, "accuracy": 0.5,
            "bits_per_character": bits, "bits_per_byte": bits / 2, "word_perplexity": 99.0,
            "reconstruction_loss": None, "peak_memory_bytes": 300 * 2**20, "prompt": "BANQUO:\n",
            "loss_by_position": [0.7 * bits + 1 / i for i in range(1, 17)],
            "evaluated_tokens": 9_000, "held_out_tokens": 9_000, "evaluation_seconds": 12.3,
        }  # fmt: skip
        write_json(folder / "result.json", result)
        (folder / "sample.txt").write_text(f"A sample of {model} with ``` and <b>tags</b>\n")


def fake_comparison(folder, bits, seeds=None, keys=None):
    """A comparison whose runs came to ``bits`` per character: those of an arm's seeds, in order, by the arm's
    name; None for a run that isn't there. ``keys``: the number of keys of each arm."""
    seeds = seeds or max(map(len, bits.values()))
    plan = Plan("text", {}, tuple(PlannedArm(arm, {}) for arm in bits), runs_of(list(bits), range(seeds)))
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "experiment.json", asdict(plan))
    for name, run in plan.runs.items():
        if run.seed < len(bits[run.arm]) and (value := bits[run.arm][run.seed]) is not None:
            model = run.arm if run.arm in COMPARED else "transformer-xl"
            facts = FACTS | ({"keys": keys[run.arm]} if keys else {})
            fake_run(folder / name, model, value, seed=run.seed, facts=facts)


def markdown_of(folder):
    """The report of ``folder``, written again."""
    return write_report(folder).page.with_suffix(".md").read_text(encoding="utf-8")


def changed(path, **changes):
    """Change these fields of a JSON file."""
    write_json(path, read_json(path) | changes)


def less(*differences):
    """Those of three seeds that differ from Transformer-XL's by these."""
    return [round(a + b, 4) for a, b in zip(XL, differences, strict=True)]
