"""Memory transformers: Transformer-XL and the Compressive Transformer on one relative-attention core."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memformers.generation.decoding import Decoder as Decoder
    from memformers.generation.incremental import Stepper as Stepper
    from memformers.models.attention import RelativeMultiHeadAttention as RelativeMultiHeadAttention
    from memformers.models.compression import CompressionAutoEncoder as CompressionAutoEncoder
    from memformers.models.compression import Conv1dCompression as Conv1dCompression
    from memformers.models.compression import DilatedConvCompression as DilatedConvCompression
    from memformers.models.compression import MaxCompression as MaxCompression
    from memformers.models.compression import MeanCompression as MeanCompression
    from memformers.models.compression import MostUsedCompression as MostUsedCompression
    from memformers.models.compressive import CompressiveTransformer as CompressiveTransformer
    from memformers.models.config import AdaptiveConfig as AdaptiveConfig
    from memformers.models.config import CoreConfig as CoreConfig
    from memformers.models.config import ModelConfig as ModelConfig
    from memformers.models.core import CoreOutput as CoreOutput
    from memformers.models.core import MemoryCore as MemoryCore
    from memformers.models.language_model import LMOutput as LMOutput
    from memformers.models.language_model import MemoryLM as MemoryLM
    from memformers.models.layers import CompressiveTransformerLayer as CompressiveTransformerLayer
    from memformers.models.layers import FeedForward as FeedForward
    from memformers.models.layers import GRUGate as GRUGate
    from memformers.models.layers import TransformerXLLayer as TransformerXLLayer
    from memformers.models.lengths import LayerLengths as LayerLengths
    from memformers.models.memory import Memory as Memory
    from memformers.models.own_memory import OwnMemory as OwnMemory
    from memformers.models.reconstruction import AttentionReconstructionLoss as AttentionReconstructionLoss
    from memformers.models.reconstruction import AutoEncodingLoss as AutoEncodingLoss
    from memformers.models.transformer_xl import TransformerXL as TransformerXL
    from memformers.pretrained.labml import from_labml as from_labml
    from memformers.pretrained.transfo_xl import from_transfo_xl as from_transfo_xl
    from memformers.pretrained.weights_file import load_weights as load_weights
    from memformers.training.api import TrainedModel as TrainedModel
    from memformers.training.api import evaluate as evaluate
    from memformers.training.api import train as train
    from memformers.training.config import TrainConfig as TrainConfig

__version__ = "0.1.0"

_HOMES = {
    "AdaptiveConfig": "models.config",
    "AttentionReconstructionLoss": "models.reconstruction",
    "AutoEncodingLoss": "models.reconstruction",
    "CompressionAutoEncoder": "models.compression",
    "CompressiveTransformer": "models.compressive",
    "CompressiveTransformerLayer": "models.layers",
    "Conv1dCompression": "models.compression",
    "CoreConfig": "models.config",
    "CoreOutput": "models.core",
    "Decoder": "generation.decoding",
    "DilatedConvCompression": "models.compression",
    "FeedForward": "models.layers",
    "GRUGate": "models.layers",
    "LMOutput": "models.language_model",
    "LayerLengths": "models.lengths",
    "MaxCompression": "models.compression",
    "MeanCompression": "models.compression",
    "Memory": "models.memory",
    "MemoryCore": "models.core",
    "MemoryLM": "models.language_model",
    "ModelConfig": "models.config",
    "MostUsedCompression": "models.compression",
    "OwnMemory": "models.own_memory",
    "RelativeMultiHeadAttention": "models.attention",
    "Stepper": "generation.incremental",
    "TrainConfig": "training.config",
    "TrainedModel": "training.api",
    "TransformerXL": "models.transformer_xl",
    "TransformerXLLayer": "models.layers",
    "evaluate": "training.api",
    "from_labml": "pretrained.labml",
    "from_transfo_xl": "pretrained.transfo_xl",
    "load_weights": "pretrained.weights_file",
    "train": "training.api",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: what needs no torch starts without it."""
    if name in _HOMES:
        return getattr(import_module(f"memformers.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'memformers' has no attribute {name!r}")
