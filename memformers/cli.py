"""The ``memformers`` command: train, compare, generate, evaluate, probe, report, dashboard."""

import sys

from memformers.command_line import parse_arguments, plain_errors
from memformers.commands.compare import Compare
from memformers.commands.dashboard import Dashboard
from memformers.commands.evaluate import Evaluate
from memformers.commands.generate import Generate
from memformers.commands.report import Probe, Report
from memformers.commands.train import Train, parse_train


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    given = sys.argv[1:] if arguments is None else arguments
    with plain_errors():
        kinds = Train | Compare | Generate | Evaluate | Probe | Report | Dashboard
        command = parse_arguments(kinds, given, prog="memformers")
        if isinstance(command, Train):
            command = parse_train(given[1:], Train(), prog="memformers train")
        command.run()


if __name__ == "__main__":
    main()
