"""Train the models that come with the package, and put them into it.

Run it with ``python -m experiments.pretrained --data input.txt``, where the file is Tiny Shakespeare; without
``--data`` it is downloaded. A training run that was stopped continues when the command is run again.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from experiments.tiny_shakespeare import check_found
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.errors import UserError
from memformers.common.files import atomic_dir, write_json, write_text
from memformers.common.machine import describe_environment
from memformers.data.sources import CorpusSpec, find
from memformers.data.tokenizers import save_tokenizer
from memformers.evaluation.api import evaluate
from memformers.models.config import ModelConfig
from memformers.models.io import PACKAGED, RECIPE
from memformers.report.rendering import PLAIN
from memformers.runs.load import load_checkpoint
from memformers.training.api import train
from memformers.training.config import TrainConfig, read_train_config
from memformers.training.text import find_text
from memformers.training.validation import EVALUATION_STREAMS

# Two bytes a weight of the Compressive Transformer make 1.95 MB; at d_ff=512 they would be 2.3 MB.
NETWORK = ModelConfig(d_ff=384, position_features=64)
MODELS = {
    "transformer-xl-shakespeare": replace(NETWORK, model="transformer-xl", mem_len=64),
    "compressive-shakespeare": replace(NETWORK, model="compressive", mem_len=32, c_mem_len=32),
}
"""A query attends to 64 keys before its segment in both."""
CARD = "README.md"
MAX_BYTES = 2_000_000
"""The most bytes of one model's weights, since every installation has them."""


@dataclass(frozen=True)
class Pretraining:
    """Train the models that come with the package, and put them into it."""

    data: str = ""
    """The file of Tiny Shakespeare; by default the one that a training run uses."""
    tokens: int = 8_000_000
    """The number of tokens on which each model is trained."""
    runs: Path = Path("runs/pretrained")
    """Folder of the two training runs."""
    out: Path = PACKAGED
    """The folder for the models, each in a sub-folder; by default in the package."""

    def run(self) -> None:
        check_found(find(CorpusSpec(self.data)).is_stand_in)
        for name, network in MODELS.items():
            config = TrainConfig(model=network, data=self.data, max_tokens=self.tokens, memory_warmup=0.0)
            run = train(config, self.runs / name, resume=True, dashboard="off").folder
            recipe = package_model(run, self.out / name)
            loss = recipe["held_out"]["loss_nats"]
            print(f"{name}: {loss:.4f} nats per token → {self.out / name}")


def package_model(run: Path, folder: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Write the model of ``run`` in bfloat16, and evaluate these weights; returns the recipe beside them."""
    model, tokenizer = load_checkpoint(run, torch.device("cpu"))
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    n_bytes = sum(tensor.nbytes for tensor in weights.values())
    if n_bytes > max_bytes:
        raise UserError(
            f"the weights of {run} take {n_bytes:,} bytes in bfloat16; use at most {max_bytes:,}."
        )

    # What is evaluated are the rounded weights, in float32, as the packaged model is loaded.
    model.load_state_dict(weights)
    config = read_train_config(run)
    dataset = find_text(config)
    corpus = dataset.info
    text = tokenizer.decode(torch.from_numpy(dataset.validation.tokens))
    recipe = {
        "made_by": "python -m experiments.pretrained",
        "corpus": {"name": corpus.name, "sha256": corpus.sha256},
        "training": {**asdict(config), "data": corpus.name},
        "environment": describe_environment(model.device),
        "parameters": sum(tensor.numel() for tensor in weights.values()),
        "held_out": evaluate(model, tokenizer, text, streams=EVALUATION_STREAMS),
    }
    with atomic_dir(folder) as temporary:
        model.bfloat16().save_pretrained(temporary)
        save_tokenizer(tokenizer, temporary)
        write_json(temporary / RECIPE, recipe)
        write_text(temporary / CARD, model_card(folder.name, recipe))
    return recipe


def model_card(name: str, recipe: dict[str, Any]) -> str:
    template = Path(__file__).with_suffix(".in.md").read_text(encoding="utf-8")
    return PLAIN.from_string(template).render(recipe, name=name) + "\n"


if __name__ == "__main__":
    with cli_errors():
        parse_arguments(Pretraining).run()
