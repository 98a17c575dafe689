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
from docs.building.results import ROOT
from memformers.commands.train import Train, parse_train
from memformers.data.builtin import write_play
from memformers.integrations.hub import push_to_hub
from memformers.training import monitor
from tests.builders import SMALL_SIZES
from tests.docs.pages import page_id, read_file
from tests.hub import running_hub
from tests.processes import ended, run

PAGES = sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")})
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"python", "text", "sh", "bibtex"}

# What is added to the commands of pages, so that each takes a moment.
TINY_TRAINING = [*SMALL_SIZES, "--max-tokens", "600", "--device", "cpu"]
TINY = {
    "train": TINY_TRAINING,
    "compare": [*TINY_TRAINING, "--c-mem-len", "8"],
    "generate": ["--tokens", "5", "--device", "cpu"],
    "evaluate": ["--device", "cpu"],
    "probe": ["--tokens", "512", "--device", "cpu"],
}
# These serve until Ctrl-C, so only their options are read.
SERVES = {"dashboard"}

OWN_MEMORY = ROOT / "experiments/memories/averages.py"
# The commands of this page read what its Python wrote.
MIXED = "docs/how-to/token_ids.md"
# The models of this page are on the hub.
ON_HUB = "docs/how-to/share.md"
# A part of the page MIXED imports one of these libraries; tests/integrations runs that part.
LOADERS = ("streaming", "litdata", "webdataset")
# What pages need beside the package; their blocks take long.
NEEDS = {"docs/how-to/in_other_libraries.md": ("transformers", "peft", "lm_eval", "torchrl")}

# How commands begin that are not run here, since they download, install, or train for hours.
NOT_RUN = (
    "python -m experiments.", "python docs/plain/", "git clone ", "cd memformers", "cp experiments/memories/",
    "apt-get download ",
    "for package in doc-rfc-", "mkdir rfc && find packages ", "library=$(python", "mkdir stdlib && ",
    "pip install ", "source .venv/bin/activate", ".venv/bin/python -m pytest",
)  # fmt: skip
# How commands begin that start several processes.
LAUNCHES = ("torchrun ", "srun torchrun ", "export ", "first=$(scontrol ")


def blocks(page):
    """The blocks of a page: their languages and texts. Lines of the package's source, which are parts of
    functions, are left out."""

    def without_source(block):
        return "" if block[1] == "source" else block[0]

    return BLOCK.findall(WRITTEN.sub(without_source, read_file(page)))


def shell_lines(code):
    """The lines of a block; one that ends with a backslash continues on the next."""
    return code.replace("\\\n", " ").splitlines()


def pages_with(language):
    pages = []
    for page in PAGES:
        # The pages of results have commands of experiments, which test_results reads.
        if page.parent.name == "results":
            continue
        if language in dict(blocks(page)):
            pages.append(page)
    return pages


def python_pages():
    """The pages whose Python is run by itself."""
    for page in pages_with("python"):
        name = page_id(page)
        if name != MIXED:
            yield pytest.param(page, id=name, marks=[pytest.mark.long] if name in NEEDS else [])


def torchrun_commands():
    """The commands that pages start several processes with; srun may come before torchrun."""
    for page in PAGES:
        for language, code in blocks(page):
            for line in shell_lines(code):
                if language == "sh" and "torchrun --" in line:
                    yield line[line.index("torchrun") :]


def imported_loader(code):
    """The one of LOADERS that a block of Python imports, or an empty text."""
    for library in LOADERS:
        if f"from {library} import" in code:
            return library
    return ""


def run_command(arguments):
    """Run ``memformers`` with these arguments; it ends well."""
    ended = run(*arguments)
    assert ended.code == 0, f"memformers {shlex.join(arguments)}: {ended.err}"


def run_python(code, names):
    """What a block of Python prints; its variables are kept in ``names``."""
    return ended(lambda: exec(compile(code, "block", "exec"), names)).out


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    # Tiny models are far slower where several threads have to wait for a core.
    torch.set_num_threads(1)
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
    # All printable characters, so that any prompt of a page can be encoded.
    text = string.printable + write_play(3_000)
    documents = [text[i : i + 300] for i in range(0, 3_000, 300)]
    texts = {
        "book.txt": text,
        "other.txt": text,
        "pages.txt": "<|endoftext|>".join(documents),
        "pages.jsonl": "\n".join(json.dumps({"text": document}) for document in documents),
    }
    for number, document in enumerate(documents):
        texts[f"novels/{number}.txt"] = document
    for corpus in ("rfc", "stdlib"):
        texts[f"{corpus}/0.txt"] = write_play(60_000)
        texts[f"{corpus}/1.txt"] = text[:400]
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
    if command == "recall":
        return tiny_recall(arguments)
    # A resumed run has its settings, so only the tokens that a page adds are fewer.
    if "--help" in arguments or "--resume" in arguments:
        return [*arguments, "--max-tokens", "1200"] if "--max-tokens" in arguments else arguments
    added = []
    if command in ("train", "compare") and "--data" not in arguments:
        added += ["--data", "book.txt"]
    added += TINY.get(command, [])
    if command == "train" and "compressive" in arguments:
        added += ["--c-mem-len", "8"]
    if command == "compare" and "--models" not in arguments:
        added += ["--models", "compressive"]
    return [*arguments, *added]


def tiny_recall(arguments):
    """The fixture quick_runs makes the settings of recall tiny; fewer arms and tokens do the rest."""
    added = []
    if "--arms" not in arguments and "--show" not in arguments:
        added += ["--arms", "compressive"]
    if "--quick" in arguments:
        added += ["--tokens", "300"]
    return [*arguments, *added]


@pytest.mark.parametrize("page", [*python_pages()])
def test_python_blocks_run_and_print_what_the_page_says(page, tmp_path, monkeypatch, request):
    for package in NEEDS.get(page_id(page), ()):
        pytest.importorskip(package, reason=f"{package} is not installed, which {page.name} needs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(monitor, "SAMPLE_CHARACTERS", 30)
    monkeypatch.setattr(monitor, "SHORT_SAMPLE_CHARACTERS", 10)
    if page_id(page) == ON_HUB:
        request.getfixturevalue("hub")
    names = {"__name__": "page"}
    parts = blocks(page)
    following = [*parts[1:], ("", "")]
    for (language, code), (next_language, next_code) in zip(parts, following, strict=True):
        if language != "python":
            continue
        printed = run_python(code, names)
        # Where no block shows it, what is printed is in a comment of the code, or in a sentence.
        if next_language == "text":
            assert printed == next_code
        else:
            assert printed.strip() in read_file(page)


def check_command(line, targets):
    """Run a line of a page if it starts with ``memformers``; other lines name what exists."""
    arguments = shlex.split(line, comments=True)
    if not arguments or line.startswith(NOT_RUN + LAUNCHES):
        return
    if arguments[0] == "make":
        assert arguments[1] in targets, f"make {arguments[1]} is no target"
        return
    assert arguments[0] == "memformers", f"{line!r}: is it to be run, or to be listed here?"
    # A tracker may not be installed.
    if arguments[1] == "export" and find_spec(arguments[-1]) is None:
        return
    run_command([argument.replace("runs/…", "runs/tiny") for argument in tiny(arguments[1:])])


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("page", pages_with("sh"), ids=page_id)
def test_commands_run(page, workplace, monkeypatch, request):
    monkeypatch.chdir(workplace)
    if page_id(page) == ON_HUB:
        request.getfixturevalue("hub")
        push_to_hub("runs/tiny", "you/novels")
    # All pages share the workplace; the runs of the page before would be in this one's way.
    for run_folder in Path("runs").iterdir():
        if run_folder.name != "tiny":
            shutil.rmtree(run_folder)
    targets = re.findall(r"^([\w-]+):", read_file("Makefile"), flags=re.MULTILINE)
    names = {}
    for language, code in blocks(page):
        if language == "python" and page_id(page) == MIXED and not imported_loader(code):
            exec(compile(code, "block", "exec"), names)
        if language == "sh":
            for line in shell_lines(code):
                check_command(line, targets)


@pytest.mark.parametrize("line", [*torchrun_commands()])
def test_torchrun_lines_are_read_by_both_parsers(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    started = get_args_parser().parse_args(shlex.split(line)[1:])
    assert started.module
    assert started.training_script == "memformers"
    command, *arguments = started.training_script_args
    assert command == "train"
    config = parse_train(arguments, Train()).config
    assert config.step.parallel == "ddp"
    assert config.batch_size % int(started.nproc_per_node) == 0


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_file_that_a_page_links_to_is_there(page):
    """Links between pages of the documentation are checked when it is built."""
    links = re.findall(r"\]\((?!http|#)([^)#]+)", read_file(page))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_guide_to_a_memory_of_ones_own_shows_its_file():
    assert blocks(ROOT / "docs/how-to/own_memory.md")[0] == ("python", read_file(OWN_MEMORY))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_block_is_of_a_kind_that_is_checked(page):
    for language, _ in blocks(page):
        assert language in LANGUAGES
    text = WRITTEN.sub("", read_file(page))
    # A fence that BLOCK misses would hide its code from these tests.
    assert text.count("```") == 2 * len(BLOCK.findall(text))
