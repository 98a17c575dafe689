"""Memory transformers: Transformer-XL and the Compressive Transformer on one relative-attention core."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memformers.common.fields import Range as Range
    from memformers.convert.labml import from_labml as from_labml
    from memformers.convert.transfo_xl import from_transfo_xl as from_transfo_xl
    from memformers.convert.transfo_xl import load_weights as load_weights
    from memformers.data.tokenize_corpus import prepare_ids as prepare_ids
    from memformers.data.tokenizer import ByteTokenizer as ByteTokenizer
    from memformers.evaluation.api import evaluate as evaluate
    from memformers.evaluation.conformance import assert_conforms as assert_conforms
    from memformers.evaluation.learning import LearnConfig as LearnConfig
    from memformers.generation.generate import generate as generate
    from memformers.generation.stepper import Stepper as Stepper
    from memformers.models.attention import RelativeMultiHeadAttention as RelativeMultiHeadAttention
    from memformers.models.compression import AttentionReconstructionLoss as AttentionReconstructionLoss
    from memformers.models.compression import Conv1dCompression as Conv1dCompression
    from memformers.models.compression import DilatedConvCompression as DilatedConvCompression
    from memformers.models.compression import MaxCompression as MaxCompression
    from memformers.models.compression import MeanCompression as MeanCompression
    from memformers.models.config import AdaptiveConfig as AdaptiveConfig
    from memformers.models.config import CoreConfig as CoreConfig
    from memformers.models.config import ModelConfig as ModelConfig
    from memformers.models.config import NetworkConfig as NetworkConfig
    from memformers.models.core import CoreOutput as CoreOutput
    from memformers.models.core import MemoryCore as MemoryCore
    from memformers.models.language_model import LMOutput as LMOutput
    from memformers.models.language_model import MemoryLM as MemoryLM
    from memformers.models.layers import FeedForward as FeedForward
    from memformers.models.layers import GRUGate as GRUGate
    from memformers.models.layers import MemoryLayer as MemoryLayer
    from memformers.models.memory import LayerMemory as LayerMemory
    from memformers.models.memory import Memory as Memory
    from memformers.models.registry import register_memory as register_memory
    from memformers.models.rules.base import MemoryRule as MemoryRule
    from memformers.models.rules.base import UpdateContext as UpdateContext
    from memformers.models.rules.compressive import CompressiveRule as CompressiveRule
    from memformers.models.rules.compressive import CompressiveTransformer as CompressiveTransformer
    from memformers.models.rules.selective import SelectiveRule as SelectiveRule
    from memformers.models.rules.selective import SelectiveTransformer as SelectiveTransformer
    from memformers.models.rules.transformer_xl import TransformerXL as TransformerXL
    from memformers.models.rules.transformer_xl import TransformerXLRule as TransformerXLRule
    from memformers.models.sizes import MemorySizes as MemorySizes
    from memformers.models.stack import MemoryStack as MemoryStack
    from memformers.training.api import TrainedModel as TrainedModel
    from memformers.training.api import train as train
    from memformers.training.config import CheckpointConfig as CheckpointConfig
    from memformers.training.config import EvaluationConfig as EvaluationConfig
    from memformers.training.config import OptimConfig as OptimConfig
    from memformers.training.config import StepConfig as StepConfig
    from memformers.training.config import TextConfig as TextConfig
    from memformers.training.config import TrainConfig as TrainConfig

__version__ = "0.1.0"

_NAMES = {
    "common.fields": ("Range",),
    "convert.labml": ("from_labml",),
    "convert.transfo_xl": ("from_transfo_xl", "load_weights"),
    "data.tokenize_corpus": ("prepare_ids",),
    "data.tokenizer": ("ByteTokenizer",),
    "evaluation.api": ("evaluate",),
    "evaluation.conformance": ("assert_conforms",),
    "evaluation.learning": ("LearnConfig",),
    "generation.generate": ("generate",),
    "generation.stepper": ("Stepper",),
    "models.attention": ("RelativeMultiHeadAttention",),
    "models.compression": (
        "AttentionReconstructionLoss", "Conv1dCompression", "DilatedConvCompression", "MaxCompression",
        "MeanCompression",
    ),
    "models.rules.compressive": ("CompressiveRule", "CompressiveTransformer"),
    "models.config": ("AdaptiveConfig", "CoreConfig", "ModelConfig", "NetworkConfig"),
    "models.core": ("CoreOutput", "MemoryCore"),
    "models.rules.base": ("MemoryRule", "UpdateContext"),
    "models.language_model": ("LMOutput", "MemoryLM"),
    "models.layers": ("FeedForward", "GRUGate", "MemoryLayer"),
    "models.memory": ("LayerMemory", "Memory"),
    "models.registry": ("register_memory",),
    "models.rules.selective": ("SelectiveRule", "SelectiveTransformer"),
    "models.rules.transformer_xl": ("TransformerXL", "TransformerXLRule"),
    "models.sizes": ("MemorySizes",),
    "models.stack": ("MemoryStack",),
    "training.api": ("TrainedModel", "train"),
    "training.config": (
        "CheckpointConfig", "EvaluationConfig", "OptimConfig", "StepConfig", "TextConfig", "TrainConfig",
    ),
}  # fmt: skip
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


if not TYPE_CHECKING:  # else every name would be one

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used: what needs no torch starts without it."""
        if name in _HOMES:
            return getattr(import_module(f"memformers.{_HOMES[name]}"), name)
        raise AttributeError(f"module 'memformers' has no attribute {name!r}")
