"""Run by torchrun: train in float64 as one of several processes, and leave what each of them has.

Arguments: the folder to leave it in, and the training's config as JSON.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from memformers.files import config_from_dict
from memformers.language_model import MemoryLM
from memformers.training.config import TrainConfig
from memformers.training.loop import build_optimizer, train
from memformers.training.ranks import joined, shard, whole
from memformers.training.state import TrainingState
from tests.builders import fill_zeros
from tests.training.runs import segments_of

folder = Path(sys.argv[1])
config = config_from_dict(TrainConfig, json.loads(sys.argv[2]), "argument")
with joined(config) as ranks:
    torch.manual_seed(0)
    model = fill_zeros(MemoryLM(config.model)).double()
    if config.parallel == "fsdp":
        shard(model, torch.device("cpu"))
    state = TrainingState(build_optimizer(model, config))
    losses = []
    train(model, segments_of(config), config, record=lambda _, metrics: losses.append(metrics["loss.train"]),
          evaluate=lambda _: None, state=state, ranks=ranks)  # fmt: skip
    weights = {name: whole(tensor).contiguous() for name, tensor in model.state_dict().items()}
    memory = {f"memory.{i}": mem for i, mem in enumerate(ranks.all_memory(state.memory).mem)}
    losses = {"losses": torch.tensor(losses, dtype=torch.float64)}
    save_file({**weights, **memory, **losses}, folder / f"{config.parallel}.{ranks.rank}.safetensors")
