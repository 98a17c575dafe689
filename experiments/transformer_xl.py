"""Transformer-XL on Tiny Shakespeare: one run, tracked by labml.

Run it with ``python experiments/transformer_xl.py``; ``--help`` lists every setting.
"""

import sys

from memformers.commands.train import Train, parse_train
from memformers.common.command_line import cli_errors
from memformers.common.processes import is_first
from memformers.models.config import ModelConfig, ModelName
from memformers.report.document import write_report
from memformers.training.config import TrainConfig


def main(model: ModelName) -> None:
    defaults = TrainConfig(ModelConfig(model=model, token_shift=True))
    with cli_errors():
        folder = parse_train(sys.argv[1:], Train(defaults)).train()
        if is_first():
            print(f"report: {write_report(folder)}")


if __name__ == "__main__":
    main("transformer-xl")
