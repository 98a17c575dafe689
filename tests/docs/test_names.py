"""The names that pages, docstrings and comments mention exist: a word in backticks occurs in the code, an
option is one of its command, a path leads to a file, and a reference resolves."""

import ast
import builtins
import io
import keyword
import re
import tokenize
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest

import memformers
from docs.building.results import ROOT
from memformers.cli import COMMANDS
from memformers.common.command_line import usual_values
from tests.docs.pages import page_id, read_file

PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
SOURCES = sorted(
    [*ROOT.glob("memformers/**/*.py"), *ROOT.glob("experiments/**/*.py"), *ROOT.glob("docs/**/*.py")]
)
# Files outside of these folders whose words pages mention.
TOOLS = ["Makefile", "mkdocs.yml", "pyproject.toml", "hatch_build.py"]
# The suffixes of the files that pages name.
SUFFIXES = r"\.(?:py|md|json|jsonl|npy|txt|toml|css|html|yml|csv|svg|safetensors)"

# Names of other libraries that the code doesn't use, of a shell, abbreviations, and mathematics.
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
# Words of a user's files, folders and prompts in examples.
EXAMPLES = """
    BOOK NAME NAME_documents OTHER OWNER ROMEO book bucket datasets dev dick fine_train_000001
    fine_train_000002 moby music my_memory novel novels password pkl ptb python rfc s3 seed2 train
    train_documents train_ids valid validation wiki
"""
# Options of Slurm, torchrun, mkdir and mypy.
OTHER_OPTIONS = """
    cpus-per-task gpus-per-node job-name nnodes nodes ntasks-per-node parents rdzv-backend rdzv-endpoint
    rdzv-id requeue signal strict time
"""
ALLOWED = {*OTHER_NAMES.split(), *EXAMPLES.split()}

WORD = re.compile(r"[A-Za-z_]\w*")
# Code in one backtick, as pages write it, and in two, as docstrings do.
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
IN_DOCSTRING = re.compile(r"(?<!`)``([^`]+)``(?!`)")
CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# [`name`][] or [`name`][target]
REFERENCE = re.compile(r"\[`([^`\]]+)`\]\[([^\]]*)\]")
CHECKSUM = re.compile(r"\b[0-9a-f]{32,}\b")


def strings_of(tree):
    """The docstrings of a file, and its other strings."""
    statements = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            statements.add(node.value)
    docstrings = []
    strings = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A string that is a statement documents what it follows.
            if node in statements:
                docstrings.append(node.value)
            else:
                strings.append(node.value)
    return docstrings, strings


@dataclass(frozen=True)
class Source:
    """A file of the code, taken apart."""

    names: list[str]
    strings: list[str]
    docstrings: list[str]
    comments: list[str]


@cache
def parse_source(path):
    source = read_file(path)
    docstrings, strings = strings_of(ast.parse(source))
    names = []
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            names.append(token.string)
        elif token.type == tokenize.COMMENT:
            comments.append(token.string)
    return Source(names, strings, docstrings, comments)


@cache
def known_words():
    """Every word of the code: of its names, of its strings other than docstrings, and of its files' paths."""
    words = {*dir(builtins), *keyword.kwlist}
    for path in SOURCES:
        source = parse_source(path)
        words.update(source.names)
        for text in source.strings:
            words.update(WORD.findall(text))
    for name in TOOLS:
        words.update(WORD.findall(read_file(name)))
    # Variables of the environment that choose tests.
    for path in ROOT.glob("tests/**/*.py"):
        words.update(re.findall(r"MEMFORMERS_\w+", read_file(path)))
    for path in repository_files():
        words.update(WORD.findall(path))
    return words


@cache
def repository_files():
    # Not all that is below the root, which may have an environment, texts and runs.
    paths = [*ROOT.glob("*")]
    for folder in ("memformers", "experiments", "findings", "docs", "tests", ".github"):
        paths.extend(ROOT.glob(f"{folder}/**/*"))
    return [page_id(path) for path in paths]


def unknown_words(span):
    """The words of a code span that the code doesn't have. Options have names of fields, with dashes."""
    # Options and names of tests are tested elsewhere.
    text = re.sub(r"--[a-z][\w-]*|\btest_\w*", " ", CHECKSUM.sub(" ", span))
    return {*WORD.findall(text)} - known_words() - ALLOWED


def spans(page):
    """The code in backticks, which may continue on the next line."""
    prose = CODE_BLOCK.sub("", read_file(page))
    return SPAN.findall(re.sub(r"(?<!\n)\n(?!\n)", " ", prose))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_name_on_a_page_occurs_in_the_code(page):
    unknown = set()
    for span in spans(page):
        unknown.update(unknown_words(span))
    assert unknown == set()


def test_a_name_in_a_docstring_occurs_in_the_code():
    unknown = set()
    for path in SOURCES:
        for docstring in parse_source(path).docstrings:
            for span in IN_DOCSTRING.findall(docstring):
                for word in unknown_words(span):
                    unknown.add((page_id(path), word))
    assert unknown == set()


def test_a_constant_in_prose_occurs_in_the_code():
    """A name in capital letters, also without backticks."""
    unknown = set()
    for path in SOURCES:
        source = parse_source(path)
        for text in (*source.docstrings, *source.comments):
            words = set(re.findall(r"\b[A-Z][A-Z_]{3,}\b", text))
            for word in words - known_words() - ALLOWED:
                unknown.add((page_id(path), word))
    assert unknown == set()


def option_of_field(name):
    """A field that would be a word of Python ends in an underscore, which its option has not."""
    return name.rstrip("_").replace("_", "-")


@cache
def options_of(command):
    """The options of ``memformers COMMAND``, as tyro names them."""
    module = import_module(f"memformers.commands.{command}")
    options = {"help", "version"}
    for field, _ in usual_values(getattr(module, command.capitalize())):
        option = option_of_field(field.name)
        options.update([option, f"no-{option}"])
    return options


@cache
def options_of_experiments():
    """The fields of dataclasses of the experiments, and what their argparse takes."""
    options = {"help"}
    for path in ROOT.glob("experiments/**/*.py"):
        for node in ast.walk(ast.parse(read_file(path))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                options.add(option_of_field(node.target.id))
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                options.update(re.findall(r"^--([a-z][\w-]*)", node.value))
    return options


def options_in(text):
    """The options that a text mentions; tyro takes dashes and underscores for the same."""
    return {name.replace("_", "-") for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_an_option_on_a_page_exists(page):
    """An option beside a command is one of this command; any other one is an option of some command."""
    # A line that ends with a backslash continues on the next.
    text = read_file(page).replace("\\\n", " ")
    known_options = options_of_experiments().union(*map(options_of, COMMANDS), OTHER_OPTIONS.split())
    assert options_in(text) - known_options == set()
    wrong = set()
    for line in [*spans(page), *text.splitlines()]:
        # A memory of the user's and torchrun bring options that the command doesn't list.
        if re.search(r"\.py:|--\w+ \S+ memformers", line):
            continue
        for command, arguments in re.findall(r"\bmemformers (\w+)((?: [^|;&`]*)?)", line):
            if command in COMMANDS:
                for option in options_in(arguments) - options_of(command):
                    wrong.add((command, option))
    assert wrong == set()


@cache
def file_strings():
    """The strings of the code, among which are the names of the files that it writes."""
    strings = set()
    for path in SOURCES:
        strings.update(parse_source(path).strings)
    return strings


def exists(name, page):
    """Whether a file is there, from a folder that pages leave out, or beside the page."""
    for folder in (ROOT, ROOT / "memformers", ROOT / "docs", ROOT / "experiments", page.parent):
        if (folder / name).exists():
            return True
    # Pages may also name a file by the end of its path.
    return any(f"/{file}".endswith(f"/{name}") for file in repository_files())


def is_known_file(name, page):
    file_name = name.rpartition("/")[2]
    if "*" in file_name or Path(file_name).stem in EXAMPLES.split():
        return True
    return exists(name, page) or file_name in file_strings()


def module_exists(module):
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__main__.py").exists()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_path_on_a_page_exists(page):
    """It is a file of the repository, or one that the code names since it writes or reads it."""
    missing = set()
    for span in spans(page):
        for name in re.findall(rf"(?<![\w/.@*-])[\w./*-]*\w{SUFFIXES}(?![\w./-])", span):
            if not is_known_file(name, page):
                missing.add(name)
        for module in re.findall(r"python -m (experiments[\w.]*)", span):
            if not module_exists(module):
                missing.add(module)
    assert missing == set()


@cache
def names_of_tests():
    """The names of all tests and of their files."""
    names = set()
    for path in ROOT.glob("tests/**/*.py"):
        names.add(path.stem)
        names.update(re.findall(r"^def (test_\w+)", read_file(path), re.MULTILINE))
    return names


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_test_on_a_page_exists(page):
    for span in spans(page):
        for name in re.findall(r"\btest_\w+", span):
            assert name in names_of_tests()
    for words in re.findall(r"pytest [^\n]*-k (\w+)", read_file(page)):
        assert any(words in name for name in names_of_tests()), f"-k {words} selects nothing"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_name_is_in_the_file_that_a_page_names_for_it(page):
    """As in `Sampling` in [generation/generate.py](…)."""
    missing = set()
    for name, link in re.findall(r"`(\w+)`,? (?:of|in) \[[^\]]*\]\(([^)#]+\.(?:py|md))\)", read_file(page)):
        if not re.search(rf"\b{name}\b", read_file(page.parent / link)):
            missing.add((name, link))
    assert missing == set()


def attributes_of(kind):
    """Fields without a default are no attributes of their class, so that dir alone lacks them."""
    fields = getattr(kind, "__dataclass_fields__", {})
    return {*dir(kind), *fields, *getattr(kind, "__annotations__", {})}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_an_attribute_of_a_public_class_exists(page):
    """As in `Memory.n_valid`."""
    missing = set()
    for span in spans(page):
        for name, attribute in re.findall(r"\b([A-Z]\w+)\.([a-z_]\w*)", span):
            if name in memformers.__all__ and attribute not in attributes_of(getattr(memformers, name)):
                missing.add(f"{name}.{attribute}")
    assert missing == set()


def resolve(path):
    """What a dotted name leads to, or None."""
    try:
        return resolve_name(path)
    except (ImportError, AttributeError, ValueError):
        return None


def resolves(target, scopes):
    """Whether a dotted name is found from one of ``scopes``, dotted names of modules or classes, or alone."""
    for scope in ("", *scopes):
        path = f"{scope}.{target}".removeprefix(".")
        if resolve(path) is not None:
            return True
        owner, _, name = path.rpartition(".")
        if owner and name in attributes_of(resolve(owner)):
            return True
    return False


def test_a_dotted_name_of_the_package_resolves():
    """Also in code blocks, in which tests don't run all."""
    missing = set()
    for path in (*PAGES, *SOURCES):
        for name in re.findall(r"(?<![\w/.-])memformers(?:\.[A-Za-z_]\w*)+", read_file(path)):
            # A site and a file look like dotted names.
            if name.startswith(("memformers.github", "memformers.md")):
                continue
            # A module may need another library to be imported.
            is_module = (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
            if not is_module and not resolves(name, []):
                missing.add(name)
    assert missing == set()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_a_reference_on_a_page_resolves(page):
    for target in reference_targets(read_file(page)):
        assert resolves(target, [])


def reference_targets(text):
    """The dotted names that the references of a text lead to."""
    for name, target in REFERENCE.findall(text):
        yield (target or name).removesuffix("()")


def references_in(node, scopes):
    """The references of docstrings, each with the dotted names of what it is in, the innermost last."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            for target in reference_targets(str(child.value.value)):
                yield target, scopes
        elif isinstance(child, ast.ClassDef):
            yield from references_in(child, [*scopes, f"{scopes[-1]}.{child.name}"])
        else:
            yield from references_in(child, scopes)


@pytest.mark.parametrize("path", SOURCES, ids=page_id)
def test_a_reference_in_a_docstring_resolves(path):
    source = read_file(path)
    if not REFERENCE.search(source):
        return
    module = page_id(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    try:
        import_module(module)
    except ImportError as error:
        pytest.skip(f"an optional library is missing: {error}")
    for target, scopes in references_in(ast.parse(source), ["memformers", module]):
        assert resolves(target, scopes)
