"""Transformer-XL on Tiny Shakespeare: one run, tracked by labml.

Run it with ``python experiments/transformer_xl.py``; ``--help`` lists every setting.
"""

from labml import monit

from memformers.cli import Train
from memformers.command_line import parse_arguments, plain_errors
from memformers.language_model import ModelConfig
from memformers.report import write_report
from memformers.training.config import TrainConfig
from memformers.training.run import train_run

DEFAULTS = Train(TrainConfig(model=ModelConfig(model="transformer-xl")))


def main(arguments: Train) -> None:
    """Train a Transformer-XL and draw its curves."""
    folder = train_run(arguments.config, arguments.folder(), arguments.dashboard)
    with monit.section("Report"):
        report = write_report(folder)
    print(f"report: {report}")


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Train, default=DEFAULTS))
