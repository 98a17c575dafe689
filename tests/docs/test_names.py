"""The names that pages, docstrings and comments mention exist: a word in backticks occurs in the code, an
option is one of its command, a path leads to a file, and a reference resolves."""

import ast
import builtins
import io
import keyword
import re
import tokenize
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

import memformers
from memformers.cli import COMMANDS
from memformers.common.command_line import usual_values

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
SOURCES = sorted(
    path for folder in ("memformers", "experiments", "docs") for path in ROOT.glob(f"{folder}/**/*.py")
)
TOOLS = ["Makefile", "mkdocs.yml", "pyproject.toml", "hatch_build.py"]
SUFFIXES = r"\.(?:py|md|json|jsonl|npy|txt|toml|css|html|yml|csv|svg|safetensors)"
"""Of the files that pages name."""

OTHER_NAMES = """
    add_bos_token bind_output clear_binding_outputs
    EPYC DataParallel FlopCounterMode GAE GRUModule HFLM HF_HOME LSTMModule ONNX PyTorchModelHubMixin
    PIP_EXTRA_INDEX_URL TransfoXLModel WANDB_MODE _orig_mod
    deactivate_vmap dropatt eos_token fully_shard inputs_embeds max_length onnx onnxscript orthogonal pandas
    quantize_dynamic
    prefix_token_id set_recurrent_mode stop_strings transfo save_to_disk
    TERM activate juv nohup sbatch usr uvx whl
    ELLIPSIS EPYC FFFD HTML HTTP M_MMAP_THRESHOLD M_TRIM_THRESHOLD TFLOP
    P_i d_c x_j
"""
"""Names of other libraries that the code doesn't use, of a shell, abbreviations, and mathematics."""
EXAMPLES = """
    BOOK NAME NAME_documents OTHER OWNER ROMEO book bucket datasets dev dick fine_train_000001
    fine_train_000002 moby music my_memory novel novels password pkl ptb python rfc s3 seed2 train
    train_documents train_ids valid validation wiki
"""
"""Words of a user's files, folders and prompts in examples."""
OTHER_OPTIONS = """
    cpus-per-task gpus-per-node job-name nnodes nodes ntasks-per-node parents rdzv-backend rdzv-endpoint
    rdzv-id requeue signal strict time
"""
"""Of Slurm, torchrun, mkdir and mypy."""
ALLOWED = {*OTHER_NAMES.split(), *EXAMPLES.split()}

WORD = re.compile(r"[A-Za-z_]\w*")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
IN_DOCSTRING = re.compile(r"(?<!`)``([^`]+)``(?!`)")
CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
REFERENCE = re.compile(r"\[`([^`\]]+)`\]\[([^\]]*)\]")
CHECKSUM = re.compile(r"\b[0-9a-f]{32,}\b")


def page_id(path):
    return path.relative_to(ROOT).as_posix()


def strings_of(tree):
    """The docstrings of a file, and its other strings."""
    docstrings = []
    others = []
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            (docstrings if id(node) in statements else others).append(node.value)
    return docstrings, others


@cache
def parsed(path):
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    docstrings, strings = strings_of(tree)
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    names = [token.string for token in tokens if token.type == tokenize.NAME]
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return {"names": names, "strings": strings, "prose": [*docstrings, *comments], "docstrings": docstrings}


@cache
def known_words():
    """Every word of the code: of its names, of its strings other than docstrings, and of its files' paths."""
    words = {*dir(builtins), *keyword.kwlist}
    for path in SOURCES:
        words.update(parsed(path)["names"])
        for text in parsed(path)["strings"]:
            words.update(WORD.findall(text))
    for name in TOOLS:
        words.update(WORD.findall((ROOT / name).read_text(encoding="utf-8")))
    for path in ROOT.glob("tests/**/*.py"):  # variables of the environment that choose tests
        words.update(re.findall(r"MEMFORMERS_\w+", path.read_text(encoding="utf-8")))
    for path in repository_files():
        words.update(WORD.findall(path))
    return words


@cache
def repository_files():
    folders = ("memformers", "experiments", "findings", "docs", "tests", ".github")
    paths = [path for folder in folders for path in ROOT.glob(f"{folder}/**/*")]
    return [page_id(path) for path in (*paths, *ROOT.glob("*"))]


def unknown_words(span):
    """The words of a code span that the code doesn't have. Options have names of fields, with dashes."""
    text = re.sub(r"--[a-z][\w-]*", " ", CHECKSUM.sub(" ", span))  # options have a test of their own
    words = {word for word in WORD.findall(text) if not word.startswith("test_")}
    return words - known_words() - ALLOWED


def spans(page):
    """The code in backticks, which may continue on the next line."""
    prose = CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    return SPAN.findall(re.sub(r"(?<!\n)\n(?!\n)", " ", prose))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_name_on_a_page_occurs_in_the_code(page):
    unknown = {span: words for span in spans(page) if (words := unknown_words(span))}
    assert unknown == {}


def test_a_name_in_a_docstring_occurs_in_the_code():
    unknown = set()
    for path in SOURCES:
        for text in parsed(path)["docstrings"]:
            for span in IN_DOCSTRING.findall(text):
                unknown.update((page_id(path), word) for word in unknown_words(span))
    assert unknown == set()


def test_a_constant_in_prose_occurs_in_the_code():
    """A name in capital letters, also without backticks."""
    unknown = set()
    for path in SOURCES:
        for text in parsed(path)["prose"]:
            words = set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", text))
            unknown.update((page_id(path), word) for word in words - known_words())
    assert {pair for pair in unknown if pair[1] not in ALLOWED} == set()


@cache
def options_of(command):
    """The options of ``memformers COMMAND``, as tyro names them."""
    module = import_module(f"memformers.commands.{command}")
    fields = [field for field, _ in usual_values(getattr(module, command.capitalize()))]
    names = {field.name.rstrip("_").replace("_", "-") for field in fields}
    return names | {f"no-{name}" for name in names} | {"help", "version"}


@cache
def options_of_experiments():
    """The fields of dataclasses of the experiments, and what their argparse takes."""
    names = {"help"}
    for path in ROOT.glob("experiments/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id.rstrip("_").replace("_", "-"))
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(re.findall(r"^--([a-z][\w-]*)", node.value))
    return names


def options_in(text):
    return {name.replace("_", "-") for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_an_option_on_a_page_exists(page):
    """An option beside a command is one of this command; any other one is an option of some command."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    known = options_of_experiments().union(*map(options_of, COMMANDS)) | {*OTHER_OPTIONS.split()}
    assert options_in(text) - known == set()
    wrong = set()
    for line in [*spans(page), *text.splitlines()]:
        for command, rest in re.findall(r"\bmemformers (\w+)((?: [^|;&`]*)?)", line):
            if command in COMMANDS and not re.search(r"\.py:|--\w+ \S+ memformers", line):
                wrong.update((command, option) for option in options_in(rest) - options_of(command))
    assert wrong == set()


@cache
def file_strings():
    """The strings of the code, among which are the names of the files that it writes."""
    return {text for path in SOURCES for text in parsed(path)["strings"]}


def exists(name, page):
    path = name.rstrip("/")
    folders = (ROOT, ROOT / "memformers", ROOT / "docs", ROOT / "experiments", page.parent)
    if any((folder / path).exists() for folder in folders):
        return True
    return any(path == file or file.endswith(f"/{path}") for file in repository_files())


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_path_on_a_page_exists(page):
    """It is a file of the repository, or one that the code names since it writes or reads it."""
    missing = set()
    for span in spans(page):
        for name in re.findall(rf"(?<![\w/.@*-])[\w./*-]*\w{SUFFIXES}(?![\w./-])", span):
            last = name.rpartition("/")[2]
            is_example = Path(last).stem in EXAMPLES.split() or "*" in last
            if not is_example and not exists(name, page) and last not in file_strings():
                missing.add(name)
        for module in re.findall(r"python -m (experiments[\w.]*)", span):
            file = ROOT / module.replace(".", "/")
            if not file.with_suffix(".py").exists() and not (file / "__main__.py").exists():
                missing.add(module)
    assert missing == set()


@cache
def names_of_tests():
    """The names of all tests and of their files."""
    names = set()
    for path in ROOT.glob("tests/**/*.py"):
        names.add(path.stem)
        names.update(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    return names


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_test_on_a_page_exists(page):
    text = page.read_text(encoding="utf-8")
    named = {name for span in spans(page) for name in re.findall(r"\btest_\w+", span)}
    assert named - names_of_tests() == set()
    for expression in re.findall(r"pytest [^\n]*-k (\w+)", text):
        assert any(expression in name for name in names_of_tests()), f"-k {expression} selects nothing"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_name_is_in_the_file_that_a_page_names_for_it(page):
    """As in `Sampling` in [generation/generate.py](…)."""
    missing = set()
    text = page.read_text(encoding="utf-8")
    for name, link in re.findall(r"`(\w+)`,? (?:of|in) \[[^\]]*\]\(([^)#]+\.(?:py|md))\)", text):
        file = page.parent / link
        if not re.search(rf"\b{name}\b", file.read_text(encoding="utf-8")):
            missing.add((name, link))
    assert missing == set()


def attributes_of(kind):
    fields = set(getattr(kind, "__dataclass_fields__", {})) if is_dataclass(kind) else set()
    return {*dir(kind)} | fields | {*getattr(kind, "__annotations__", {})}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_an_attribute_of_a_public_class_exists(page):
    """As in `Memory.n_valid`."""
    missing = set()
    for span in spans(page):
        for name, attribute in re.findall(r"\b([A-Z]\w+)\.([a-z_]\w*)", span):
            if name in memformers.__all__ and attribute not in attributes_of(getattr(memformers, name)):
                missing.add(f"{name}.{attribute}")
    assert missing == set()


def resolves(target, scopes):
    """Whether a dotted name is found from one of ``scopes``, dotted names of modules or classes, or alone."""
    for scope in ("", *scopes):
        path = f"{scope}.{target}".removeprefix(".")
        owner, _, name = path.rpartition(".")
        try:
            resolve_name(path)
        except (ImportError, AttributeError, ValueError):
            try:  # a field without a default is no attribute
                if owner and name in attributes_of(resolve_name(owner)):
                    return True
            except (ImportError, AttributeError, ValueError):
                continue
        else:
            return True
    return False


def test_a_dotted_name_of_the_package_resolves():
    """Also in code blocks, in which tests don't run all."""
    missing = set()
    for path in (*PAGES, *SOURCES):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"(?<![\w/.-])memformers(?:\.[A-Za-z_]\w*)+", text):
            is_module = (ROOT / f"{name.replace('.', '/')}.py").exists()  # which may need another library
            if not is_module and not name.startswith(("memformers.github", "memformers.md")):
                missing.update({name} if not resolves(name, []) else ())
    assert missing == set()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_reference_on_a_page_resolves(page):
    references = REFERENCE.findall(page.read_text(encoding="utf-8"))
    targets = [(target or name).removesuffix("()") for name, target in references]
    assert [target for target in targets if not resolves(target, [])] == []


def references_in(tree, module):
    """The references of docstrings, each with the dotted names of what it is in."""

    def visit(node, scopes):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                for name, target in REFERENCE.findall(str(child.value.value)):
                    yield (target or name).removesuffix("()"), scopes
            else:
                inner = isinstance(child, ast.ClassDef)
                yield from visit(child, [*scopes, f"{scopes[-1]}.{child.name}"] if inner else scopes)

    return visit(tree, ["memformers", module])


@pytest.mark.parametrize("path", SOURCES, ids=page_id)
def test_a_reference_in_a_docstring_resolves(path):
    source = path.read_text(encoding="utf-8")
    if not REFERENCE.search(source):
        return
    module = page_id(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    try:
        import_module(module)
    except ImportError as error:
        pytest.skip(f"an optional library is missing: {error}")
    references = list(references_in(ast.parse(source), module))
    assert [target for target, scopes in references if not resolves(target, scopes)] == []
