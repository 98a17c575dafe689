"""``memformers``: prepare data, train, compare, generate, evaluate, report, and the other commands."""

import argparse
import sys
from functools import partial
from importlib import import_module

from memformers import __version__
from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.processes import yield_while_waiting

ABOUT = "Train, compare and use memory transformers: Transformer-XL and the Compressive Transformer."
COMMANDS = {
    "train": "Train one model on a text.",
    "compare": "Train several models with the same settings, and write a report.",
    "recall": "Measure how far back each memory can recall, with equal keys and several seeds.",
    "prepare": "Tokenize a text of any size once.",
    "generate": "Continue a text with a trained model.",
    "evaluate": "Measure how well a trained model predicts a text.",
    "probe": "Measure how much a trained model's memory helps it.",
    "check": "Test a memory: documents stay apart, generation equals evaluation, and so on.",
    "report": "Write the report of a run or a comparison.",
    "dashboard": "Watch runs in a browser.",
    "export": "Copy runs to TensorBoard or wandb.",
}
"""The commands, as ``memformers --help`` shows them. Their options are in ``memformers.commands``, which
needs PyTorch and is imported when a command is used."""
HOMES = {
    "probe": "evaluate", "recall": "compare", "check": "train", "report": "runs", "dashboard": "runs",
    "export": "runs",
}  # fmt: skip
"""The modules of commands that are not in one of their own name."""


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    with cli_errors():
        name = command_name(words[:1])
        options = words[1:]
        yield_while_waiting()
        module = import_module(f"memformers.commands.{HOMES.get(name, name)}")
        prog = f"memformers {name}"
        if name in ("train", "compare", "recall"):
            import_module("memformers.common.machine").keep_freed_memory()
        parse = getattr(module, f"parse_{name}", partial(parse_arguments, getattr(module, name.capitalize())))
        parse(options, prog=prog).run()


def command_name(words: list[str]) -> str:
    """The command that the first of ``words`` names; --help, --version and an unknown command end the
    program."""
    parser = argparse.ArgumentParser(prog="memformers", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"memformers {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return str(parser.parse_args(words or ["--help"]).command)
