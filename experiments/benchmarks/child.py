"""A separate process that measures a peak of memory without other influences; prints it in bytes.

``python -m experiments.benchmarks.child training CASE MODEL SIDE`` or ``… attention NAME MEMORY``.
"""

import sys

import torch

from experiments.benchmarks import attention, machine, training
from experiments.benchmarks.cases import CASES, MODELS


def main(arguments: list[str]) -> None:
    """Run what the arguments name and print the peak: of the whole process for a training, or the additional
    memory for an attention."""
    torch.manual_seed(0)
    if arguments[0] == "training":
        name, model, side = arguments[1:]
        training.train_a_little(CASES[name].of(MODELS[MODELS.index(model)]), side)
        print(machine.peak_of_this_process())
    else:
        print(attention.extra_memory(arguments[1], int(arguments[2])))


if __name__ == "__main__":
    main(sys.argv[1:])
