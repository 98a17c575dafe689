"""Imports run one way between the rooms of the package."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "memformers"
BELOW_TRAINING = {"common", "data", "models", "runs", "runs.load", "generation", "convert", "evaluation"}
MAY_IMPORT = {
    "common": set(),
    "kernels": set(),
    "runs": {"common"},  # and so never a model
    "data": {"runs", "common"},
    "models": {"kernels", "common"},
    "tracking": {"runs", "common"},
    "dashboard": {"report", "tracking", "runs", "common"},
    "report": {"runs", "common"},  # never a model
    "generation": {"models", "data", "kernels", "common"},
    "convert": {"models", "data", "common"},
    "runs.load": {"convert", "models", "data", "runs", "common"},  # the model of a run
    "evaluation": BELOW_TRAINING - {"evaluation"},
    "training": BELOW_TRAINING | {"tracking"},
    "comparison": BELOW_TRAINING | {"tracking", "training", "report"},
    "integrations": BELOW_TRAINING,
    "commands": BELOW_TRAINING | {"kernels", "tracking", "training", "report", "comparison", "dashboard"},
    "cli": {"commands", "common"},
    "__main__": {"cli"},
}
"""Which rooms each room may import: folders, or files with a separate line."""


def imports(path):
    """Every module that a file imports, inside of functions too; not what it only names in annotations."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    conditions = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    for_types = [node for node in conditions if ast.unparse(node.test) == "TYPE_CHECKING"]
    left_out = {id(n) for node in for_types for n in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and id(node) not in left_out:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and id(node) not in left_out:
            assert node.level == 0, f"{path}: imports here name the whole module"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files():
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        if inside.parts != ("__init__.py",):  # the public names, imported when they are used
            yield path, room_of(inside.with_suffix("").parts)


def room_of(parts):
    """The room of a module with the dotted name ``parts`` below the package."""
    file = ".".join(parts[:2])
    return file if file in MAY_IMPORT else parts[0]


def test_each_room_imports_only_those_below_it():
    wrong = []
    for path, room in files():
        for module in imports(path):
            root, *parts = module.split(".")
            if root != "memformers" or not parts:
                continue
            imported = room_of(parts)
            if imported in MAY_IMPORT and imported not in MAY_IMPORT[room] | {room}:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert wrong == []


def test_no_file_is_imported_by_one_that_it_imports():
    names = {path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path, _ in files()}
    names = {path: name.removesuffix(".__init__") for path, name in names.items()}
    modules = set(names.values())
    graph = {
        name: {m if m in modules else m.rpartition(".")[0] for m in imports(path)} & modules - {name}
        for path, name in names.items()
    }
    assert sum(map(len, graph.values())) > 200
    tuple(TopologicalSorter(graph).static_order())  # CycleError, which names them, for a circle


def test_kernels_need_nothing_but_torch():
    roots = {m.partition(".")[0] for p, room in files() if room == "kernels" for m in imports(p)}
    assert roots - sys.stdlib_module_names == {"memformers", "torch"}
