"""The classes that a config's ``model`` may name: built in, or your memory, ``my_memory.py:Averages``. A
checkpoint never imports code by itself: its class must be named in this process, by an option, an arm, or in
Python."""

import ast
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from memformers.common.errors import USER_MODULES, UserError
from memformers.common.files import IS_READ, user_path

Kind = TypeVar("Kind", bound=type)

MODELS: dict[str, Any] = {}
"""The classes that are known in this process, by their names in configs."""


@dataclass(frozen=True)
class NoSettings:
    """The settings of a memory that has none."""


NO_SETTINGS = NoSettings()


def register_memory(kind: Kind) -> Kind:
    """Class decorator that makes the memory ``kind`` known to ``ModelConfig(model=…)``, as
    ``my_memory.py:Averages`` or ``package.module:Averages``. Raises ValueError if it does not derive from
    [`memformers.MemoryRule`][].

    Examples:
        >>> from memformers import LayerMemory, MemoryRule, ModelConfig, register_memory
        >>> @register_memory
        ... class Forgets(MemoryRule):
        ...     def update(self, past, x, context):
        ...         return LayerMemory(x[:0], x[:0]), None
        >>> ModelConfig(model=Forgets).model.endswith(":Forgets")
        True
    """
    register_model(kind)
    return kind


def lookup(model: str) -> Any:
    """The class that ``model`` names. Raises UserError for one that was not named in this process."""
    if model in MODELS:
        return MODELS[model]
    if ":" in model:
        raise UserError(
            f"model={model!r} is code, which runs only if you name it: pass {model}, with the path of its "
            f"file, as --model, in an arm as model=, or in Python the class itself as model."
        )
    built_in = ", ".join(repr(name) for name in MODELS if ":" not in name)
    raise UserError(f"expected model to be one of {built_in}, or your my.py:Class, got model={model!r}.")


def register_model(model: Any) -> str:
    """The name of a ``model`` in configs: a built-in name; a class, which becomes known; or an import path,
    which is imported unless a config is being read from a file."""
    # A file that is read never imports code: a name in it must be known already.
    if isinstance(model, str):
        if ":" not in model or model in MODELS or IS_READ.get():
            return model
        model = load_class(model)
    if not isinstance(model, type):
        return model  # which the config refuses
    for name, kind in MODELS.items():
        if kind is model:
            return name
    # The name omits the folder, so that a config works on any machine.
    path = import_path(model)
    if not (hasattr(model, "sizes") and hasattr(model, "update")):
        raise UserError(f"{path} is not a memory; derive it from memformers.MemoryRule.")
    name = Path(path).name
    known_path = import_path(MODELS.get(name, model))
    if known_path != path:
        raise UserError(f"{known_path} and {path} would have the same name, {name}; rename one file.")
    USER_MODULES.add(model.__module__)
    MODELS[name] = model
    return name


def import_memory(model: str) -> str:
    """Import the memory that a user names by its import path; returns its name in configs. A built-in
    ``model`` is its own name. UserError if a memory in another file has the same name."""
    if ":" not in model:
        return model
    location = model.rpartition(":")[0]
    if model in MODELS and not user_path(location).is_file():  # it was named before, in another folder
        return model
    return register_model(load_class(model))


def load_class(import_path: str) -> type:
    """The class at ``FILE.py:Class``, ``package.module:Class`` or ``FOLDER/package.module:Class``; else
    UserError, or the module's error."""
    location, _, name = import_path.rpartition(":")
    if not location or not name:
        raise UserError(
            f"expected a memory as FILE.py:Class, such as my_memory.py:Averages, got {import_path!r}."
        )
    try:
        is_file = location.endswith(".py")
        module = import_file(user_path(location)) if is_file else import_named(location)
    except (ImportError, SyntaxError, SystemExit) as error:
        raise UserError(f"importing {import_path} failed: {type(error).__name__}: {error}") from error
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        defined = []
        for attribute, value in vars(module).items():
            if isinstance(value, type) and value.__module__ == module.__name__:  # not imported there
                defined.append(attribute)
        listed = ", ".join(defined) or "no classes"
        raise UserError(f"{import_path} does not name a class; the module defines {listed}.")
    return kind


def import_file(path: Path) -> ModuleType:
    """The module in the file at ``path``, which is imported once, whatever paths lead to it."""
    path = real_path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist; name the file with your class, as my_memory.py:Averages.")
    # Python takes a dot in a module's name for a package, and two files may have the same name.
    word = re.sub(r"\W", "_", path.stem)
    checksum = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    name = f"memformers_own_{word}_{checksum}"
    if sys.modules.get(name):
        return sys.modules[name]
    # Reuse it, whoever imported it: two classes of one file must share a module.
    for module in list(sys.modules.values()):
        if file_of(module) == path:
            return module
    # As importlib's documentation imports a file; a module whose code fails is forgotten.
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    check_neighbours(path)
    USER_MODULES.add(name)
    sys.modules[name] = module
    try:
        with importing_from(path.parent):  # it may import its neighbours
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def check_neighbours(path: Path) -> None:
    """Raise UserError if the file at ``path`` imports a neighbor that has the name of another memory's
    neighbor, but different code. Python keeps one module per name, so the file would get the wrong one."""
    files = [file_of(sys.modules.get(name)) for name in USER_MODULES]
    folders_of_memories = {file.parent for file in files if file}
    for name in imported_names(path):
        neighbour = path.parent / f"{name}.py"
        known = file_of(sys.modules.get(name))
        if known is None or known.parent not in folders_of_memories or not neighbour.is_file():
            continue
        if known.read_bytes() != neighbour.read_bytes():
            raise UserError(
                f"{path} imports {name} from its folder, but another memory has imported {known}; rename one "
                f"of these files."
            )


def imported_names(path: Path) -> list[str]:
    """The packages, or modules outside of any, that the file at ``path`` imports; none for a broken file."""
    names = []
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # which its import says
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return [name.partition(".")[0] for name in names]


def import_named(location: str) -> ModuleType:
    """The module called ``package.module`` or ``FOLDER/package.module``, without a folder the current one."""
    parent, name = os.path.split(location)
    # Two dots in a row, or one at an end, name nothing.
    if not all(name.split(".")):
        raise UserError(f"{location!r} is no module; name a file, as my_memory.py:Averages.")
    USER_MODULES.add(name)
    folder = user_path(parent).resolve()
    with nullcontext() if str(folder) in sys.path else importing_from(folder):
        module = importlib.import_module(name)
    # Python keeps one module per name, and it may come from another folder.
    found_in = import_folder(module)
    if parent and found_in and found_in.resolve() != folder:
        raise UserError(
            f"expected {name} in {folder}, but Python has imported {name} from {found_in}; rename one of the "
            f"packages."
        )
    return module


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """A block whose imports look into ``folder`` first."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def import_path(kind: type) -> str:
    """How another process can import a class, in any working directory: ``FILE.py:Class``, or
    ``FOLDER/package.module:Class``."""
    module = sys.modules.get(kind.__module__)
    # FILE.py:Class
    file = file_of(module)
    if file is not None:
        return f"{file}:{kind.__qualname__}"
    name = module_name(module) if module else kind.__module__
    folder = import_folder(module)
    if folder is None or name == "__main__":  # no other process can
        return f"{name}:{kind.__qualname__}"
    return f"{folder}/{name}:{kind.__qualname__}"


def import_folder(module: ModuleType | None) -> Path | None:
    """The folder from which Python imports ``module`` by its name; None if it has no file."""
    source = getattr(module, "__file__", None)
    if module is None or source is None:
        return None
    n_packages = module_name(module).count(".")
    if hasattr(module, "__path__"):  # the file is the package's __init__.py
        n_packages += 1
    return Path(os.path.abspath(source)).parents[n_packages]


def check_importable(model: str) -> None:
    """Raise UserError for a memory that no other process finds: in a notebook, a terminal or a function."""
    if ":" not in model:
        return
    kind = lookup(model)
    if import_path(kind).startswith("__main__:") or "." in kind.__qualname__:
        raise UserError(
            f"{kind.__qualname__} can't be imported by the processes that train it; move it to the top level "
            f"of a file, and name it as my_memory.py:{kind.__name__}."
        )


def path_from_here(kind: type) -> str:
    """The import path of a class, as short as it can be in the current folder."""
    path = Path(import_path(kind))
    current = Path.cwd()
    return str(path.relative_to(current) if path.is_relative_to(current) else path)


def file_of(module: object) -> Path | None:
    """The file of a module that Python can import by its file alone: a .py outside of any package."""
    if not isinstance(module, ModuleType) or "." in module_name(module) or "__path__" in vars(module):
        return None
    file = vars(module).get("__file__")
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    return real_path(Path(file))


def module_name(module: ModuleType) -> str:
    """The name by which a module can be imported, also of one that is run by ``python -m``."""
    spec = vars(module).get("__spec__")
    return spec.name if module.__name__ == "__main__" and spec else module.__name__


def real_path(path: Path) -> Path:
    """The ``path`` without links, so that a file has one name. A link stays if only the link ends with .py:
    stores by checksum link to files with other names."""
    real = path.resolve()
    return real if real.suffix == ".py" else path.parent.resolve() / path.name


def short_name(model: str) -> str:
    return model.rpartition(":")[2]
