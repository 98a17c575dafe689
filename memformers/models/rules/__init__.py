"""Rules: what a layer remembers, one file each. All are named here."""

from memformers.models.registry import MODELS
from memformers.models.rules.base import MemoryRule
from memformers.models.rules.compressive import CompressiveRule
from memformers.models.rules.no_memory import NoMemory
from memformers.models.rules.selective import SelectiveRule
from memformers.models.rules.transformer_xl import TransformerXLRule

BUILT_IN: dict[str, type[MemoryRule]] = {
    "transformer": NoMemory,
    "transformer-xl": TransformerXLRule,
    "compressive": CompressiveRule,
    "selective": SelectiveRule,
}
"""The rules that a config's ``model`` names."""
MODELS.update(BUILT_IN)
