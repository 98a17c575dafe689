"""Parse command lines, and end a program with one line for errors that the user can correct."""

import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from memformers.common.errors import USER_MODULES, UserError
from memformers.common.fields import annotations_of
from memformers.common.text_format import printable

Group = tuple[str, str]
"""The title of a group of options, and what they have in common."""
NARROWEST = 40
"""The narrowest terminal, in columns, in which tyro finds a layout within a moment."""
OUT_OF_MEMORY = ("allocate memory", "not enough memory", "out of memory")
"""What PyTorch says on CPU or GPU when there is none left."""
NO_DEFAULTS = ("None", "", "''")
"""What a help doesn't show as a default: the option is not given."""


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """End the program with one line and exit code 2 for a mistake of the user, with exit code 130 for Ctrl-C,
    and with a traceback and the request to report it for a mistake of memformers."""
    open_what_is_closed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # one that can't show a character shows another
            stream.reconfigure(errors="replace")
    warnings.showwarning = lambda message, *_: print(printable(f"NOTE: {message}"), file=sys.stderr)
    try:
        yield
    except BrokenPipeError:  # whoever read has gone, as with | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at exit
        sys.exit(128 + signal.SIGPIPE)
    except (UserError, OSError, UnicodeEncodeError) as error:  # the last of a path that no file can have
        code, said = 2, f"error: {error}"
    except KeyboardInterrupt:
        code, said = 130, "interrupted"
    except Exception as error:
        code, said = 1, "error: this is a mistake in memformers and not yours; please report the lines above."
        if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            first = (str(error) or "out of memory").splitlines()[0]
            code, said = (
                2,
                f"error: not enough memory; a smaller model, batch or segment needs less. ({first})",
            )
        else:
            traceback.print_exc()
            frames = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
            if USER_MODULES.intersection(frames):
                said = f"error: {type(error).__name__} in your own code; see the lines above."
    else:
        return
    print(printable(said), file=sys.stderr)
    sys.exit(code)


def open_what_is_closed() -> None:
    """Let a standard stream that was closed, as by ``2>&-``, be the null device: otherwise the next file that
    is opened would get its number, and what is said would be written into it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def parse_arguments(
    kind: type, arguments: Sequence[str] | None = None, *, prog: str | None = None, default: Any = None
) -> Any:
    """The dataclass ``kind`` from the command line, on top of ``default``; a whole number may be written as
    1e6. ``--help`` shows the options that are ``first`` in ``kind`` and the names of its ``groups``,
    ``--help-all`` all options; where it has no groups, both show all.

    If a config refuses a value, its own UserError is raised, which is clearer than tyro's message around it.
    tyro itself answers --help and unknown options, and exits.
    """
    # Not above: --help and --version do without.
    import tyro
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    rules = ConstructorRegistry()
    asked: list[PrimitiveTypeInfo] = []

    @rules.primitive_rule
    def readable(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if any(kind is other for other in asked):  # tyro's own rule is wanted
            return None
        asked.append(kind)
        spec = ConstructorRegistry.get_primitive_spec(kind)
        asked.pop()
        if not isinstance(spec, PrimitiveConstructorSpec):
            return None
        if kind.type is int:
            return replace(spec, instance_from_str=lambda words: whole_number(words[0]))
        if "{[INT [INT ...] [INT" in spec.metavar:  # lengths by layer and by head
            return replace(spec, metavar="INT[,INT ...] [...]", instance_from_str=lengths)
        # PATH for {None}|PATH, [INT ...] for [INT [INT ...]], INT [INT ...] for one or several numbers
        metavar = re.sub(r"\[(\w+) \[\1 \.\.\.\]\]", r"[\1 ...]", spec.metavar.replace("{None}|", ""))
        return replace(spec, metavar=re.sub(r"(\w+)\|\{\[\1 \.\.\.\]\}", r"\1 [\1 ...]", metavar))

    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    prog = prog or Path(sys.argv[0]).name
    given, ending = list(sys.argv[1:] if arguments is None else arguments), ""
    if {"-h", "--help", "--help-all"}.intersection(given):
        kind, left_out = shown(kind, default, everything="--help-all" in given)
        if left_out:
            lines = [f"  {title:<11} {about}" for title, about in left_out]
            ending = "\n".join(["Further options:", *lines, f"\n{prog} --help-all shows all options"])
        given, default = ["--help"], None
    said = io.StringIO()
    extra = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said), rules:
            return tyro.cli(kind, args=given, prog=prog, config=(tyro.conf.OmitArgPrefixes,), **extra)
    except SystemExit as end:
        cause = end.__context__
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            cause = cause.__context__
        if ending:
            print(ending)
        print(said.getvalue(), end="", file=sys.stderr)
        raise


def shown(kind: type, default: Any, everything: bool) -> tuple[type, list[Group]]:
    """The dataclass whose help is that of ``kind``: the options that are ``first`` in it, or in no group, and
    with ``everything`` a box for each other group; and the groups that it leaves out."""
    import tyro
    from docstring_parser import parse_from_object

    first, groups = list(getattr(kind, "first", ())), getattr(kind, "groups", {})
    members: list[tuple[str, Any, Any]] = []
    boxes: dict[Group, list[tuple[str, Any, Any]]] = {}
    group: Group | None = None

    def hint(default: str) -> str:
        return "" if default in NO_DEFAULTS else f"(default: {default})"

    def collect(owner: type, config: Any) -> None:
        nonlocal group
        parts = [part for part in reversed(owner.__mro__) if is_dataclass(part)]
        texts = {each.arg_name: each.description for part in parts for each in parse_from_object(part).params}
        for each in fields(owner):
            group = groups.get(each.name, group)
            usual = each.default if each.default_factory is MISSING else each.default_factory()
            value = getattr(config, each.name, usual)
            if is_dataclass(value):
                collect(type(value), value)
                continue
            text = " ".join((texts.get(each.name) or "").split())
            about = tyro.conf.arg(help=text, help_behavior_hint=hint)
            option = each.name, Annotated[annotations_of(owner)[each.name], about], field(default=value)
            box = members if group is None or each.name in first else boxes.setdefault(group, [])
            box.append(option)

    collect(kind, default)
    members.sort(key=lambda option: [*first, option[0]].index(option[0]))
    for (title, about), options in boxes.items() if everything else []:
        part = make_dataclass(title, options, namespace={"__doc__": about})
        members.append((title, part, field(default_factory=part)))
    made = make_dataclass(kind.__name__, members, kw_only=True, namespace={"__doc__": kind.__doc__})
    return made, [] if everything else list(boxes)


def command_as_given() -> str:
    """The command line of this process, quoted so that it runs again, without ``--dashboard``, whose address
    may be private."""
    main = sys.modules["__main__"]
    program, *arguments = sys.argv
    if module := getattr(main, "__spec__", None):
        words = ["python", "-m", module.name.removesuffix(".__main__")]
    else:
        words = ["python", program] if program.endswith(".py") else [Path(program).name]
    pairs = pairwise(["", *arguments])
    words += [word for before, word in pairs if "--dashboard" not in (before, word.split("=")[0])]
    return shlex.join(words)


def lengths(words: Sequence[str]) -> int | tuple[int | tuple[int, ...], ...]:
    """One whole number, or one a layer; in place of one, as 64,64,64,832, one a head. Else ValueError."""
    each = [
        tuple(map(whole_number, word.split(","))) if "," in word else whole_number(word) for word in words
    ]
    return each[0] if len(each) == 1 and isinstance(each[0], int) else tuple(each)


def whole_number(text: str) -> int:
    """The whole number that ``text`` is, as Python writes it, or as 1e6 or 2000.0; else ValueError."""
    with contextlib.suppress(ValueError):
        return int(text)
    is_number = re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d{1,2})?", text)
    if is_number and (number := Fraction(text)).denominator == 1:  # exact, as a float is not
        return int(number)
    raise ValueError(f"{text!r} is not a whole number; write one such as 1000 or 1e6")
