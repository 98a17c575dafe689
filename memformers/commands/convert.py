"""``memformers convert``: a checkpoint as the plain files of a model."""

from dataclasses import dataclass
from pathlib import Path

from memformers.commands.options import ModelCommand
from memformers.data.tokenizers import save_tokenizer


@dataclass(frozen=True, kw_only=True)
class Convert(ModelCommand):
    """Write a trained model as save_pretrained does: whole in one file, also from a checkpoint of several
    processes, and from Hugging Face's Transformer-XL.

    Example: memformers convert --checkpoint runs/… --out book-model
    """

    out: Path
    """The folder for config.json, model.safetensors and tokenizer.json."""

    def run(self) -> None:
        """Write it, then say where it is."""
        model, tokenizer = self.load()
        model.save_pretrained(self.out)
        save_tokenizer(tokenizer, self.out)
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters → {self.out}")
