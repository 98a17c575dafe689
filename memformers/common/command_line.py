"""Parse command lines, and end a program with one line for errors that the user can correct."""

import contextlib
import difflib
import inspect
import io
import os
import re
import shlex
import shutil
import signal
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from memformers.common.console import printable
from memformers.common.errors import USER_MODULES, UserError
from memformers.common.files import user_path

Config = TypeVar("Config")

OUT_OF_MEMORY = ("allocate memory", "not enough memory", "out of memory")
"""What PyTorch's error says when a CPU or a GPU has no memory left."""
OF_A_FOLDER = ("--out", "--resume")
"""The options of an experiment that name its folder."""
USUAL_OPTION_WIDTH = 26
"""Of an option and its default in the list of most used ones; longer ones push their text aside."""
SWITCHES = ("--quick", "--resume")
"""Options without a value."""


@contextlib.contextmanager
def cli_errors() -> Iterator[None]:
    """End the program with one line and exit code 2 for an error that the user can correct, with 130 for
    Ctrl-C, and with a traceback and the request to report it for a bug."""
    # A terminal shows "?" for a character that it doesn't have; a file gets all of them.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=None if stream.isatty() else "utf-8", errors="replace")
    warnings.showwarning = lambda message, *_: print(printable(f"NOTE: {message}"), file=sys.stderr)
    try:
        yield
    except BrokenPipeError:  # the reader has closed the pipe, as in | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at exit
        sys.exit(128 + signal.SIGPIPE)
    except (UserError, OSError, UnicodeError) as error:  # the last of paths, and of bytes that are no text
        code = 2
        message = f"error: {error}"
        if isinstance(error, FileExistsError) and not os.path.isdir(error.filename or ""):
            message = f"error: {error.filename} exists and is not a folder; name another folder."
    except KeyboardInterrupt:
        code = 130
        message = "interrupted"
    except Exception as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            reason = (str(error) or "out of memory").splitlines()[0]
            code = 2
            message = f"error: not enough memory; use a smaller model, batch or segment. ({reason})"
        else:
            traceback.print_exc()
            frames = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
            code = 1
            message = "error: internal error; please report the traceback above."
            if USER_MODULES.intersection(frames):
                message = f"error: {type(error).__name__} in your code; see the traceback above."
    else:
        return
    print(printable(message), file=sys.stderr)
    sys.exit(code)


def parse_settings(settings: Mapping[str, str], default: Config) -> Config:
    """``default`` with these ``settings``, whose names are those of its options and whose values are read as
    those of a command; a list may be in brackets, as [64,64,832], and null is None. UserError, in one line,
    for a name that is none, and for a value that an option doesn't take."""
    names = [option.name for option, _ in usual_values(default)]
    arguments = []
    for name, value in settings.items():
        if name not in names:
            similar = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {similar[0]!r}?" if similar else "memformers train --help lists them."
            raise UserError(f"unknown setting {name!r}; {hint}")
        option = f"--{name.replace('_', '-')}"
        if value.startswith("[") and value.endswith("]"):
            arguments += [option, *value[1:-1].replace(",", " ").split()]
        else:
            arguments.append(f"{option}={'None' if value == 'null' else value}")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            config: Config = parse_arguments(type(default), arguments, default=default, allows_none=True)
    except SystemExit:
        raise UserError(first_paragraph(printed.getvalue())) from None
    return config


def first_paragraph(box: str) -> str:
    """The first paragraph of a text in a box, as tyro prints an error, in one line."""
    words = []
    for line in box.splitlines()[1:]:
        text = line.strip("│ ")
        if not text or text.startswith(("─", "╰")):
            break
        words.append(text)
    return " ".join(words)


def parse_arguments(
    kind: type,
    arguments: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    default: Any = None,
    allows_none: bool = False,
) -> Any:
    """The dataclass ``kind`` from the command line, on top of ``default``. Help lists the options that are
    ``first`` in ``kind`` before the others of their group; if some of them are in inner groups, it begins
    with all of them. With ``allows_none``, the word None is a value of an option that may be None.

    If a config refuses a value, its own UserError is raised, which is clearer than tyro's message around it.
    tyro itself answers --help and unknown options, and exits.
    """
    import tyro  # not above: --help and --version of the program do without

    if shutil.get_terminal_size().columns < 40:  # in fewer, tyro looks for a layout for minutes
        os.environ["COLUMNS"] = "40"
    words = sys.argv[1:] if arguments is None else arguments

    # The options, whose names must differ, since none has a prefix.
    usual: dict[str, Any] = {}
    lists = set()
    for option, value in usual_values(default or kind):
        if option.name in usual:
            name = option.name
            raise UserError(f"two options are called {name}; rename the one of your memory's Config.")
        usual[option.name] = value
        if is_list(option.type):
            lists.add(option.name)
    words = merged([as_switch(word, usual) for word in words], lists)

    # How tyro parses them.
    first: Sequence[str] = getattr(kind, "first", ())
    settings: dict[str, Any] = {"prog": prog, "config": (tyro.conf.OmitArgPrefixes,)}
    if not allows_none:
        settings["config"] += (tyro.conf.DisallowNone,)
    if default is not None:
        settings["default"] = default
    if "--help" in words or "-h" in words:
        settings["description"] = f"{inspect.getdoc(kind)}{most_used(kind, first, usual, settings)}"
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors), option_rules(first):
            return tyro.cli(kind, args=words, **settings)
    except SystemExit as end:
        # tyro ends the program while it handles the exception of a config.
        cause = end.__context__
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            cause = cause.__context__
        print(errors.getvalue(), end="", file=sys.stderr)
        raise


def most_used(kind: type, first: Sequence[str], usual: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The paragraph of help with the options that are ``first``, one a line: its default, and what it is in
    short. Empty if all are in the outermost group, which shows them first anyway."""
    import tyro

    # Which options there are to show.
    outer = {field.name for field in fields(kind)}
    names = [name for name in first if name in usual]
    if outer.issuperset(names):
        return ""
    # tyro reads the texts of options from their source, and gives them to our rules.
    texts: dict[str, str] = {}
    with contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit), option_rules((), texts):
        tyro.cli(kind, args=["--no-such-option"], **settings)

    # An option with its default, as it would be typed.
    options = {}
    for name in names:
        value = "" if usual[name] is None else usual[name]
        if isinstance(value, bool):
            value = ""
        elif isinstance(value, tuple):
            value = " ".join(map(str, value))
        options[f"--{name.replace('_', '-')} {value}".rstrip()] = texts.get(name, "")

    # The first sentence of each text, in one line of this terminal.
    width = min(max(map(len, options)), USUAL_OPTION_WIDTH)
    n_columns = shutil.get_terminal_size().columns
    lines = []
    for option, text in options.items():
        sentence = re.split(r"[;.] |\.$", text)[0]
        n_left = n_columns - max(width, len(option)) - 5
        lines.append(f"  {option:<{width}}  {textwrap.shorten(sentence, max(n_left, 20), placeholder=' …')}")
    return "\n\nMost used, with their defaults:\n" + "\n".join(lines)


def print_completion(commands: Mapping[str, type], words: Sequence[str]) -> None:
    """Print or write what completes ``commands``, by name, and their options in a shell, as ``words`` ask
    tyro."""
    from tyro import conf, extras

    with option_rules(()):
        extras.subcommand_cli_from_dict(
            dict(commands), prog="memformers", args=words, config=(conf.OmitArgPrefixes, conf.DisallowNone)
        )


def usual_values(config: Any) -> Iterator[tuple[Field[Any], Any]]:
    """The options of a dataclass, or of an instance, and of those in it, with their values."""
    for field in fields(config):
        usual = field.default_factory() if callable(field.default_factory) else None
        value = getattr(config, field.name, usual)
        if is_dataclass(value):
            yield from usual_values(value)
        else:
            yield field, value


def is_list(kind: Any) -> bool:
    """Whether an option of type ``kind`` takes any number of values: ``tuple[X, ...]``, or that or None."""
    origin = get_origin(kind)
    kinds = get_args(kind)
    if origin is Annotated:
        return is_list(kinds[0])
    if origin in (Union, UnionType):
        return all(k is type(None) or is_list(k) for k in kinds)
    return origin is tuple and ... in kinds


def as_switch(word: str, usual: Mapping[str, Any]) -> str:
    """``--x`` for ``--x=True`` and ``--no-x`` for ``--x=False``, as programs that try settings write it."""
    match = re.fullmatch(r"--([\w-]+)=(true|false)", word, re.IGNORECASE)
    if not match or not isinstance(usual.get(match[1].replace("-", "_")), bool):
        return word
    return f"--{match[1]}" if match[2].lower() == "true" else f"--no-{match[1]}"


def merged(words: Sequence[str], lists: Container[str]) -> list[str]:
    """``words`` with ``--x A B`` in place of ``--x A --x B``, of which tyro would take only B, for the
    options that are ``lists``."""
    # Words by the option that they belong to; each other option is a separate group.
    groups: dict[str, list[str]] = {"": []}
    group = groups[""]
    for position, word in enumerate(words):
        name, equals, value = word.partition("=")
        option = name.removeprefix("--").replace("-", "_")
        if not name.startswith("--"):
            group.append(word)
        elif option in lists or f"{option}_" in lists:
            group = groups.setdefault(option, [name])
            if equals:
                group.append(value)
        else:
            group = groups[f"{position}"] = [word]
    return [word for group in groups.values() for word in group]


def option_rules(first: Sequence[str], texts: dict[str, str] | None = None) -> Any:
    """How tyro reads whole numbers, paths and lengths, and orders and shows options. ``texts`` gets the text
    of each option, by its name."""
    import tyro
    from tyro import constructors as tc

    rules = tc.ConstructorRegistry()
    readers: dict[Any, Callable[[str], Any]] = {int: whole_number, Path: user_path}
    not_shown = ("None", "", "''", "()")  # as defaults
    hint = tyro.conf.arg(help_behavior_hint=lambda x: "" if x in not_shown else f"(default: {x})")

    @rules.primitive_rule
    def values(info: tc.PrimitiveTypeInfo) -> tc.PrimitiveConstructorSpec[Any] | None:
        kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in get_args(info.type)]
        if int in kinds and any(get_origin(kind) is tuple for kind in kinds):  # one length, or one a layer
            return tc.PrimitiveConstructorSpec(
                nargs="*",
                metavar="INT [INT ...]",
                instance_from_str=lengths,
                is_instance=lambda value: isinstance(value, (int, tuple)),
                str_from_instance=lambda value: [
                    str(x) for x in (value if isinstance(value, tuple) else [value])
                ],
            )
        if info.type not in readers:
            return None
        return tc.PrimitiveConstructorSpec(
            nargs=1,
            metavar=info.type.__name__.upper(),
            instance_from_str=lambda words: readers[info.type](words[0]),
            is_instance=lambda value: isinstance(value, info.type),
            str_from_instance=lambda value: [str(value)],
        )

    asked: list[Any] = []

    @rules.struct_rule
    def options(info: tc.StructTypeInfo) -> tc.StructConstructorSpec | None:
        # What tyro makes of it by itself: these rules are not asked again for the same one.
        if any(info is asked_for for asked_for in asked):
            return None
        asked.append(info)
        spec = tc.ConstructorRegistry.get_struct_spec(info)
        if not isinstance(spec, tc.StructConstructorSpec):
            return None
        ordered = []
        for field in sorted(spec.fields, key=lambda field: [*first, field.name].index(field.name)):
            text = field.helptext() if callable(field.helptext) else field.helptext
            text = " ".join((text or "").split())
            if texts is not None:
                texts[field.name] = text
            kind: Any = Annotated[field.type, hint]
            ordered.append(replace(field, type=kind, helptext=text or None))
        return replace(spec, fields=tuple(ordered))

    return rules


def last_value(option: str, arguments: Sequence[str]) -> str:
    """The last value of ``option`` among ``arguments``, which are not parsed yet; empty for none."""
    value = ""
    for word, next_word in pairwise([*arguments, ""]):
        name, _, attached = word.partition("=")
        if name == option:
            value = attached or next_word
    return "" if value.startswith("-") else value


def command_as_given() -> str:
    """The command line of this process, quoted, without ``--dashboard``, whose address may be private."""
    program, *arguments = sys.argv
    # A module, a file, or a program on the path.
    if module := getattr(sys.modules["__main__"], "__spec__", None):
        words = ["python", "-m", module.name.removesuffix(".__main__")]
    else:
        words = ["python", program] if program.endswith(".py") else [Path(program).name]
    return shlex.join([*words, *without_options(arguments, ("--dashboard",))])


def without_options(words: Sequence[str], options: Container[str]) -> list[str]:
    """The words of a command without these ``options`` and their values."""
    kept = []
    for previous, word in pairwise(["", *words]):
        is_value = previous in options and previous not in SWITCHES
        is_option = word.partition("=")[0] in options
        if not is_value and not is_option:
            kept.append(word)
    return kept


def resume_command(folder: Path, target: str) -> str:
    """How to continue the experiment in ``folder`` that this process runs: with make, where make started it
    as its ``target``."""
    # make sets this variable.
    if "MAKELEVEL" in os.environ and is_clone():
        return f"the same make command with RESUME=1, as in make {target} RESUME=1"
    # The same command, for this folder.
    words = without_options(shlex.split(command_as_given()), OF_A_FOLDER)
    options = shlex.join(["--resume", "--out", str(folder)])
    for program in (["memformers"], ["python", "-m", "memformers"]):
        if words[: len(program)] == program:
            return command_here(f"{shlex.join(words[len(program) :])} {options}")
    return f"{shlex.join(words)} {options}"


def is_clone() -> bool:
    """Whether the current folder is a clone of the repository, with its Makefile."""
    return Path("Makefile").is_file() and Path("memformers", "dashboard").is_dir()


def command_here(command: str) -> str:
    """How to type a ``memformers`` command in this terminal, where the program may not be on the path."""
    program = Path(sys.executable).with_name("memformers")
    if (on_path := shutil.which("memformers")) and Path(on_path).resolve() == program.resolve():
        return f"memformers {command}"
    return f"{shlex.quote(sys.executable)} -m memformers {command}"


def lengths(words: Sequence[str]) -> int | tuple[int, ...]:
    """One whole number, or one for each layer, with blanks or commas between them; else ValueError."""
    numbers = [whole_number(word) for word in ",".join(words).split(",")]
    return tuple(numbers) if len(numbers) > 1 else numbers[0]


def whole_number(text: str) -> int:
    """The whole number that ``text`` is, also as 1e6 or 2000.0; else ValueError."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if (number := float(text)).is_integer():
            return int(number)
    raise ValueError(f"{text!r} is not a whole number; write one such as 1000 or 1e6")
