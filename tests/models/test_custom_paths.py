"""Where the file of a user's memory may be, and that every process imports the same class under one name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memformers import MemoryLM, ModelConfig
from memformers.common.errors import UserError
from memformers.common.processes import module_environment
from memformers.comparison.arms import parse_arm
from memformers.comparison.experiment import run_experiment
from memformers.comparison.text import CompareConfig
from memformers.models import registry
from memformers.models.registry import import_memory, import_path, load_class, register_model
from memformers.training.config import TrainConfig
from tests import builders
from tests.processes import finish, start

# Names the memories at the paths in each line of its input, in a fork that knows none yet: so PyTorch is
# imported once.
NAME_EACH = """
import json, os, sys, traceback
from memformers.models.registry import MODELS, import_memory, import_path

def name_each(paths):
    lines = []
    for path in paths:
        name = import_memory(path)
        lines += [name, import_path(MODELS[name])]
    return lines

for line in sys.stdin:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    try:
        print(json.dumps(name_each(json.loads(line))), flush=True)
    except BaseException:
        print(json.dumps(traceback.format_exc()), flush=True)
    finally:
        os._exit(0)
"""
SHOW_PATH = """
if __name__ == "__main__":
    from memformers.models.registry import MODELS, import_path, register_model
    print(register_model(Mine), import_path(Mine), import_path(MODELS[register_model(Mine)]), sep="\\n")
"""
# Paths of memories; the last file has the name of a module that is imported already.
FILES = [
    "thesis.v2/mine.py", ".local/share/hidden.py", "a b/spaces.py", "my.memory.py", "v1.2/a b.c d.py",
    "it's/é.py", "a:b/colon.py", "torch.py",
]  # fmt: skip
# Files of memories in packages, of which one has no __init__.py, and how they are imported.
PACKAGES = {
    "package/__init__.py": "package", "package/inner/__init__.py": "package.inner",
    "package/inner/mine.py": "package.inner.mine", "package/space/mine.py": "package.space.mine",
}  # fmt: skip


@pytest.fixture(autouse=True)
def forget(monkeypatch, tmp_path):
    """What forgets which memories were named and imported, as another process does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    built_in = {name: kind for name, kind in registry.MODELS.items() if ":" not in name}
    known_modules = set(sys.modules)

    def forget():
        monkeypatch.setattr(registry, "MODELS", dict(built_in))
        for name in set(sys.modules) - known_modules:
            if name.split(".")[0] in ("mine", "package", "neighbour", "script"):
                del sys.modules[name]

    forget()
    yield forget
    forget()


def write_memory(path, head="import neighbour\nSTEP = neighbour.STEP", tail=""):
    """Write a memory, and the neighbour that it imports."""
    path = builders.write_memory(path, head, tail)
    path.with_name("neighbour.py").write_text("STEP = 0.5\n")
    return path


def environment_of_user():
    """That of a Python program that a user starts."""
    environment = module_environment()
    del environment["PYTHONSAFEPATH"]
    return environment


def lines_of(*command, cwd="."):
    """What a Python program prints, in a separate process, as a user starts it."""
    ended = finish([sys.executable, *command], cwd=cwd, env=environment_of_user())
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.fixture(scope="module")
def check_elsewhere():
    """Checks that another process, in another folder, imports each memory at one of these paths, by names, as
    its own."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", NAME_EACH]
    with start(command, cwd="/", env=environment_of_user(), stdin=pipe, stdout=pipe) as process:

        def check(paths):
            process.stdin.write(json.dumps([*paths.values()]) + "\n")
            process.stdin.flush()
            expected = [line for name, path in paths.items() for line in (name, path)]
            assert json.loads(process.stdout.readline()) == expected

        yield check
        process.stdin.close()


def test_another_process_imports_a_file_from_any_folder(check_elsewhere, tmp_path):
    paths = {}
    for file in FILES:
        path = write_memory(file).resolve()
        kind = load_class(f"{file}:Mine")
        assert import_path(kind) == f"{path}:Mine"
        paths[register_model(kind)] = import_path(kind)
    assert list(paths) == [f"{Path(file).name}:Mine" for file in FILES]
    check_elsewhere(paths)


@pytest.mark.parametrize("file", FILES)
def test_a_memory_in_a_file_of_any_name_is_saved_and_loaded(file):
    write_memory(file)
    lm = MemoryLM(ModelConfig(model=f"{file}:Mine", vocab_size=5, d_model=8, n_heads=2, n_layers=1))
    assert lm.config.model == f"{Path(file).name}:Mine"
    lm.save_pretrained("saved")
    assert MemoryLM.from_pretrained("saved", model=f"{file}:Mine").config == lm.config


def test_all_paths_to_a_file_are_one_memory(tmp_path, monkeypatch):
    write_memory("thesis.v2/mine.py")
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("folder_link").symlink_to("thesis.v2")
    Path("file_link.py").symlink_to("thesis.v2/mine.py")
    Path("elsewhere").mkdir()
    first = load_class("thesis.v2/mine.py:Mine")
    assert register_model(first) == "mine.py:Mine"
    for path in (
        f"{tmp_path}/thesis.v2/mine.py", "elsewhere/../thesis.v2/mine.py", "~/thesis.v2/mine.py",
        "folder_link/mine.py", "file_link.py",
    ):  # fmt: skip
        assert load_class(f"{path}:Mine") is first
        assert import_memory(f"{path}:Mine") == "mine.py:Mine"
    monkeypatch.chdir("thesis.v2")
    assert load_class("mine.py:Mine") is first


@pytest.mark.parametrize("linked", [False, True])
def test_a_class_that_a_program_imported_is_the_one_in_its_file(linked, monkeypatch):
    write_memory("thesis.v2/mine.py")
    folder = "thesis.v2"
    if linked:
        Path("link").symlink_to("thesis.v2")
        folder = "link"
    monkeypatch.syspath_prepend(folder)
    import mine

    assert register_model(mine.Mine) == "mine.py:Mine"
    assert load_class("thesis.v2/mine.py:Mine") is mine.Mine


def test_a_link_to_a_file_without_the_ending_py_is_a_memory(check_elsewhere, tmp_path):
    """As in stores that call files by their checksums."""
    write_memory("blobs/0a1b2c.py").rename("blobs/0a1b2c")
    Path("snapshot").mkdir()
    Path("snapshot/neighbour.py").write_text("STEP = 1.0\n")
    Path("snapshot/mine.py").symlink_to("../blobs/0a1b2c")
    kind = load_class("snapshot/mine.py:Mine")
    path = f"{tmp_path.resolve()}/snapshot/mine.py:Mine"
    assert import_path(kind) == path
    check_elsewhere({"mine.py:Mine": path})


def test_another_process_imports_a_package_from_any_folder(check_elsewhere, tmp_path):
    relative = "from . import neighbour\nSTEP = neighbour.STEP"
    paths = {}
    for file, module in PACKAGES.items():
        write_memory(Path("lib.d", file), relative)
        name = import_memory(f"lib.d/{module}:Mine")
        paths[name] = import_path(registry.MODELS[name])
    folder = tmp_path.resolve() / "lib.d"
    assert paths == {f"{module}:Mine": f"{folder}/{module}:Mine" for module in PACKAGES.values()}
    check_elsewhere(paths)


@pytest.mark.parametrize("run", [["package.v2/script.py"], ["-m", "script"], ["-m", "package.script"]])
def test_another_process_imports_the_class_of_a_program(run, check_elsewhere, tmp_path):
    inside = "package" if "package.script" in run else "package.v2"
    script = write_memory(f"{inside}/script.py", "STEP = 1", SHOW_PATH)
    cwd = "package.v2" if run[-1] == "script" else "."
    name, *paths = lines_of(*run, cwd=cwd)
    assert name == ("package.script:Mine" if inside == "package" else "script.py:Mine")
    folder = tmp_path.resolve()
    expected = f"{folder}/package.script" if inside == "package" else f"{script.resolve()}"
    assert paths == [f"{expected}:Mine"] * 2
    check_elsewhere({name: paths[0]})


def test_two_files_of_one_name_are_refused_in_any_order():
    write_memory("mine.py")
    write_memory("thesis.v2/mine.py")
    parse_arm("first: model=thesis.v2/mine.py:Mine", TrainConfig())
    with pytest.raises(UserError, match="the same name"):
        parse_arm("second: model=mine.py:Mine", TrainConfig())
    with pytest.raises(UserError, match="the same name"):
        MemoryLM.from_pretrained("saved", model="mine.py:Mine")


def test_two_neighbours_of_one_name_with_other_code_are_refused():
    write_memory("first.d/one.py")
    write_memory("second.d/two.py")
    Path("second.d/neighbour.py").write_text("STEP = 7.0\n")
    import_memory("first.d/one.py:Mine")
    with pytest.raises(UserError, match="another memory has imported"):
        import_memory("second.d/two.py:Mine")
    builders.write_memory("second.d/two.py", "STEP = 1")
    assert import_memory("second.d/two.py:Mine") == "two.py:Mine"


def test_two_files_share_a_neighbour_and_a_module_of_python():
    for file in ("mine.py", "more.py"):
        write_memory(file, "import json\nimport neighbour\nSTEP = neighbour.STEP")
        Path("json.py").write_text("")
        assert import_memory(f"{file}:Mine") == f"{file}:Mine"


@pytest.mark.parametrize("module", ["package.mine", "package"])
def test_two_packages_of_one_name_are_refused(module, monkeypatch):
    relative = "from . import neighbour\nSTEP = neighbour.STEP"
    for folder in ("first.d", "second.d"):
        write_memory(Path(folder, "package/__init__.py"), relative)
        write_memory(Path(folder, "package/mine.py"), relative)
    import_memory(f"first.d/{module}:Mine")
    with pytest.raises(UserError, match="rename one of the packages"):
        import_memory(f"second.d/{module}:Mine")
    monkeypatch.syspath_prepend("second.d")
    with pytest.raises(UserError, match="rename one of the packages"):
        import_memory(f"second.d/{module}:Mine")


def test_a_package_in_a_linked_folder_on_the_path_is_taken(monkeypatch):
    write_memory("thesis.v2/package/mine.py", "from . import neighbour\nSTEP = neighbour.STEP")
    Path("link").symlink_to("thesis.v2")
    monkeypatch.syspath_prepend("link")
    import package.mine

    assert load_class("thesis.v2/package.mine:Mine") is package.mine.Mine


def test_a_config_keeps_its_memory_in_another_folder(monkeypatch):
    write_memory("mine.py")
    write_memory("thesis.v2/mine.py")
    config = ModelConfig(model="mine.py:Mine")
    monkeypatch.chdir("thesis.v2")
    assert ModelConfig(model=config.model) == config


@pytest.mark.parametrize("path", ["..:Mine", "a..b:Mine", ".:Mine", "folder/.mine:Mine", "/:Mine"])
def test_what_names_no_module_is_an_error_of_one_line(path):
    with pytest.raises(UserError) as caught:
        import_memory(path)
    assert "\n" not in str(caught.value)


def test_an_experiment_refuses_what_its_processes_cant_import(tmp_path):
    write_memory("mine.py")

    class Local(load_class("mine.py:Mine")):
        pass

    config = CompareConfig(models=(), arms=(f"mine: model={register_model(Local)}",))
    with pytest.raises(UserError, match="top level of a file"):
        run_experiment(config.experiment(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
