"""Command lines: how they are parsed, and how a program of ours ends when something is wrong: with one
line, never with a traceback."""

import contextlib
import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import tyro


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """End the program with one line and exit code 2 for a mistake of the user's, 130 for Ctrl-C."""
    warnings.showwarning = lambda message, *_: print(f"NOTE: {message}", file=sys.stderr)
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        said = (str(error) or "out of memory").splitlines()[0]
        print(f"error: not enough memory; a smaller model, batch or segment needs less. ({said})",
              file=sys.stderr)  # fmt: skip
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def parse_arguments(
    kind: Any, arguments: Sequence[str] | None = None, *, prog: str | None = None, default: Any = None
) -> Any:
    """The dataclass ``kind``, or one of a union, from the command line, on top of ``default``.

    Where a config of ours refuses a value, its own ValueError is raised again: it says more than tyro's box
    around it. tyro itself answers --help and unknown options, and exits.
    """
    said = io.StringIO()
    extra = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(kind, args=arguments, prog=prog, **extra)
    except SystemExit as end:
        cause = end.__context__
        while cause is not None:
            if isinstance(cause, ValueError) and _is_ours(cause):
                raise cause from None
            cause = cause.__context__
        print(said.getvalue(), end="", file=sys.stderr)
        raise


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how Python, or PyTorch on CPU or GPU, say that memory is used up."""
    words = ("allocate memory", "not enough memory", "out of memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _is_ours(error: BaseException) -> bool:
    """Whether it was raised in this package, and not by int() or the like on the way to it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    return str(module).startswith("memformers.")
