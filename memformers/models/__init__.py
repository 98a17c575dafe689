"""Models, and the modules that they are made of."""

# So that every model is in the registry before a config names it.
from memformers.models import rules  # noqa: F401
