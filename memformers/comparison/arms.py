"""Arms as users describe them: a name, and the settings in which they differ from what all share."""

import contextlib
import difflib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from memformers.common.command_line import lengths
from memformers.common.errors import UserError
from memformers.models.config import SHARED_SETTINGS, Lengths, ModelConfig, applies_to
from memformers.models.registry import import_memory, lookup
from memformers.runs.folder import FIGURES, Arm, flatten
from memformers.training.config import TrainConfig

HOW = "write an arm as NAME: setting=value …, such as 'long: model=transformer-xl mem_len=320'"
OF_ALL = {
    "seed": "seed and seeds",
    "data": "data",
    "max_tokens": "max_tokens and scale",
    "step.parallel": "parallel",
}
"""Settings that can't differ between arms, and the options that set them for all arms."""
OF_THE_TASK = ("recall.stream.", "recall.reach", "recall.evaluated", "recall.measured_for")
"""Prefixes of other settings that can't differ between arms."""


def keys_of_layers(model: ModelConfig) -> Lengths:
    """The keys beside the segment that ``model`` has as a Compressive Transformer, in all layers or each."""
    if isinstance(model.mem_len, int) and isinstance(model.c_mem_len, int):
        return model.mem_len + model.c_mem_len
    return tuple(size.keys for size in replace(model, model="compressive").memory_sizes)


def read_arms(texts: Sequence[str], shared: Mapping[str, Any]) -> list[Arm]:
    """Each text is an arm, or the path of a file with one arm per line and comments after #. ``shared`` has
    all settings."""
    arms = []
    for text in texts:
        if ":" in text or not Path(text).is_file():
            arms.append(parse_arm(text, shared))
            continue
        try:
            lines = [line.partition("#")[0].strip() for line in Path(text).read_text("utf-8").splitlines()]
        except UnicodeDecodeError as error:
            raise UserError(f"arms: {text} is not UTF-8 text: {error}; {HOW}, one a line.") from None
        arms += [parse_arm(line, shared) for line in lines if line]
    return arms


def parse_arm(text: str, shared: Mapping[str, Any]) -> Arm:
    """The arm ``NAME: setting=value …`` with short or dotted names, and JSON or words as values."""
    name, colon, rest = text.partition(":")
    name = name.strip()
    if not colon:
        raise UserError(f"arms: {text!r} has no colon and is not a file; {HOW}.")
    if not re.fullmatch(r"\w[\w+-]{,49}", name) or re.search(r"-seed\d+$", name) or name.lower() == FIGURES:
        raise UserError(
            f"arm {name!r} can't have this name, since its folder has it too; use up to 50 letters, digits, "
            f"-, + and _, and neither {FIGURES!r} nor an ending such as '-seed1'."
        )
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise UserError(f"arm {name!r}: {rest.strip()!r} can't be read: {error}; {HOW}.") from None
    settings: dict[str, str] = {}
    for key, equals, value in (word.partition("=") for word in words):
        if not equals:
            raise UserError(f"arm {name!r}: {key!r} is not setting=value; {HOW}.")
        last = key.replace("-", "_").rpartition(".")[2]
        settings[key.replace("-", "_")] = import_memory(value) if last == "model" else value
    known, model = dict(flatten(shared)), settings.get("model", settings.get("model.model", ""))
    if ":" in model:
        known |= {
            f"model.memory_config.{key}": value for key, value in asdict(lookup(model).Config()).items()
        }
    dotted = {full_name(key, known, name): value for key, value in settings.items()}
    return Arm(name, {key: value_of(value, known[key]) for key, value in dotted.items()})


def full_name(key: str, known: Mapping[str, Any], arm: str) -> str:
    full = next((name for name in known if name == key or name.endswith(f".{key}")), None)
    if full is None:
        near = difflib.get_close_matches(key, [name.rpartition(".")[2] for name in known], 1)
        hint = f"did you mean {near[0]!r}?" if near else "memformers compare --help lists them."
        raise UserError(f"arm {arm!r}: unknown setting {key!r}; {hint}")
    if full in OF_ALL or full.startswith(OF_THE_TASK):
        instead = f"set it with {OF_ALL[full]}" if full in OF_ALL else "don't set it"
        raise UserError(f"arm {arm!r}: {key} is the same for all arms; {instead}.")
    return full


def value_of(word: str, before: Any) -> Any:
    value: Any = word
    with contextlib.suppress(ValueError):
        value = json.loads(word.lower())  # True and None too
    with contextlib.suppress(ValueError):
        value = lengths(word.split()) if "," in word else value
    if isinstance(before, float) and type(value) is int:
        return float(value)
    if type(before) is int and isinstance(value, float) and value.is_integer():
        return int(value)  # 1e6
    return value


def settings_of(arm: Arm, shared: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ``arm``, with those in ``shared`` that it doesn't name and that its model uses."""
    settings = deepcopy(dict(shared))
    model = arm.settings.get("model.model", settings["model"]["model"])
    for place, config in ((settings, TrainConfig), (settings["model"], ModelConfig)):
        for field in fields(config):
            if not applies_to(field.name, model) and field.name not in SHARED_SETTINGS:
                place[field.name] = field.default
    if model != settings["model"]["model"]:
        settings["model"]["memory_config"] = asdict(lookup(model).Config())
    for name, value in arm.settings.items():
        *path, last = name.split(".")
        place = settings
        for part in path:
            place = place[part]
        place[last] = value
    return settings


def check_arms(
    arms: Sequence[Arm], shared: Mapping[str, Any], parse: Callable[[dict[str, Any], str], Any]
) -> None:
    """Raise UserError for no arm, one that ``parse`` refuses, and two with the same name or settings."""
    if not arms:
        raise UserError("a comparison needs an arm; name a model with models, or describe one with arms.")
    names: set[str] = set()
    seen: dict[Any, str] = {}
    for arm in arms:
        if arm.name.lower() in names:  # some file systems don't tell them apart
            raise UserError(f"models and arms need different names; {arm.name!r} is there twice.")
        names.add(arm.name.lower())
        try:
            run = parse(settings_of(arm, shared), "its settings")
        except UserError as error:
            raise UserError(f"arm {arm.name!r}: {error}") from None
        if (other := seen.setdefault(run, arm.name)) != arm.name:
            raise UserError(f"arms {other!r} and {arm.name!r} have the same settings; drop one of them.")
