"""The ``memformers`` command: train, compare, recall, generate, evaluate, probe, report, dashboard."""

import argparse
import sys
from importlib import import_module

from memformers import __version__
from memformers.common.command_line import parse_arguments, plain_errors

ABOUT = "Train, compare and use memory transformers: Transformer-XL and the Compressive Transformer."
COMMANDS = {
    "train": "Train one model on a text.",
    "compare": "Train several models alike, one after the other, and write a report.",
    "recall": "Measure what each memory recalls, by distance, at equal keys and over seeds.",
    "generate": "Continue a text with a trained model.",
    "evaluate": "Measure how well a trained model predicts a text.",
    "probe": "Measure what context and memory are worth to trained models.",
    "report": "Write the report of a run or a comparison, again or for the first time.",
    "dashboard": "Watch runs in a browser.",
}
"""What there is, as ``memformers --help`` says it; the options are in ``memformers.commands``, which need
PyTorch and are imported when they are used."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    given = sys.argv[1:] if arguments is None else arguments
    name, options = command_name(given[:1]), given[1:]
    with plain_errors():
        module = import_module(f"memformers.commands.{name}")
        prog = f"memformers {name}"
        if name == "train":
            command = module.parse_train(options, module.Train(), prog=prog)
        else:
            command = parse_arguments(getattr(module, name.capitalize()), options, prog=prog)
        command.run()


def command_name(given: list[str]) -> str:
    """The command that is asked for; --help, --version and what is none of them end the program."""
    parser = argparse.ArgumentParser(prog="memformers", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"memformers {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return str(parser.parse_args(given).command)


if __name__ == "__main__":
    main()
