"""Compressive Transformer on Tiny Shakespeare: one run, tracked by labml.

Run it with ``python experiments/compressive_transformer.py``; ``--help`` lists every setting.
"""

import sys

from labml import monit

from memformers.commands.train import Train, parse_train
from memformers.common.command_line import plain_errors
from memformers.common.processes import is_first
from memformers.models.config import ModelConfig
from memformers.report.document import write_report
from memformers.training.config import TrainConfig

DEFAULTS = Train(TrainConfig(model=ModelConfig(model="compressive")))


def main(arguments: Train) -> None:
    """Train a Compressive Transformer and draw its curves."""
    folder = arguments.train()
    if not is_first():
        return
    with monit.section("Report"):
        report = write_report(folder)
    print(f"report: {report}")


if __name__ == "__main__":
    with plain_errors():
        main(parse_train(sys.argv[1:], DEFAULTS))
