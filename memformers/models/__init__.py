"""Models, and the modules that they are made of."""

# So that every model is in the registry before a config names it.
from memformers.models import compressive, custom_memory, selective, transformer_xl  # noqa: F401
