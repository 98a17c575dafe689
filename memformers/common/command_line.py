"""Parse command lines, and end a program with one line for errors that the user can correct.

tyro shows a group of options for each dataclass. So the options of nested configs are parsed as another
dataclass, which holds one for each group, and from which the configs then get their values.
"""

import ast
import contextlib
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from memformers.common.errors import USER_MODULES, UserError
from memformers.common.fields import annotations_of
from memformers.common.words import printable

OTHER = "other"
NARROWEST = 40
"""The narrowest terminal, in columns, in which tyro finds a layout within a moment."""


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
        print(printable(f"error: {error}"), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if _is_out_of_memory(error):
            said = (str(error) or "out of memory").splitlines()[0]
            said = f"error: not enough memory; a smaller model, batch or segment needs less. ({said})"
            print(said, file=sys.stderr)
            sys.exit(2)
        traceback.print_exc()
        frames = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
        if USER_MODULES.intersection(frames):
            said = f"error: {type(error).__name__} in your own code; see the lines above."
        else:
            said = "error: this is a mistake in memformers and not yours; please report the lines above."
        print(said, file=sys.stderr)
        sys.exit(1)


CLOSED: set[str] = set()
"""The standard streams that were closed when the program began."""


def check_is_read() -> None:
    """Raise UserError if standard output is closed, for a command that has no other result."""
    if "stdout" in CLOSED:
        raise UserError("standard output is closed, so the result would be lost; redirect it to a file.")


def open_what_is_closed() -> None:
    """Let a standard stream that was closed, as by ``2>&-``, be the null device: otherwise the next file that
    is opened would get its number, and what is said would be written into it."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            CLOSED.add(name)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def parse_arguments(
    kind: Any, arguments: Sequence[str] | None = None, *, prog: str | None = None, default: Any = None
) -> Any:
    """The dataclass ``kind``, or one of a union, from the command line, on top of ``default``.

    Where ``kind`` has ``groups``, ``--help`` shows its options in these, below those that are ``first``. A
    whole number may be written as 1e6. If a config refuses a value, its own UserError is raised, which is
    clearer than tyro's message around it. tyro itself answers --help and unknown options, and exits.
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
        return replace(spec, metavar=readable_metavar(spec.metavar))

    @rules.primitive_rule
    def rule(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[int] | None:
        if kind.type is not int:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT",
            instance_from_str=lambda words: whole_number(words[0]),
            is_instance=lambda value: isinstance(value, int),
            str_from_instance=lambda value: [str(value)],
        )

    if shutil.get_terminal_size().columns < NARROWEST:
        os.environ["COLUMNS"] = str(NARROWEST)
    groups = getattr(kind, "groups", None)
    if groups:
        config = kind() if default is None else default
        kind, default = grouped(config, kind.first, groups), None
    said = io.StringIO()
    extra = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said), rules:
            parsed = tyro.cli(kind, args=arguments, prog=prog, **extra)
        if not groups:
            return parsed
        return with_values(config, {name: value for _, name, value in values_of(parsed)})
    except SystemExit as end:
        cause = end.__context__
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            cause = cause.__context__
        print(said.getvalue(), end="", file=sys.stderr)
        raise


def readable_metavar(metavar: str) -> str:
    """What tyro writes behind an option, with fewer marks: PATH for ``{None}|PATH``, ``[INT ...]`` for
    ``[INT [INT ...]]``, and ``INT [INT ...]`` for one or several numbers."""
    metavar = re.sub(r"\[(\w+) \[\1 \.\.\.\]\]", r"[\1 ...]", metavar.replace("{None}|", ""))
    return re.sub(r"(\w+)\|\{\[\1 \.\.\.\]\}", r"\1 [\1 ...]", metavar)


def command_as_given() -> str:
    """The command line of this process as a report can show it: names in place of absolute paths, and without
    ``--dashboard``, whose address may be a private one."""
    main = sys.modules["__main__"]
    program, *arguments = sys.argv
    if module := getattr(main, "__spec__", None):
        words = ["python", "-m", module.name.removesuffix(".__main__")]
    else:
        words = ["python"] * program.endswith(".py") + [program]
    hidden = {i for i, word in enumerate(arguments) if word.split("=")[0] == "--dashboard"}
    hidden |= {i + 1 for i in hidden if arguments[i] == "--dashboard"}
    words += [word for i, word in enumerate(arguments) if i not in hidden]
    return shlex.join(map(without_folder, words))


def without_folder(word: str) -> str:
    """``word``, or of an absolute path, alone or after an option's =, the last part."""
    option, equals, value = word.rpartition("=")
    return option + equals + (Path(value).name if Path(value).is_absolute() else value)


def whole_number(text: str) -> int:
    """The whole number that ``text`` is, as Python writes it, or as 1e6 or 2000.0; else ValueError."""
    with contextlib.suppress(ValueError):
        return int(text)
    if not re.fullmatch(r"[+-]?\d+(\.\d*)?([eE][+-]?\d{1,2})?", text):
        raise ValueError(f"{text!r} is not a whole number; write one such as 1000 or 1e6")
    number = Fraction(text)  # exact, as a float is not
    if number.denominator != 1:
        raise ValueError(f"{text} is not a whole number; write one such as 1000 or 1e6")
    return int(number)


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, or PyTorch on CPU or GPU, has run out of memory."""
    words = ("allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


@dataclass(frozen=True)
class Group:
    """A group of options."""

    about: str
    """What the options have in common, in one sentence."""
    names: Sequence[str]
    """The names of the configs' fields; those that a command doesn't have are left out."""


def values_of(config: Any) -> Iterator[tuple[type, str, Any]]:
    """The owner, name and value of each field of the dataclass instance ``config`` and of those in it."""
    for each in fields(config):
        value = getattr(config, each.name)
        yield from values_of(value) if is_dataclass(value) else [(type(config), each.name, value)]


@cache
def field_docstrings(kind: type) -> dict[str, str]:
    """The string below each field of a dataclass, in one line; also of fields that it inherits."""
    sources = [inspect.getsource(each) for each in reversed(kind.__mro__) if is_dataclass(each)]
    nodes = [node for source in sources for node in ast.parse(textwrap.dedent(source)).body]
    return {
        named.target.id: " ".join(said.value.value.split())
        for node in nodes
        if isinstance(node, ast.ClassDef)
        for named, said in pairwise(node.body)
        if isinstance(named, ast.AnnAssign) and isinstance(named.target, ast.Name)
        if isinstance(said, ast.Expr) and isinstance(said.value, ast.Constant)
        if isinstance(said.value.value, str)
    }


def grouped(config: Any, first: Sequence[str], groups: Mapping[str, Group]) -> type:
    """A dataclass of all options of ``config``: those called ``first`` on top, then each of ``groups`` under
    its title, then the options that are in none of them."""
    import tyro

    options = {name: (owner, value) for owner, name, value in values_of(config)}
    named = {name for group in groups.values() for name in group.names} | {*first}
    rest = Group("Further options.", [name for name in options if name not in named])

    def made(name: str) -> tuple[str, Any, Any]:
        owner, value = options[name]
        about = tyro.conf.arg(help=field_docstrings(owner).get(name, ""), prefix_name=False)
        return name, Annotated[annotations_of(owner)[name], about], field(default=value)

    parts: list[tuple[str, Any, Any]] = [made(name) for name in first]
    for title, group in {**groups, OTHER: rest}.items():
        members = [made(name) for name in group.names if name in options and name not in first]
        if members:
            part = make_dataclass(title, members, frozen=True, namespace={"__doc__": group.about})
            parts.append((title, part, field(default_factory=part)))
    kind = type(config)
    return make_dataclass(kind.__name__, parts, frozen=True, namespace={"__doc__": kind.__doc__})


def with_values(config: Any, values: Mapping[str, Any]) -> Any:
    """A copy of ``config`` and of the dataclasses in it, with these values; raises what they raise."""
    changes = {}
    for each in fields(config):
        inner = getattr(config, each.name)
        changes[each.name] = with_values(inner, values) if is_dataclass(inner) else values[each.name]
    return replace(config, **changes)
