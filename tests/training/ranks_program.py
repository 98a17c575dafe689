"""Train in float64 in two processes, as torchrun starts them, and leave what each of them has.

The processes are forks, so that PyTorch is imported once; torchrun would import it three times.
Arguments: the folder to leave it in, and the configs of trainings as a JSON list. With a document_separator,
whatever it is, the text is DOCUMENTS.
"""

import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch._dynamo  # which optimizers import; here it is done before the fork
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


def train_as_rank(rank: int, port: int, folder: Path, configs: list[TrainConfig]) -> None:
    """Train with each of the configs, as the process with this rank."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
    )  # fmt: skip
    with process_group(configs[0]) as ranks:
        for number, config in enumerate(configs):
            ranks.parallel = config.step.parallel
            train_in_double(folder / f"{number}.{ranks.rank}", config, ranks)
    end_rank()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    configs = [config_from_dict(TrainConfig, config, "argument") for config in json.loads(sys.argv[2])]
    arguments = (free_port(), Path(sys.argv[1]), configs)
    torch.multiprocessing.start_processes(train_as_rank, arguments, nprocs=2, start_method="fork")
