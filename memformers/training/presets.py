"""The settings of the papers' benchmarks, each in a file of the folder ``presets`` with its source.

They are as near to the papers' as this library comes. In all of them, the learning rate falls linearly, where
the papers' falls as a cosine; attention probabilities are dropped at the rate of all other activations; and
every layer has its own u and v.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.files import config_from_dict, read_json
from memformers.training.config import TrainConfig

FOLDER = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Preset:
    """The training of one row of a paper's table."""

    source: str
    """Where its settings are published."""
    assumed: str
    """Which of them are not published, and where they are from; empty if there are none."""
    reaches: str
    """What the paper reports."""
    parameters: int | None
    """The millions of parameters in the paper's table; None if it has none."""
    vocab_size: int
    """The number of different tokens of its corpus, which a training counts itself."""
    settings: dict[str, Any]
    """Those that differ from a training's defaults, as ``config.json`` has them."""

    @property
    def config(self) -> TrainConfig:
        """The training, before its text is known."""
        return config_from_dict(TrainConfig, self.settings, "a preset")


def preset_names() -> list[str]:
    """The names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_preset(name: str) -> Preset:
    """The preset called ``name``; else UserError."""
    if name not in (known := preset_names()):
        raise UserError(f"preset={name!r} is unknown; use one of {', '.join(known)}.")
    return config_from_dict(Preset, read_json(FOLDER / f"{name}.json"), name)
