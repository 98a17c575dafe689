"""Imports run one way between the rooms of the package."""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "memformers"
BELOW_TRAINING = {"common", "data", "models", "runs", "runs.load", "generation", "convert", "evaluation"}
# Which rooms each room may import: folders, or files with a separate line.
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


class Imports(ast.NodeVisitor):
    """The modules that a file imports, inside of functions too; not those that only annotations need."""

    def __init__(self):
        self.modules = set()

    def visit_If(self, node):
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self.generic_visit(node)

    def visit_Import(self, node):
        for alias in node.names:
            self.modules.add(alias.name)

    def visit_ImportFrom(self, node):
        assert node.level == 0, f"from {node.module}: imports here name the whole module"
        for alias in node.names:
            self.modules.add(f"{node.module}.{alias.name}")


@cache
def imports(path):
    visitor = Imports()
    visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
    return visitor.modules


def files():
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(PACKAGE)
        # The package itself imports public names when they are used.
        if inside.parts != ("__init__.py",):
            yield path, room_of(inside.with_suffix("").parts)


def module_of(path):
    """The dotted name of a file's module."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def room_of(parts):
    """The room of a module with the dotted name ``parts`` below the package."""
    file = ".".join(parts[:2])
    return file if file in MAY_IMPORT else parts[0]


def test_each_room_imports_only_those_below_it():
    wrong = []
    for path, room in files():
        for module in sorted(imports(path)):
            root, *parts = module.split(".")
            if root != "memformers" or not parts:
                continue
            imported = room_of(parts)
            if imported in MAY_IMPORT and imported not in MAY_IMPORT[room] | {room}:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert wrong == []


def test_no_file_is_imported_by_one_that_it_imports():
    modules = {module_of(path) for path, _ in files()}
    graph = {}
    for path, _ in files():
        module = module_of(path)
        graph[module] = set()
        for imported in imports(path):
            # What is imported is a module or, in most lines, a name in one.
            if imported not in modules:
                imported = imported.rpartition(".")[0]
            if imported in modules and imported != module:
                graph[module].add(imported)
    assert sum(map(len, graph.values())) > 200
    # A circle is a CycleError, which names the modules.
    tuple(TopologicalSorter(graph).static_order())


def test_kernels_need_nothing_but_torch():
    roots = set()
    for path, room in files():
        if room == "kernels":
            roots.update(module.partition(".")[0] for module in imports(path))
    assert roots - sys.stdlib_module_names == {"memformers", "torch"}


def test_only_two_commands_know_of_learning_while_reading():
    """So that it can make nothing else slower."""
    users = set()
    for path in PACKAGE.rglob("*.py"):
        if any(name.startswith("memformers.evaluation.learning.") for name in imports(path)):
            users.add(path.relative_to(PACKAGE).as_posix())
    assert users == {"evaluation/api.py", "commands/evaluate.py", "commands/generate.py"}
