"""Parse command lines, and end a program with one line for errors that the user can correct."""

import contextlib
import io
import os
import re
import shlex
import signal
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from memformers.common.errors import UserError
from memformers.common.option_groups import grouped, with_values


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """End the program with one line and exit code 2 for a mistake of the user, with exit code 130 for Ctrl-C,
    and with a traceback and the request to report it for a mistake of memformers."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # one that can't show a character shows another
            stream.reconfigure(errors="replace")
    warnings.showwarning = lambda message, *_: print(f"NOTE: {message}", file=sys.stderr)
    try:
        yield
    except BrokenPipeError:  # whoever read has gone, as with | head
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python flushes once more when it ends
        sys.exit(128 + signal.SIGPIPE)
    except (UserError, OSError, UnicodeEncodeError) as error:  # the last of a path that no file can have
        print(f"error: {error}", file=sys.stderr)
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
        said = "error: this is a mistake in memformers and not yours; please report it with the lines above."
        print(said, file=sys.stderr)
        sys.exit(1)


def flush_nowhere() -> None:
    """Redirect standard output to the null device: its reader has ended, and Python flushes it once more when
    it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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

    whole_numbers = ConstructorRegistry()

    @whole_numbers.primitive_rule
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

    groups = getattr(kind, "groups", None)
    if groups:
        config = kind() if default is None else default
        kind, default = grouped(config, kind.first, groups), None
    said = io.StringIO()
    extra = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said), whole_numbers:
            parsed = tyro.cli(kind, args=arguments, prog=prog, **extra)
        return with_values(config, parsed) if groups else parsed
    except SystemExit as end:
        cause = end.__context__
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            cause = cause.__context__
        print(said.getvalue(), end="", file=sys.stderr)
        raise


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
