"""The earlier place of errors."""

from memformers.common.text import USER_MODULES, TrainingsFailed, UserError

__all__ = ["USER_MODULES", "TrainingsFailed", "UserError"]
