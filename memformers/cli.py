"""``memformers``: prepare data, train, compare, generate, evaluate, report, and the other commands."""

import argparse
import difflib
import sys
from functools import partial
from importlib import import_module

from memformers import __version__
from memformers.common.command_line import cli_errors, parse_arguments, print_completion
from memformers.common.errors import UserError
from memformers.common.processes import busy_notice, is_first, spin_less

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
    "export": "Copy runs to TensorBoard, wandb or trackio.",
}
"""The commands, as ``memformers --help`` shows them. Each is a file in ``memformers.commands``, which needs
PyTorch and is imported when the command is used."""
COMPLETION = ("--tyro-print-completion", "--tyro-write-completion")
"""Options that print or write what completes the command in a shell."""


def main(arguments: list[str] | None = None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    with cli_errors():
        if words and words[0] in COMPLETION:
            print_completion({name: command_class(name) for name in COMMANDS}, words)
            return
        name = command_name(words[:1])
        spin_less()
        module = import_module(f"memformers.commands.{name}")
        trains = name in ("train", "compare", "recall")
        if trains:
            import_module("memformers.common.machine").keep_freed_memory()
        parse = getattr(module, f"parse_{name}", partial(parse_arguments, command_class(name)))
        command = parse(words[1:], prog=f"memformers {name}")
        if trains and is_first():
            print(busy_notice(), end="", file=sys.stderr)
        command.run()


def command_class(name: str) -> type:
    """The dataclass of a command's options, which runs it."""
    command: type = getattr(import_module(f"memformers.commands.{name}"), name.capitalize())
    return command


def command_name(words: list[str]) -> str:
    """The command that the first of ``words`` names; --help and --version end the program. UserError for an
    unknown command."""
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else "memformers --help lists all commands."
        raise UserError(f"unknown command {words[0]!r}; {hint}")
    epilog = "Completion in a shell: memformers --tyro-print-completion bash (or zsh, tcsh)"
    parser = argparse.ArgumentParser(prog="memformers", description=ABOUT, epilog=epilog)
    parser.add_argument("--version", action="version", version=f"memformers {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return str(parser.parse_args(words or ["--help"]).command)
