"""Errors that users can correct, and whose code an unexpected exception comes from."""

USER_MODULES: set[str] = set()
"""The names of the modules with a user's classes: an exception from there is no bug of memformers."""


class UserError(ValueError):
    """An error that users can correct, in one line: what was expected, what was received, how to fix it."""


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


class TrainingsFailed(UserError):
    """Some trainings of an experiment failed, which the message names; the others are in the report."""
