"""An arm of an experiment: a name, and the complete settings of its trainings."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from memformers.common.command_line import parse_settings
from memformers.common.errors import UserError
from memformers.common.fields import replace_nested
from memformers.models.config import SHARED_SETTINGS, Lengths, ModelConfig, applies_to
from memformers.models.registry import import_memory, lookup
from memformers.report.arms import label_of
from memformers.runs.folder import FIGURES, flatten
from memformers.training.config import TrainConfig

Config = TypeVar("Config", bound=TrainConfig)

HOW_TO_WRITE = "write an arm as NAME: setting=value …, such as 'long: model=transformer-xl mem_len=320'"
SAME_FOR_ALL = {
    "seed": "set it with seed and seeds",
    "data": "set it with data",
    "max_tokens": "set it with max_tokens and scale",
    "parallel": "set it with parallel",
}
"""Settings that can't differ between arms, and what sets them for all."""


@dataclass(frozen=True)
class Arm:
    """A name, and the settings of its trainings: complete and checked, with the first seed."""

    name: str
    config: TrainConfig
    label: str = ""
    """The name in tables and figures; empty: the same."""


def with_settings(base: Config, **settings: Any) -> Config:
    """``base`` with other values of these ``settings``: fields of it, of its groups, or of its memory.
    Another ``model`` has its own settings of a memory, and defaults for those that it doesn't use."""
    network = base.model
    name = settings.pop("model", network.model)
    network_names = {field.name for field in fields(ModelConfig)}
    network_changes: dict[str, Any] = {}
    training_changes: dict[str, Any] = {}

    # What another model brings along
    if name != network.model:
        name = import_memory(name)
        network_changes = {"model": name, "memory_config": lookup(name).Config()}
        for field in (*fields(ModelConfig), *fields(TrainConfig)):
            if not applies_to(field.name, name) and field.name not in SHARED_SETTINGS:
                changes = network_changes if field.name in network_names else training_changes
                changes[field.name] = field.default

    # The settings of its memory
    memory_config = network_changes.get("memory_config", network.memory_config)
    memory_names = {field.name for field in fields(memory_config)}
    memory_changes = {setting: settings.pop(setting) for setting in memory_names & settings.keys()}
    if memory_changes:
        network_changes["memory_config"] = replace(memory_config, **memory_changes)

    # All others
    for setting, value in settings.items():
        changes = network_changes if setting in network_names else training_changes
        changes[setting] = value
    return replace_nested(base, model=replace(network, **network_changes), **training_changes)


def changed_settings(config: TrainConfig, base: TrainConfig) -> dict[str, Any]:
    """The settings of ``config`` that are not those of ``base``, by their dotted names."""
    settings_of_base = dict(flatten(asdict(base)))
    changed = {}
    for name, value in flatten(asdict(config)):
        if name not in settings_of_base or settings_of_base[name] != value:
            changed[name] = value
    return changed


def keys_of_layers(model: ModelConfig) -> Lengths:
    """The keys beside the segment that ``model`` has as a Compressive Transformer, in all layers or each."""
    if isinstance(model.mem_len, int) and isinstance(model.c_mem_len, int):
        return model.mem_len + model.c_mem_len
    return tuple(size.keys for size in replace(model, model="compressive").memory_sizes)


def read_arms(
    texts: Sequence[str],
    base: TrainConfig,
    *,
    model: str = "",
    same_for_all: Mapping[str, str] = SAME_FOR_ALL,
) -> list[Arm]:
    """The arms that ``texts`` describe: each is an arm, as in [`parse_arm`][], or the path of a file with one
    arm per line and comments after #."""
    # The descriptions, in files too.
    lines = []
    for text in texts:
        if ":" in text or not Path(text).is_file():
            lines.append(text)
            continue
        try:
            content = Path(text).read_text("utf-8")
        except UnicodeDecodeError as error:
            message = f"arms: {text} is not UTF-8 text: {error}; {HOW_TO_WRITE}, one a line."
            raise UserError(message) from None
        for line in content.splitlines():
            described = line.partition("#")[0].strip()
            if described:
                lines.append(described)
    return [parse_arm(line, base, model=model, same_for_all=same_for_all) for line in lines]


def parse_arm(
    text: str,
    base: TrainConfig,
    *,
    model: str = "",
    same_for_all: Mapping[str, str] = SAME_FOR_ALL,
) -> Arm:
    """The arm ``NAME: setting=value …``, whose settings are options of a training, and which has those of
    ``base`` otherwise; ``model`` is the model of an arm that names none."""
    # The name.
    name, colon, described = text.partition(":")
    name = name.strip()
    if not colon:
        raise UserError(f"arms: {text!r} has no colon and is not a file; {HOW_TO_WRITE}.")
    check_arm_name(name)
    try:
        words = shlex.split(described)
    except ValueError as error:
        problem = f"{described.strip()!r} can't be read: {error}; {HOW_TO_WRITE}."
        raise UserError(f"arm {name!r}: {problem}") from None

    # The settings, by the names of their options.
    settings = {}
    for word in words:
        setting, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"arm {name!r}: {word!r} is not setting=value; {HOW_TO_WRITE}.")
        option = setting.replace("-", "_").rpartition(".")[2]
        if option in same_for_all:
            raise UserError(f"arm {name!r}: {option} is the same for all arms; {same_for_all[option]}.")
        settings[option] = value

    # The model first, since others may be settings of its memory; it may allow one number of layers only.
    named = settings.pop("model", model)
    network: dict[str, Any] = {"model": named} if named else {}
    if settings.get("n_layers", "").isdecimal():
        network["n_layers"] = int(settings["n_layers"])
    try:
        config = with_settings(base, **network) if network else base
        return Arm(name, parse_settings(settings, config) if settings else config)
    except UserError as error:
        raise UserError(f"arm {name!r}: {error}") from None


def check_arm_name(name: str) -> None:
    """Raise UserError for a ``name`` that a folder of a run can't have."""
    is_word = re.fullmatch(r"\w[\w+-]{,49}", name)
    names_seed = re.search(r"-seed\d+$", name)
    if not is_word or names_seed or name.lower() == FIGURES:
        raise UserError(
            f"arm {name!r} can't have this name, since its folder has it too; use up to 50 letters, digits, "
            f"-, + and _, and neither {FIGURES!r} nor an ending such as '-seed1'."
        )


def check_arms(arms: Sequence[Arm]) -> None:
    """Raise UserError for no arm, and for two with the same name, label or settings."""
    if not arms:
        raise UserError("a comparison needs an arm; name a model with models, or describe one with arms.")
    names: set[str] = set()
    by_label: dict[str, str] = {}
    by_config: dict[TrainConfig, str] = {}
    for arm in arms:
        if arm.name.lower() in names:  # some file systems don't tell them apart
            raise UserError(f"models and arms need different names; {arm.name!r} is there twice.")
        names.add(arm.name.lower())
        label = label_of(arm.name, arm.label)
        namesake = by_label.setdefault(label, arm.name)
        if namesake != arm.name:  # reports tell arms apart by their labels
            raise UserError(f"arms {namesake!r} and {arm.name!r} have the same label {label!r}; change one.")
        twin = by_config.setdefault(arm.config, arm.name)
        if twin != arm.name:
            raise UserError(f"arms {twin!r} and {arm.name!r} have the same settings; drop one of them.")
