"""Which class a name in a config stands for: built in, or your own, ``my_memory.py:Averages``. A checkpoint
never imports code by itself: its class must be named in this process, by an option, an arm, or in Python."""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memformers.common.errors import USER_MODULES, UserError
from memformers.common.files import IS_READ

Kind = TypeVar("Kind", bound=type)

PARTS = ("gate", "compression", "compression_loss")
"""The settings, beside the model, that may name a class of your own: a PyTorch module."""
REGISTRY: dict[tuple[str, str], Any] = {}
"""The classes that are known in this process, by the setting and the name that configs have for them."""


@dataclass(frozen=True)
class NoSettings:
    """The settings of a memory that has none of its own."""


NO_SETTINGS = NoSettings()


def register_memory(kind: Kind) -> Kind:
    """A decorator, after which ``ModelConfig(model=…)`` knows ``kind``, a memory of yours, as
    ``my_memory.py:Averages`` or ``package.module:Averages``. Raises ValueError if it is not derived from
    [`memformers.CustomMemory`][].

    Examples:
        >>> from memformers import CustomMemory, MemorySizes, ModelConfig, register_memory
        >>> @register_memory
        ... class Forgets(CustomMemory):
        ...     @classmethod
        ...     def memory_sizes(cls, config):
        ...         return [MemorySizes(mem_len=16)] * config.n_layers
        >>> ModelConfig(model=Forgets).remembered_positions
        16
    """
    name_of(kind, "model")
    return kind


def lookup(setting: str, name: str) -> Any:
    """The class that ``setting`` calls so. Raises UserError for one that was not named in this process."""
    if (setting, name) in REGISTRY:
        return REGISTRY[setting, name]
    if ":" in name:
        raise UserError(
            f"{setting}={name!r} is code that runs only if you name it; give --{setting.replace('_', '-')} "
            f"{name} with the path of its file, or in Python the class itself as {setting}."
        )
    known = ", ".join(repr(n) for of, n in REGISTRY if of == setting and ":" not in n)
    raise UserError(
        f"expected {setting} to be one of {known}, or your own, my.py:Class, got {setting}={name!r}."
    )


def name_of(value: Any, setting: str = "model") -> str:
    """The name that configs have for the ``value`` of a ``setting``: a built-in name; a class, which becomes
    known; or the place of one, which is imported unless a config is being read from a file."""
    if isinstance(value, str):
        if ":" not in value or (setting, value) in REGISTRY or IS_READ.get():
            return value
        value = import_class(value)
    if not isinstance(value, type):
        return value  # which the config refuses
    place = place_of(value)
    if setting == "model" and not hasattr(value, "memory_sizes"):
        raise UserError(f"{place} is not a memory; derive it from memformers.CustomMemory.")
    name = Path(place).name
    if (before := place_of(REGISTRY.get((setting, name), value))) != place:
        raise UserError(f"{before} and {place} would have one name, {name}; rename a file.")
    USER_MODULES.add(value.__module__)
    REGISTRY[setting, name] = value
    return name


def import_class(place: str) -> type:
    """The class at a ``place``, whose module is imported unless it is already; else UserError, or its own."""
    module_name, _, name = place.rpartition(":")
    path, is_file = Path(module_name).resolve(), module_name.endswith(".py")
    if is_file and not path.is_file():
        raise UserError(f"there is no file {path}; name the file with your class, as my_memory.py:Averages.")
    module_name = f"memformers_own_{path.with_suffix('')}" if is_file else module_name
    folder = str(path.parent if is_file else Path.cwd())
    USER_MODULES.add(module_name)
    sys.path.insert(0, folder)  # so that it may import its neighbours
    try:
        if is_file and module_name not in sys.modules:
            spec = importlib.util.spec_from_file_location(module_name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[module_name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module_name])
        module = importlib.import_module(module_name)
    except BaseException as error:
        sys.modules.pop(module_name, None)
        if not isinstance(error, ImportError | SyntaxError | SystemExit):
            raise
        raise UserError(f"{place} can't be imported: {type(error).__name__}: {error}; mend it.") from error
    finally:
        sys.path.remove(folder)
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        own = [n for n, x in vars(module).items() if isinstance(x, type) and x.__module__ == module_name]
        raise UserError(f"{place} is no class; its module has {', '.join(own) or 'none'}.")
    return kind


def place_of(kind: type) -> str:
    """How another process can import a class: ``FILE.py:Class``, or ``package.module:Class``."""
    file: str | None = getattr(sys.modules.get(kind.__module__), "__file__", None)
    module = kind.__module__ if "." in kind.__module__ or file is None else Path(file).resolve()
    return f"{module}:{kind.__qualname__}"


def places(settings: Mapping[str, Any]) -> list[str]:
    """What another process is to import for a model's ``settings``, as ``gate=FILE.py:Class``."""
    own = [(setting, str(settings.get(setting))) for setting in ("model", *PARTS)]
    return [f"{setting}={place_of(REGISTRY[setting, name])}" for setting, name in own if ":" in name]


def short_name(model: str) -> str:
    """The name of a model without the file or module that it is from."""
    return model.rpartition(":")[2]
