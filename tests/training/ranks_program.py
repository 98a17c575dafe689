"""Run by torchrun: train in float64 as one of several processes, and leave what each of them has.

Arguments: the folder to leave it in, and the training's config as JSON. With a document_separator, whatever
it is, the text is DOCUMENTS.
"""

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from memformers.common.files import config_from_dict
from memformers.models.language_model import MemoryLM
from memformers.models.memory import memory_tensors
from memformers.training.config import TrainConfig
from memformers.training.distributed import full_tensor, joined
from memformers.training.loop import train
from memformers.training.optimizers import build_optimizers
from memformers.training.state import TrainingState
from tests.builders import fill_zeros
from tests.training.runs import DOCUMENTS, segments_of


def train_in_double(folder: Path, config: TrainConfig) -> None:
    """Train, and write weights, memory and losses of this process into ``folder``."""
    with joined(config) as ranks:
        torch.manual_seed(0)
        model = fill_zeros(MemoryLM(config.model)).double()
        ranks.place(model, torch.device("cpu"))
        state = TrainingState(build_optimizers(model, config))
        losses = []
        documents = DOCUMENTS if config.document_separator else ()
        train(model, segments_of(config, documents=documents), config, evaluate=lambda _: None, state=state,
              record=lambda _, found: losses.append(found["loss.train"]), ranks=ranks)  # fmt: skip
        found = {name: full_tensor(tensor).contiguous() for name, tensor in model.state_dict().items()}
        found |= memory_tensors(ranks.all_memory(state.memory))
        found["losses"] = torch.tensor(losses, dtype=torch.float64)
        save_file(found, folder / f"{config.parallel}.{ranks.rank}.safetensors")


if __name__ == "__main__":
    train_in_double(Path(sys.argv[1]), config_from_dict(TrainConfig, json.loads(sys.argv[2]), "argument"))
    # FSDP keeps the process group until the interpreter ends, where PyTorch 2.13 now and then aborts when
    # all is done: "terminate called without an active exception".
    sys.stdout.flush()
    os._exit(0)
