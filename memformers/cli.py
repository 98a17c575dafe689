"""``memformers``: prepare data, train, compare, generate, evaluate, report, and the other commands."""

import argparse
import sys
from importlib import import_module

from memformers import __version__
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.errors import UserError

ABOUT = "Train, compare and use memory transformers: Transformer-XL and the Compressive Transformer."
COMMANDS = {
    "train": "Train one model on a text.",
    "compare": "Train several models with the same settings, and write a report.",
    "recall": "Measure how far back each memory recalls, with the same number of keys and over seeds.",
    "prepare": "Divide a text of any size into tokens, once.",
    "generate": "Continue a text with a trained model.",
    "evaluate": "Measure how well a trained model predicts a text.",
    "convert": "Write a checkpoint as the plain files of a model.",
    "probe": "Measure how much their memory helps trained models.",
    "check": "Check that a memory satisfies what every memory must.",
    "report": "Write the report of a run or a comparison.",
    "dashboard": "Watch runs in a browser.",
    "export": "Copy runs to TensorBoard or wandb.",
    "doctor": "Show this machine, and what will be used on it.",
}
"""The commands, as ``memformers --help`` shows them. Their options are in ``memformers.commands``, which
needs PyTorch and is imported when a command is used."""
PRINTING = ("generate", "evaluate", "check", "doctor")
"""The commands whose result is what they print."""
HOMES = {"probe": "evaluate", "recall": "compare"}
"""The modules of commands that share one with another command."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    given = sys.argv[1:] if arguments is None else arguments
    with plain_errors():
        name, options = command_name(given[:1]), given[1:]
        module = import_module(f"memformers.commands.{HOMES.get(name, name)}")
        prog = f"memformers {name}"
        if sys.__stdout__ is None and name in PRINTING:
            raise UserError(f"standard output is closed, where {name} writes; use > FILE, or > /dev/null.")
        if name in ("train", "compare", "recall"):
            import_module("memformers.common.machine").keep_freed_memory()
        if name == "train":
            command = module.parse_train(options, module.Train(), prog=prog)
        elif name == "check":
            command = module.parse_check(options, prog=prog)
        else:
            command = parse_arguments(getattr(module, name.capitalize()), options, prog=prog)
        command.run()


def command_name(given: list[str]) -> str:
    """The command that is given; --help, --version and an unknown command end the program."""
    parser = argparse.ArgumentParser(prog="memformers", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"memformers {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return str(parser.parse_args(given or ["--help"]).command)
