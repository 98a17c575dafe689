"""Which class a name in a config stands for: a built-in model, or a class of one's own from a file or package
as model, gate, compression or compression loss.

``my_memory.py:Averages`` is the class of a file, ``package.module:Class`` that of a module. Nothing is
imported because a checkpoint names it: the class must be named in this process, by an option such as
``--model``, by an arm, or in Python.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memformers.common.errors import UserError
from memformers.common.fields import check_value
from memformers.common.files import IS_READ

if TYPE_CHECKING:
    from torch import Tensor, nn

    from memformers.models.stack import MemoryStack

BUILT_IN = {
    "transformer": "memformers.models.transformer_xl:WithoutMemory",
    "transformer-xl": "memformers.models.transformer_xl:TransformerXL",
    "compressive": "memformers.models.compressive:CompressiveTransformer",
}
"""The classes of the models that come with the package."""
MAY_USE = {"mem_len", "c_mem_len", "compression_rate", "tbptt"}
"""The settings of built-in models that a memory of one's own may use too."""
PARTS = ("gate", "compression", "compression_loss")
"""The settings, beside the model, that may name a class of one's own: a PyTorch module."""
_KINDS: dict[tuple[str, str], Any] = {}
"""The classes that were imported in this process, by the setting and the name that configs have for them."""
_TOLD: dict[str, str] = {}
"""How another process names those of the user's own."""


@dataclass(frozen=True)
class NoSettings:
    """The settings of a memory that has none of its own."""


NO_SETTINGS = NoSettings()


def kind_of(model: str) -> "type[MemoryStack]":
    """The class of the model called so. Raises UserError for one that isn't built in and was not named in
    this process."""
    if model in BUILT_IN and ("model", model) not in _KINDS:
        module, _, name = BUILT_IN[model].partition(":")
        _KINDS["model", model] = getattr(importlib.import_module(module), name)
    if ("model", model) in _KINDS or ":" in model:
        return own_kind(model, "model")
    raise UserError(
        f"expected model to be one of {', '.join(map(repr, BUILT_IN))}, or a memory of your own such as "
        f"'my_memory.py:Averages', got model={model!r}; the default is 'transformer-xl'."
    )


def own_kind(name: str, setting: str) -> Any:
    """The class that ``setting`` calls so. Raises UserError for one that was not named in this process."""
    if (setting, name) in _KINDS:
        return _KINDS[setting, name]
    option = f"--{setting.replace('_', '-')} {name}"
    raise UserError(
        f"{setting}={name!r} is code that runs only if you name it; give {option} with the path of its file, "
        f"or in Python the class itself as {setting}."
    )


def check_choice(setting: str, value: object, built_in: Any, default: object) -> None:
    """Raise UserError unless the ``value`` of one of [`PARTS`][] is one of the ``built_in`` ones, or a class
    that was named."""
    if isinstance(value, str) and ":" in value:
        own_kind(value, setting)
    else:
        check_value(setting, value, built_in, default)


def own_part(name: str, setting: str, *arguments: Any) -> "nn.Module":
    """An instance of the class that ``setting``, one of [`PARTS`][], calls so."""
    kind = own_kind(name, setting)
    with own_code(kind):
        part: nn.Module = kind(*arguments)
    part.is_own = True  # type: ignore[assignment]
    return part


def own_output(part: "nn.Module", shape: Sequence[int], said: str, *given: Any) -> "Tensor":
    """What ``part`` returns for what is ``given``, a tensor of this ``shape``, which is ``said``, such as
    ``[S, B, D]``. Raises UserError, with file and line, for another one, and for what the part raises."""
    kind = type(part)
    with own_code(kind):
        output: Tensor = part(*given)
    check_returned(kind, output, shape, said)
    return output


def check_returned(kind: type, output: Any, shape: Sequence[int], said: str) -> None:
    """Raise UserError, with file and line, unless the ``forward`` of a class returned a tensor of this
    ``shape``, which is ``said``."""
    if getattr(output, "shape", None) != shape:
        came = list(output.shape) if hasattr(output, "shape") else type(output).__name__
        raise UserError(f"{place_of(kind)}.forward returned {came}, expected {said} = {list(shape)}.")


def named(model: "str | type", setting: str = "model") -> str:
    """The name that configs have for a ``setting``: a built-in name, a class, or the place of one, as
    ``FILE.py:Class`` or ``package.module:Class``, which is imported. A config that is read from a file
    imports nothing."""
    if isinstance(model, type):
        return _named_class(model, setting)
    if not isinstance(model, str) or ":" not in model or (setting, model) in _KINDS or IS_READ.get():
        return model
    place, _, name = model.rpartition(":")
    if place.endswith(".py"):
        module = module_of_file(Path(place))
    else:
        with _folder_on_path(Path.cwd()), _plain_failure(model, place):
            module = importlib.import_module(place)
    kind = getattr(module, name, None)
    if not isinstance(kind, type):
        classes = [
            n for n, x in vars(module).items() if isinstance(x, type) and x.__module__ == module.__name__
        ]
        near = difflib.get_close_matches(name, classes, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(classes) or 'none'}."
        what = "has no class" if kind is None else f"has a {type(kind).__name__} and no class"
        raise UserError(f"{place} {what} {name!r}; {hint}")
    return _named_class(kind, setting)


def told(settings: Mapping[str, Any]) -> list[str]:
    """What another process is to be told to know the classes of one's own in a model's ``settings``: each
    setting and where its class is, as ``gate=FILE.py:Class``."""
    own = {setting: settings.get(setting) for setting in ("model", *PARTS)}
    return [f"{setting}={_TOLD[name]}" for setting, name in own.items() if name in _TOLD]


def code_of(config: object) -> dict[str, str]:
    """The SHA-256 of each file, by its name, that defines the model of a ``config``, or a part of it; none of
    what is built in, and of a class without a file."""
    own = {setting: getattr(config, setting) for setting in ("model", *PARTS)}
    files = [_file_of(own_kind(name, setting)) for setting, name in own.items() if ":" in name]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file}


def note_changed_code(config: object, saved: Any, place: Path) -> None:
    """Warn for each file of [`code_of`][] that isn't as it was when ``place`` was ``saved``."""
    for name, digest in code_of(config).items():
        if isinstance(saved, Mapping) and saved.get(name) != digest:
            said = f"{name} has changed since {place} was saved, so the model may compute something else."
            warnings.warn(said, stacklevel=3)


def module_of_file(path: Path) -> ModuleType:
    """The module in ``path``, imported once and again only when the file has changed. Raises UserError, with
    the line, for a file that is missing or doesn't import."""
    path = path.resolve()
    if not path.is_file():
        raise UserError(
            f"there is no file {path}; name the file with your class, such as my_memory.py:Averages."
        )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    name = f"memformers_own_{re.sub(r'[^0-9A-Za-z]', '_', path.stem)}"
    before = sys.modules.get(name)
    if before is not None and (before.__file__, before.__dict__.get("__sha256__")) == (str(path), digest):
        return before
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    module.__dict__["__sha256__"] = digest
    try:
        with _folder_on_path(path.parent), _plain_failure(str(path), name):
            spec.loader.exec_module(module)
    except UserError:
        del sys.modules[name]
        raise
    return module


@contextmanager
def own_code(kind: type) -> Iterator[None]:
    """A block that runs code of a class of the user's own: what it raises becomes a UserError that names its
    file and line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{_where(error, str(_file_of(kind) or kind.__name__))}: {_said(error)}") from error


def place_of(kind: type) -> str:
    """The file and the line in which a class is defined, as an error names them."""
    with suppress(OSError, TypeError):
        return f"{_file_of(kind)}, line {inspect.getsourcelines(kind)[1]}: {kind.__name__}"
    return kind.__name__


def short_name(model: str) -> str:
    """The name of a model without the file or module that it is from."""
    return model.rpartition(":")[2]


def _file_of(kind: type) -> Path | None:
    """The file that defines a class; None for one that was typed into Python."""
    with suppress(TypeError):
        file = Path(inspect.getsourcefile(kind) or "")
        return file if file.is_file() else None
    return None


def _named_class(kind: type, setting: str) -> str:
    for (of, name), other in _KINDS.items():
        if other is kind and of == setting:
            return name
    _check_kind(kind) if setting == "model" else _check_part(kind, setting)
    path = None if "." in kind.__module__ else _file_of(kind)
    name = f"{path.name if path else kind.__module__}:{kind.__qualname__}"
    told_as = f"{path or kind.__module__}:{kind.__qualname__}"
    if _TOLD.get(name, told_as) != told_as:
        raise UserError(
            f"{told_as} and {_TOLD[name]} would have the same name, {name}; rename one of the files."
        )
    _KINDS[setting, name], _TOLD[name] = kind, told_as
    return name


def _check_part(kind: type, setting: str) -> None:
    """Raise UserError, with file and line, for a class that is no PyTorch module with a ``forward``."""
    from torch import nn

    what = setting.replace("_", " ")
    if not issubclass(kind, nn.Module):
        raise UserError(f"{place_of(kind)} is not a {what}; derive it from torch.nn.Module.")
    if kind.forward is nn.Module.forward:
        raise UserError(f"{place_of(kind)} has no forward, which every {what} must define.")


def _check_kind(kind: type) -> None:
    """Raise UserError, with file and line, for a class that is no memory, or lacks what one must define."""
    from memformers.models.config import ModelConfig
    from memformers.models.own_memory import OwnMemory

    place = place_of(kind)
    if not issubclass(kind, OwnMemory):
        raise UserError(f"{place} is not a memory; derive it from memformers.OwnMemory.")
    defined = {name for each in kind.__mro__[: kind.__mro__.index(OwnMemory)] for name in vars(each)}
    for names in (("layer_lengths",), ("grow", "remember")):
        if defined.isdisjoint(names):
            raise UserError(f"{place} has no {' or '.join(names)}, which every memory must define.")
    if other := set(kind.uses) - MAY_USE:
        raise UserError(
            f"{place}.uses has {', '.join(map(repr, sorted(other)))}; expected some of "
            f"{', '.join(sorted(MAY_USE))}."
        )
    settings = kind.Config
    if not is_dataclass(settings) or not settings.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise UserError(f"{place}.Config is not a frozen dataclass; write @dataclass(frozen=True) above it.")
    taken = {each.name for each in fields(ModelConfig)}
    for each in fields(settings):
        if each.default is MISSING and each.default_factory is MISSING:
            raise UserError(f"{place}.Config: {each.name} has no default; give it one.")
        if each.name in taken:
            raise UserError(f"{place}.Config: {each.name} is a setting of every model; choose another name.")


@contextmanager
def _folder_on_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextmanager
def _plain_failure(file: str, module: str) -> Iterator[None]:
    """A block that imports a ``module``: what it raises becomes a UserError that names the file."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{_where(error, file)}: it can't be imported: {_said(error)}") from error


def _where(error: BaseException, file: str) -> str:
    """The ``file``, and the line in it at which ``error`` was raised, if it was raised there."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"{file}, line {error.lineno}"
    lines, trace = [], error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f"{file}, line {lines[-1]}" if lines else file


def _said(error: BaseException) -> str:
    first = error.msg if isinstance(error, SyntaxError) else " ".join(str(error).split())
    return f"{type(error).__name__}: {first}"
