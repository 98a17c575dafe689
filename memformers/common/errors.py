"""Errors that the user can correct."""

USER_MODULES: set[str] = set()
"""The names of the modules with a user's own classes: what they raise is no mistake of memformers."""


class UserError(ValueError):
    """An error that the user can correct, in one line: what was expected, what was given, what to do.

    Any other ValueError that reaches the command line is a mistake of memformers, and shows its traceback.
    """


class TrainingsFailed(UserError):
    """Trainings of an experiment failed; what it says names them. The others went on, and are reported."""
