"""The plain files of docs/plain compute what the package computes."""

import ast
import os
import re
import sys
from importlib import import_module

import pytest
import torch
from torch import nn

from docs.building.markdown import BLOCK
from docs.building.results import ROOT
from memformers import MemoryLM, ModelConfig
from memformers.data.builtin import write_play
from tests.processes import finish

FOLDER = ROOT / "docs/plain"
NAMES = {
    r"^transformer\.": "", r"rules\.(\d+)\.f_c\.conv\.": r"compress.\1.",
    r"\.self_attn\.": ".attention.", r"\.norm_self_attn\.": ".norm1.", r"\.norm_ff\.": ".norm2.",
    r"\.layer1\.": ".0.", r"\.layer2\.": ".2.",
}  # fmt: skip
"""The package's names of weights, and those of the plain files."""
SIZES = {"d_model": 12, "n_heads": 3, "n_layers": 2}


@pytest.fixture(scope="module")
def plain():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))  # as for a file that is run in its folder
        yield {name: import_module(name) for name in ("transformer_xl", "compressive")}


def build(plain, model):
    """The package's model and the plain one, in float64, with the same random weights."""
    sizes = {"mem_len": 6} if model == "transformer-xl" else {"mem_len": 5, "c_mem_len": 3}
    rate = {} if model == "transformer-xl" else {"compression_rate": 2}
    config = ModelConfig(model, vocab_size=11, d_ff=48, segment_len=7, **SIZES, **sizes, **rate)
    ours = MemoryLM(config).double()
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.5)
    if rate:
        theirs = plain["compressive"].CompressiveTransformer(11, rate=2, **SIZES, **sizes).double()
    else:
        theirs = plain["transformer_xl"].TransformerXL(11, **SIZES, **sizes).double()
    theirs.load_state_dict({plain_name(name): value for name, value in ours.state_dict().items()})
    return ours, theirs


def plain_name(name):
    for pattern, replacement in NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name


def assert_same(ours, theirs):
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-12)


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_a_plain_model_equals_the_package_to_1e_12(plain, model):
    ours, theirs = build(plain, model)
    our_memory = their_memory = None
    for tokens in torch.randint(11, (31, 3)).split(7):  # the last segment is shorter
        logits, our_memory, our_loss = ours(tokens, our_memory)
        plain_logits, their_memory, *auxiliary = theirs(tokens, their_memory)
        assert_same(logits, plain_logits)
        assert_same(our_loss, torch.as_tensor(sum(auxiliary), dtype=torch.float64))
        if model == "compressive":
            assert_same([(layer.slots, layer.mem) for layer in our_memory.layers], their_memory)
        else:
            assert_same([layer.mem for layer in our_memory.layers], their_memory)
        # Squares of logits, so that gradients are large enough to differ.
        (logits.square().mean() + our_loss).backward()
        (plain_logits.square().mean() + sum(auxiliary)).backward()
    assert our_loss > 0 or model == "transformer-xl"
    weights = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(weights[plain_name(name)].grad, parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "most", "parts"),
    [("transformer_xl", 70, ["Attention", "sinusoids", "Layer", "TransformerXL"]),
     ("compressive", 40, ["CompressiveTransformer", "reconstruction_loss", "content_attention"])],
)  # fmt: skip
def test_the_plain_models_are_as_short_as_the_pages_say(name, most, parts):
    # Without empty lines, comments and docstrings
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    n_lines = 0
    for part in parts:
        [node] = [node for node in ast.parse(source).body if getattr(node, "name", "") == part]
        for line in ast.get_source_segment(source, node).splitlines():
            is_code = line.strip() and not line.strip().startswith("#")
            n_lines += bool(is_code)
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
                docstring = inner.body[0]
                n_lines -= docstring.end_lineno - docstring.lineno + 1
    assert most - 10 < n_lines <= most


TEXTS = {
    "play": ("FIRST CITIZEN:\n" + write_play(2_000), "FIRST CITIZEN:\n"),
    "novel without a colon": ("It was a dark night\nand it rained\n" * 60, "It was a dark night\n"),
    "Chinese": ("道可道，非常道。\n名可名，非常名。\n" * 60, "道可道，非常道。\n"),
    "one long line": ("a" * 3_000, "a" * 40),
    "begins with a line break": ("\nab" * 1_000, "\n"),
    "as short as can be": ("xy" * 16, "xyxyxyxyxyxyxyxyxyxyxyxyxyxyxyxy"),
}
"""Texts of any language, and how their sample begins: with their first line, or 40 characters of it."""


def run_plain(plain, name, *arguments):
    module = plain[name]
    model = module.TransformerXL if name == "transformer_xl" else module.CompressiveTransformer
    module.main(model, *map(str, arguments))


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("name", ["transformer_xl", "compressive"])
def test_a_plain_file_samples_from_any_text(plain, name, kind, tmp_path, capsys):
    text, prompt = TEXTS[kind]
    path = tmp_path / "novel.txt"
    path.write_text(text, encoding="utf-8")
    run_plain(plain, name, path, 2, 20)
    first, second, rest = capsys.readouterr().out.split("\n", 2)
    assert first.startswith("step 0: ")
    assert second.startswith("step 1: ")
    assert rest.startswith(prompt)
    assert len(rest) == len(prompt) + 20 + len("\n")
    assert set(rest) <= {*text, "\n"}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"\xff\xfe\x00", "UTF-8"), (b"", "got 0"), (b"x" * 31, "got 31")],
)
def test_a_plain_file_says_in_one_line_what_is_wrong_with_a_text(plain, content, message, tmp_path):
    path = tmp_path / "novel.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SystemExit) as end:
        run_plain(plain, "compressive", path)
    assert message in end.value.code
    assert "\n" not in end.value.code
    assert path.exists() == (content is not None), "nothing is downloaded to the path of a text"


def test_a_plain_file_says_offline_that_a_text_can_be_named(tmp_path):
    """A proxy that nothing listens on stands for a missing network."""
    nowhere = "http://127.0.0.1:9"
    environment = os.environ | {"https_proxy": nowhere, "HTTPS_PROXY": nowhere, "no_proxy": ""}
    ended = finish([sys.executable, FOLDER / "transformer_xl.py"], cwd=tmp_path, env=environment)
    assert ended.returncode == 1
    [line] = ended.stderr.splitlines()
    assert "Name a text file in UTF-8 as the first argument" in line
    assert list(tmp_path.iterdir()) == []


def test_the_repository_has_one_address():
    [address] = re.findall(
        r'^Repository = "https://github\.com/([^"]+)"', read("pyproject.toml"), re.MULTILINE
    )
    owner, name = address.split("/")
    notebooks = [f"experiments/notebooks/{path.name}" for path in (ROOT / "experiments/notebooks").iterdir()]
    pages = ["README.md", "docs/index.md", "docs/quick-start.md", "docs/notebooks/index.md", "mkdocs.yml"]
    for path in ["pyproject.toml", "CITATION.cff", *pages, *notebooks]:
        # Also after git+ and in addresses of Colab.
        addresses = re.findall(rf"github(?:\.com)?/([\w.-]+/{name})\b", read(path))
        assert {*addresses} == {address}, f"{path}: see 'A release' in CONTRIBUTING.md"
    for path in ("pyproject.toml", "CITATION.cff"):
        assert f"https://{owner}.github.io/{name}" in read(path)


def read(path):
    return (ROOT / path).read_text(encoding="utf-8")


TRANSLATED = (
    r"\bas many\b|\b(?:was|were) (?:not )?seen\b|\bof (?:your|one's|its|their) own\b|\b(?:is|are) worth\b"
    r"|\b(?:go|goes|going) on\b|\bcomes? back\b|\bat hand\b|\bin the place of\b|\bleaves? out zero\b"
)


@pytest.mark.parametrize(
    "path", ["README.md", *sorted(p.relative_to(ROOT) for p in ROOT.glob("docs/**/*.md"))]
)
def test_pages_read_like_english(path):
    """See 'How sentences read' in CONTRIBUTING.md. Tables and source are written elsewhere."""
    prose = re.sub(r"^```.*?^```$", "", BLOCK.sub("", read(path)), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(TRANSLATED, " ".join(prose.split()), re.IGNORECASE) == []


def test_no_value_has_a_name_that_says_nothing_about_it():
    """See 'How the code reads' in CONTRIBUTING.md."""
    stored = []
    for path in (
        p for part in ("memformers", "experiments", "tests", "docs") for p in ROOT.glob(f"{part}/**/*.py")
    ):
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.arg):
                stored.append((node.arg, path))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                stored.append((node.id, path))
    meaningless = {"told", "taken", "said", "found", "given", "each", "own"}
    assert [pair for pair in stored if pair[0] in meaningless] == []
