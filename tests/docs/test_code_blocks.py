"""Every code block of README, CONTRIBUTING and docs/ is run, page by page, in order, in an empty folder.

Python blocks of a page share their names; the text block that follows one is what it prints. Lines of sh
blocks that start with ``memformers`` are run through the command's own ``main``, made tiny by more settings;
``runs/…`` is a run that was trained before. ``make`` must name a target, and lines that start several
processes are read by torchrun and the command. Other commands that a page may show are listed here.
"""

import json
import re
import shlex
import shutil
import string
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.distributed.run import get_args_parser

from docs.building.markdown import BLOCK as WRITTEN
from memformers.commands.train import Train, parse_train
from memformers.data.builtin import write_play
from memformers.integrations.hub import push_to_hub
from memformers.training import monitor
from tests.builders import SMALL_SIZES
from tests.hub import running_hub
from tests.processes import ended, run

ROOT = Path(__file__).parents[2]
PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")})
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "text", "sh", "bibtex"}

TINY_TRAINING = [*SMALL_SIZES, "--max-tokens", "600", "--device", "cpu"]
TINY = {
    "train": TINY_TRAINING,
    "compare": [*TINY_TRAINING, "--c-mem-len", "8"],
    "generate": ["--tokens", "5", "--device", "cpu"],
    "evaluate": ["--device", "cpu"],
    "probe": ["--tokens", "512", "--device", "cpu"],
}
OWN_MEMORY = ROOT / "experiments/memories/averages.py"
SERVES = {"dashboard"}
MIXED = "docs/how-to/token_ids.md"
"""A page whose commands read what its Python wrote."""
ON_HUB = "docs/how-to/share.md"
"""A page whose models are on the hub."""
LOADERS = ("streaming", "litdata", "webdataset")
"""Libraries that a part of this page imports; tests/integrations runs that part."""
NEEDS = {"docs/how-to/in_other_libraries.md": ("transformers", "peft", "lm_eval", "torchrl")}
"""What pages need beside the package; these take long."""
OTHERS = (
    "python -m experiments.", "python docs/plain/", "git clone ", "cd memformers", "cp experiments/memories/",
    "apt-get download ",
    "for package in doc-rfc-", "mkdir rfc && find packages ", "library=$(python", "mkdir stdlib && ",
    "pip install ", "source .venv/bin/activate", ".venv/bin/python -m pytest",
)  # fmt: skip
LAUNCHES = ("torchrun ", "srun torchrun ", "export ", "first=$(scontrol ")
"""What starts several processes."""


def blocks(page):
    """The code of a page; lines of the source in it are parts of functions."""
    text = page.read_text(encoding="utf-8")
    return BLOCK.findall(WRITTEN.sub(lambda match: "" if match[1] == "source" else match[0], text))


def pages_with(kind):
    """Those of results have commands of experiments, which test_results reads."""
    pages = [page for page in PAGES if page.parent.name != "results"]
    return [page for page in pages if any(language == kind for language, _ in blocks(page))]


def imported_loader(code):
    """The one of LOADERS that the code of a block imports, if any."""
    return next((name for name in LOADERS if f"from {name} import" in code), "")


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def run_command(arguments):
    """Run ``memformers`` with these arguments; it ends well."""
    ended = run(*arguments)
    assert ended.code == 0, f"memformers {shlex.join(arguments)}: {ended.err}"


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny models are far slower where several have to wait for a core
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with running_hub(monkeypatch, tmp_path / "cache"):
        yield


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with two texts, some documents, the memory of a guide and a finished run."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copy(OWN_MEMORY, folder / "my_memory.py")
    text = string.printable + write_play(9_000)
    pages = [text[i : i + 400] for i in range(0, 4_000, 400)]
    texts = {"book.txt": text, "other.txt": text, "pages.txt": "<|endoftext|>".join(pages)}
    texts |= {f"novels/{number}.txt": page for number, page in enumerate(pages)}
    texts |= {f"{name}/0.txt": write_play(60_000) for name in ("rfc", "stdlib")}
    texts |= {f"{name}/1.txt": text[:400] for name in ("rfc", "stdlib")}
    texts["pages.jsonl"] = "\n".join(json.dumps({"text": page}) for page in pages)
    for name, content in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    places = ["--data", str(folder / "book.txt"), "--out", str(folder / "runs/tiny")]
    run_command(["train", "--model", "compressive", *places, *TINY_TRAINING])
    return folder


def tiny(arguments):
    """The same command, made to take a moment."""
    command = arguments[0]
    if command in SERVES:
        return [command, "--help"]
    if command == "recall":  # its settings are tiny here
        arms = ["--arms", "compressive"] if not {"--arms", "--show"} & {*arguments} else []
        return [*arguments, *arms, *["--tokens", "300"] * ("--quick" in arguments)]
    if "--help" in arguments or "--resume" in arguments:
        return [*arguments, "--max-tokens", "1200"] if "--max-tokens" in arguments else arguments
    data = ["--data", "book.txt"] if command in ("train", "compare") and "--data" not in arguments else []
    slots = ["--c-mem-len", "8"] if command == "train" and "compressive" in arguments else []
    models = ["--models", "compressive"] if command == "compare" and "--models" not in arguments else []
    return [*arguments, *data, *TINY.get(command, []), *slots, *models]


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=name_of(page), marks=[pytest.mark.long] * (name_of(page) in NEEDS))
             for page in pages_with("python") if name_of(page) != MIXED],
)  # fmt: skip
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path, monkeypatch, request):
    for package in NEEDS.get(name_of(page), ()):
        pytest.importorskip(package, reason=f"{package} is not installed, which {page.name} needs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(monitor, "SAMPLE_CHARACTERS", 30)
    if name_of(page) == ON_HUB:
        request.getfixturevalue("hub")
    parts, names = blocks(page), {"__name__": "page"}
    for (language, code), (next_language, next_code) in zip(parts, [*parts[1:], ("", "")], strict=True):
        if language != "python":
            continue
        printed = ended(lambda code=code: exec(compile(code, "block", "exec"), names)).out
        if next_language == "text":
            assert printed == next_code
        else:
            assert printed.strip() in page.read_text(encoding="utf-8")


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("page", pages_with("sh"), ids=name_of)
def test_commands_run(page, workplace, monkeypatch, request):
    monkeypatch.chdir(workplace)
    if name_of(page) == ON_HUB:
        request.getfixturevalue("hub")
        push_to_hub("runs/tiny", "you/novels")
    for left in set(Path("runs").iterdir()) - {Path("runs/tiny")}:  # by the page before
        shutil.rmtree(left)
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    names: dict[str, object] = {}
    for language, code in blocks(page):
        if language == "python" and name_of(page) == MIXED and not imported_loader(code):
            exec(compile(code, "block", "exec"), names)
        for line in code.replace("\\\n", " ").splitlines() if language == "sh" else ():
            arguments = shlex.split(line, comments=True)
            if not arguments or line.startswith(OTHERS + LAUNCHES):
                continue
            if arguments[0] == "make":
                assert arguments[1] in targets, f"make {arguments[1]} is no target"
                continue
            assert arguments[0] == "memformers", f"{line!r}: is it to be run, or to be listed here?"
            if arguments[1] == "export" and find_spec(arguments[-1]) is None:  # a tracker
                continue
            run_command([a.replace("runs/…", "runs/tiny") for a in tiny(arguments[1:])])


@pytest.mark.parametrize(
    "line",
    [line[line.index("torchrun") :] for page in PAGES for language, code in blocks(page) if language == "sh"
     for line in code.replace("\\\n", " ").splitlines() if "torchrun --" in line],
)  # fmt: skip
def test_torchrun_lines_are_read_by_both_parsers(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = get_args_parser().parse_args(shlex.split(line)[1:])
    assert (started.module, started.training_script) == (True, "memformers")
    command, *arguments = started.training_script_args
    config = parse_train(arguments, Train()).config
    assert (command, config.step.parallel) == ("train", "ddp")
    assert config.batch_size % int(started.nproc_per_node) == 0


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_file_that_a_page_links_to_is_there(page):
    """Links between pages of the documentation are checked when it is built."""
    links = re.findall(r"\]\((?!http|#)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_guide_to_a_memory_of_ones_own_shows_its_file():
    assert blocks(ROOT / "docs/how-to/own_memory.md")[0] == ("python", OWN_MEMORY.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_kind_that_is_checked(page):
    assert {language for language, _ in blocks(page)} <= LANGUAGES
    text = WRITTEN.sub("", page.read_text(encoding="utf-8"))
    assert text.count("```") == 2 * len(BLOCK.findall(text))
