"""The plain files of docs/plain compute what the package computes."""

import ast
import re
import runpy
import sys
from importlib import import_module

import pytest
import torch
from torch import nn

from docs.building.results import ROOT
from memformers import MemoryLM, ModelConfig
from memformers.data.builtin import write_play
from tests.docs.pages import read_file

FOLDER = ROOT / "docs/plain"
# Patterns in the package's names of weights, and what the plain files have in their place.
NAMES = {
    r"^transformer\.": "", r"rules\.(\d+)\.f_c\.conv\.": r"compress.\1.",
    r"\.self_attn\.": ".attention.", r"\.norm_self_attn\.": ".norm1.", r"\.norm_ff\.": ".norm2.",
    r"\.layer1\.": ".0.", r"\.layer2\.": ".2.",
}  # fmt: skip
SIZES = {"d_model": 12, "n_heads": 3, "n_layers": 2}


@pytest.fixture(scope="module")
def plain():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))  # as for a file that is run in its folder
        yield {name: import_module(name) for name in ("transformer_xl", "compressive")}


def build(plain, model):
    """The package's model and the plain one, in float64, with the same random weights."""
    if model == "compressive":
        memory = {"mem_len": 5, "c_mem_len": 3, "compression_rate": 2}
        theirs = plain["compressive"].CompressiveTransformer(11, mem_len=5, c_mem_len=3, rate=2, **SIZES)
    else:
        memory = {"mem_len": 6}
        theirs = plain["transformer_xl"].TransformerXL(11, mem_len=6, **SIZES)
    config = ModelConfig(model, vocab_size=11, d_ff=48, segment_len=7, **SIZES, **memory)
    ours = MemoryLM(config).double()
    # Large weights, biases too, so that each term shows in the outputs.
    for parameter in ours.parameters():
        nn.init.normal_(parameter, std=0.5)
    theirs = theirs.double()
    weights = {}
    for name, weight in ours.state_dict().items():
        weights[plain_name(name)] = weight
    theirs.load_state_dict(weights)
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
    our_memory = None
    their_memory = None
    # The last segment is shorter.
    for tokens in torch.randint(11, (31, 3)).split(7):
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
    # Old positions became slots, so that there is a loss of the compression.
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
    source = read_file(FOLDER / f"{name}.py")
    definitions = {getattr(node, "name", ""): node for node in ast.parse(source).body}
    n_lines = sum(count_lines(definitions[part], source) for part in parts)
    assert most - 10 < n_lines <= most


def count_lines(node, source):
    """The lines of a function or class without empty lines, comments and docstrings."""
    n_lines = 0
    for line in ast.get_source_segment(source, node).splitlines():
        is_code = line.strip() and not line.strip().startswith("#")
        n_lines += bool(is_code)
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(inner):
            docstring = inner.body[0]
            n_lines -= docstring.end_lineno - docstring.lineno + 1
    return n_lines


# Texts of any language, and how their sample begins: with their first line, or 40 characters of it.
TEXTS = {
    "play": ("FIRST CITIZEN:\n" + write_play(2_000), "FIRST CITIZEN:\n"),
    "novel without a colon": ("It was a dark night\nand it rained\n" * 60, "It was a dark night\n"),
    "Chinese": ("道可道，非常道。\n名可名，非常名。\n" * 60, "道可道，非常道。\n"),
    "one long line": ("a" * 3_000, "a" * 40),
    "begins with a line break": ("\nab" * 1_000, "\n"),
    "as short as can be": ("xy" * 16, "xyxyxyxyxyxyxyxyxyxyxyxyxyxyxyxy"),
}


def run_plain(plain, name, *arguments):
    module = plain[name]
    model = module.TransformerXL if name == "transformer_xl" else module.CompressiveTransformer
    module.main(model, *map(str, arguments))


# The text is read by one function of both files.
@pytest.mark.parametrize(
    ("name", "kind"), [*(("transformer_xl", kind) for kind in TEXTS), ("compressive", "play")]
)
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


def test_a_plain_file_says_offline_that_a_text_can_be_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["transformer_xl.py"])
    # A proxy that nothing listens on stands for a missing network.
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / "transformer_xl.py"), run_name="__main__")
    # Python writes a text to stderr and exits with 1.
    assert "Name a text file in UTF-8 as the first argument" in end.value.code
    assert "\n" not in end.value.code
    assert list(tmp_path.iterdir()) == []


def test_the_repository_has_one_address():
    [address] = re.findall(
        r'^Repository = "https://github\.com/([^"]+)"', read_file("pyproject.toml"), re.MULTILINE
    )
    owner, name = address.split("/")
    settings = ["pyproject.toml", "CITATION.cff", "mkdocs.yml"]
    pages = ["README.md", "docs/index.md", "docs/quick-start.md", "docs/notebooks/index.md"]
    notebooks = (ROOT / "experiments/notebooks").iterdir()
    for path in (*settings, *pages, *notebooks):
        # Also after git+ and in addresses of Colab.
        addresses = re.findall(rf"github(?:\.com)?/([\w.-]+/{name})\b", read_file(path))
        assert {*addresses} == {address}, f"{path}: see 'A release' in CONTRIBUTING.md"
    for path in ("pyproject.toml", "CITATION.cff"):
        assert f"https://{owner}.github.io/{name}" in read_file(path)
