"""The classes that a config's ``model`` may name: built in, or your memory, ``my_memory.py:Averages``. A
checkpoint never imports code by itself: its class must be named in this process, by an option, an arm, or in
Python."""

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from memformers.common.files import IS_READ, user_path
from memformers.common.text import USER_MODULES, UserError

Kind = TypeVar("Kind", bound=type)

MODELS: dict[str, Any] = {}
"""The classes that are known in this process, by the name that configs have for them."""


@dataclass(frozen=True)
class NoSettings:
    """The settings of a memory that has none."""


NO_SETTINGS = NoSettings()


def register_memory(kind: Kind) -> Kind:
    """Class decorator that makes the memory ``kind`` known to ``ModelConfig(model=…)``, as
    ``my_memory.py:Averages`` or ``package.module:Averages``. Raises ValueError if it does not derive from
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
    name_of(kind)
    return kind


def lookup(model: str) -> Any:
    """The class that ``model`` names. Raises UserError for one that was not named in this process."""
    if model in MODELS:
        return MODELS[model]
    if ":" in model:
        raise UserError(
            f"model={model!r} is code, which runs only if you name it: pass --model {model} with the path of "
            f"its file, or in Python the class itself as model."
        )
    known = ", ".join(repr(name) for name in MODELS if ":" not in name)
    raise UserError(f"expected model to be one of {known}, or your my.py:Class, got model={model!r}.")


def name_of(model: Any) -> str:
    """The name of a ``model`` in configs: a built-in name; a class, which becomes known; or an import path,
    which is imported unless a config is being read from a file."""
    if isinstance(model, str):
        if ":" not in model or model in MODELS or IS_READ.get():
            return model
        model = load_class(model)
    if not isinstance(model, type):
        return model  # which the config refuses
    if known := next((name for name, kind in MODELS.items() if kind is model), ""):
        return known
    path = import_path(model)
    if not hasattr(model, "memory_sizes"):
        raise UserError(f"{path} is not a memory; derive it from memformers.CustomMemory.")
    name = Path(path).name
    if (before := import_path(MODELS.get(name, model))) != path:
        raise UserError(f"{before} and {path} would have the same name, {name}; rename one file.")
    USER_MODULES.add(model.__module__)
    MODELS[name] = model
    return name


def load_class(import_path: str) -> type:
    """The class at ``FILE.py:Class`` or ``package.module:Class``; else UserError, or the module's error."""
    module_name, _, name = import_path.rpartition(":")
    if not module_name or not name:
        raise UserError(f"{import_path!r} is no memory; name its file and class, as my_memory.py:Averages.")
    path, is_file = user_path(module_name).resolve(), module_name.endswith(".py")
    if is_file and not path.is_file():
        raise UserError(f"{path} does not exist; name the file with your class, as my_memory.py:Averages.")
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
        raise UserError(f"importing {import_path} failed: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        classes = [n for n, x in vars(module).items() if isinstance(x, type) and x.__module__ == module_name]
        listed = ", ".join(classes) or "no classes"
        raise UserError(f"{import_path} does not name a class; the module defines {listed}.")
    return kind


def import_path(kind: type) -> str:
    """How another process can import a class: ``FILE.py:Class``, or ``package.module:Class``."""
    file: str | None = getattr(sys.modules.get(kind.__module__), "__file__", None)
    module = kind.__module__ if "." in kind.__module__ or file is None else Path(file).resolve()
    return f"{module}:{kind.__qualname__}"


def short_name(model: str) -> str:
    return model.rpartition(":")[2]
