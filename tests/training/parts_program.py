"""Run by torchrun: checkpoints of sharded weights, of which no process may have a whole tensor.

``FOLDER`` trains, keeps two checkpoints, and fails to write a third one. ``FOLDER OTHER`` reads the newest
checkpoint of FOLDER, with any number of processes, and writes it again below OTHER.
"""

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from memformers.common.atomic_dir import numbered
from memformers.common.fields import changed
from memformers.training.checkpoints import read_checkpoint, save_checkpoint
from memformers.training.distributed import end_rank, joined
from memformers.training.optimizers import build_optimizers
from memformers.training.run import build_model
from tests.training.runs import CHECKPOINTED, about, keep_two_checkpoints, letters

SHARDED = changed(CHECKPOINTED, parallel="fsdp")
UNLIMITED = resource.RLIM_INFINITY


def save_in_parts(*arguments: Any) -> None:
    """Save a checkpoint; fails where the parts of a tensor are brought together."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("full_tensor", "redistribute"):
            patch.setattr(DTensor, name, lambda *_, **__: 1 / 0)
        save_checkpoint(*arguments)


if __name__ == "__main__":
    folder, *others = map(Path, sys.argv[1:])
    with joined(SHARDED) as ranks:
        if others:
            model = build_model(SHARDED, ranks)
            optimizers = build_optimizers(model, SHARDED)
            newest = numbered(folder / "checkpoints")[0]
            state = read_checkpoint(newest, model, optimizers, SHARDED.batch_size, ranks)
            save_in_parts(others[0] / newest.name, model, letters(), state, about(), ranks)
        else:
            model, state = keep_two_checkpoints(folder, SHARDED, ranks, save_in_parts)
            if ranks.rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, UNLIMITED))
            try:
                save_in_parts(folder / "failed" / "1", model, letters(), state, about(), ranks)
            except OSError as error:
                resource.setrlimit(resource.RLIMIT_FSIZE, (UNLIMITED, UNLIMITED))
                (folder / "failed" / f"error.{ranks.rank}").write_text(str(error))
    end_rank()
