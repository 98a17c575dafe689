"""The package as others get it: built, installed into a separate environment, and run there."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import memformers
from memformers.models.io import PACKAGED, packaged_names
from tests.builders import SMALL_RUN
from tests.processes import finish

ROOT = Path(__file__).parents[1]


def run(*command, **options):
    result = finish(command, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


def lent_folders():
    """The folders with installed packages: not this repository, and not the standard library."""
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    for name in sys.path:
        path = Path(name)
        is_standard = name in standard or path.name == "lib-dynload"
        if path.is_dir() and path.resolve() != ROOT and not is_standard:
            yield name


@pytest.fixture(scope="module")
def environment(built, tmp_path_factory):
    """A virtual environment with the wheel; what it depends on is lent by the environment of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    install = ["install", "--quiet", "--no-deps", "--no-index", wheel]
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, *install)
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(purelib) / "lent.pth").write_text("\n".join(lent_folders()) + "\n", encoding="utf-8")
    yield folder / "bin"
    shutil.rmtree(folder)


@pytest.mark.long
def test_the_wheel_has_types_and_models_but_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "memformers/py.typed" in names
    for name in names:
        folder = name.split("/")[0]
        assert folder == "memformers" or folder.endswith(".dist-info")
    # Six files for each model.
    files = {path.relative_to(ROOT).as_posix() for path in PACKAGED.rglob("*") if path.is_file()}
    assert len(files) == 6 * len(packaged_names()) > 0
    assert files <= names


@pytest.mark.long
def test_links_and_pictures_of_the_readme_lead_somewhere_on_pypi(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    targets = re.findall(r'(?:\]\(|src=")([^)"]+)', text)
    assert len(targets) > 20
    for target in targets:
        assert target.startswith("https://")


@pytest.mark.long
def test_the_source_distribution_can_be_built_and_tested(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {"pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "tests/test_packaging.py"} <= names
    for name in names:
        assert not name.startswith(("runs/", "site/", ".venv/"))


@pytest.mark.long
def test_the_installed_command_trains_and_generates(environment, tmp_path):
    # Without the repository's folder on the path.
    clean = os.environ.copy()
    clean.pop("PYTHONPATH", None)
    place = run(
        environment / "python", "-c", "import memformers; print(memformers.__file__)", cwd=tmp_path, env=clean
    )
    assert Path(place).is_relative_to(environment.parent)
    assert "usage: memformers" in run(environment / "memformers", "--help", cwd=tmp_path, env=clean)
    run(environment / "memformers", "train", "--out", "run", *SMALL_RUN, cwd=tmp_path, env=clean)
    assert (tmp_path / "run" / "result.json").is_file()
    pretrained = ["--pretrained", "compressive-shakespeare", "--prompt", "ROMEO:", "--tokens", 50]
    text = run(environment / "memformers", "generate", *pretrained, cwd=tmp_path, env=clean)
    assert text.startswith("ROMEO:")


def test_citation_and_changelog_are_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {memformers.__version__}\n" in citation
    assert f"\n## [{memformers.__version__}]" in changes


def test_the_workflow_runs_what_every_change_must_pass():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    matrix = jobs["checks"]["strategy"]["matrix"]
    assert matrix["python"] == [f"3.{minor}" for minor in range(10, 15)]
    assert {name.partition("-")[0] for name in matrix["os"]} == {"ubuntu", "macos"}
    commands = []
    for job in jobs.values():
        commands.extend(step["run"] for step in job["steps"] if "run" in step)
    assert ".ci/run" in commands
    # Besides it, make is called, with targets and variables.
    targets = set()
    for command in commands:
        targets.update(word for word in command.split()[1:] if "=" not in word)
    assert targets == {"test-integrations", "dist", "docs"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_make_names_its_constraints_in_a_folder_with_a_space(tmp_path):
    folder = tmp_path / "a folder with ünicode"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    shown = subprocess.run(
        ["make", "-n", ".venv/ready"], cwd=folder, capture_output=True, text=True, check=True
    )
    # pip would divide the path at a space.
    [constraint] = re.findall(r"PIP_CONSTRAINT=(\S+)", shown.stdout)
    assert (folder / constraint).is_file()
