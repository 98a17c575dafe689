"""How many keys the memories of arms hold, and whether those that should hold the same number do."""

from collections.abc import Mapping
from typing import Any

from memformers.report.data import Prose, prose
from memformers.report.numbers import number

Facts = Mapping[str, Any]
"""What ``run.json`` says of a run."""


def keys_text(facts: Facts) -> str:
    """The keys of a layer's memory, such as "252, at most 256" if their number differs between segments."""
    upper_bound = number(facts["keys"], ",.10g")
    mean = number(mean_keys(facts), ",.10g")
    return mean if mean == upper_bound else f"{mean}, at most {upper_bound}"


def mean_keys(facts: Facts) -> float:
    """The keys of a layer's memory, on average over segments; at most, for runs that don't say more."""
    keys: float = facts.get("mean_keys", facts["keys"])
    return keys


def unequal_keys(arms: Mapping[str, Facts]) -> list[Prose]:
    """A warning for each M + C that several ``arms``, by their labels, are configured with, if their memories
    don't hold the same number of keys."""
    by_setting: dict[float, dict[str, str]] = {}
    for label, facts in arms.items():
        if configured := facts.get("configured_keys"):
            by_setting.setdefault(configured, {})[label] = keys_text(facts)
    warnings = []
    for configured, texts in by_setting.items():
        if len(set(texts.values())) > 1:
            shown = number(configured, ",.10g")
            warnings.append(prose("unequal_keys", configured=shown, keys=texts))
    return warnings
