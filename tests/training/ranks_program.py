"""Run by torchrun: train in float64 as one of several processes, and leave what each of them has.

Arguments: the folder to leave it in, and the configs of trainings as a JSON list. With a document_separator,
whatever it is, the text is DOCUMENTS.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from memformers.common.files import config_from_dict
from memformers.models.language_model import MemoryLM
from memformers.training.config import TrainConfig
from memformers.training.distributed import Distributed, end_rank, process_group
from memformers.training.optimizers import build_optimizers
from memformers.training.state import TrainingState
from tests.builders import fill_zeros
from tests.training.runs import DOCUMENTS, segments_of, train_here


def train_in_double(path: Path, config: TrainConfig, ranks: Distributed) -> None:
    """Train, and write weights, memory and losses of this process into ``path``."""
    torch.manual_seed(0)
    model = fill_zeros(MemoryLM(config.model)).double()
    state = TrainingState(build_optimizers(model, config))
    segments = segments_of(config, documents=DOCUMENTS if config.text.document_separator else ())
    records = train_here(model, config, segments, state=state, ranks=ranks)
    memory = {name: ranks.all_streams(x) for name, x in state.memory.tensors().items()}
    tensors = model.state_dict() | memory
    losses = [record["loss.train"] for record in records]
    save_file(tensors | {"losses": torch.tensor(losses, dtype=torch.float64)}, path)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    configs = [config_from_dict(TrainConfig, config, "argument") for config in json.loads(sys.argv[2])]
    with process_group(configs[0]) as ranks:
        for number, config in enumerate(configs):
            ranks.parallel = config.step.parallel
            train_in_double(folder / f"{number}.{ranks.rank}", config, ranks)
    end_rank()
