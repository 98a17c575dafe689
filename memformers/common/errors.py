"""What went wrong by no fault of ours."""


class UserError(ValueError):
    """A mistake that the user can mend, said in one line: what was expected, what came, what to do.

    Any other ValueError that reaches the command line is a mistake of ours, and shows its traceback.
    """


class TrainingsFailed(UserError):
    """Trainings of an experiment failed; what it says names them. The others went on, and are reported."""
