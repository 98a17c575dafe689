"""Memory transformers: Transformer-XL and the Compressive Transformer on one relative-attention core."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memformers.attention import RelativeMultiHeadAttention as RelativeMultiHeadAttention
    from memformers.compressive import AttentionReconstructionLoss as AttentionReconstructionLoss
    from memformers.compressive import CompressiveTransformer as CompressiveTransformer
    from memformers.compressive import CompressiveTransformerLayer as CompressiveTransformerLayer
    from memformers.compressive import Conv1dCompression as Conv1dCompression
    from memformers.decoding import Decoder as Decoder
    from memformers.labml_weights import from_labml as from_labml
    from memformers.language_model import LMOutput as LMOutput
    from memformers.language_model import MemoryLM as MemoryLM
    from memformers.layers import FeedForward as FeedForward
    from memformers.memory import Memory as Memory
    from memformers.model_config import ModelConfig as ModelConfig
    from memformers.transfo_xl_weights import from_transfo_xl as from_transfo_xl
    from memformers.transformer_xl import TransformerXL as TransformerXL
    from memformers.transformer_xl import TransformerXLLayer as TransformerXLLayer
    from memformers.weights_file import load_weights as load_weights

__version__ = "0.1.0"

_HOMES = {
    "AttentionReconstructionLoss": "compressive",
    "CompressiveTransformer": "compressive",
    "CompressiveTransformerLayer": "compressive",
    "Conv1dCompression": "compressive",
    "Decoder": "decoding",
    "FeedForward": "layers",
    "LMOutput": "language_model",
    "Memory": "memory",
    "MemoryLM": "language_model",
    "ModelConfig": "model_config",
    "RelativeMultiHeadAttention": "attention",
    "TransformerXL": "transformer_xl",
    "TransformerXLLayer": "transformer_xl",
    "from_labml": "labml_weights",
    "from_transfo_xl": "transfo_xl_weights",
    "load_weights": "weights_file",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: what needs no torch starts without it."""
    if name in _HOMES:
        return getattr(import_module(f"memformers.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'memformers' has no attribute {name!r}")
