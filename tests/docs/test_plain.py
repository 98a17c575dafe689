"""The plain files of docs/plain compute what the package computes."""

import ast
import re
from importlib import import_module

import pytest
import torch
from torch import nn

from docs.building.markdown import BLOCK
from docs.building.results import ROOT
from memformers import MemoryLM, ModelConfig
from memformers.data.builtin import write_play

FOLDER = ROOT / "docs/plain"
NAMES = {
    r"^transformer\.": "", r"layers\.(\d+)\.compress\.conv\.": r"compress.\1.",
    r"\.self_attn\.": ".attention.", r"\.norm_self_attn\.": ".norm1.", r"\.norm_ff\.": ".norm2.",
    r"\.layer1\.": ".0.", r"\.layer2\.": ".2.",
}  # fmt: skip
"""The package's names of weights, and those of the plain files."""
SIZES = {"d_model": 12, "heads": 3, "n_layers": 2}


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
            assert_same([*zip(our_memory.c_mem, our_memory.mem, strict=True)], their_memory)
        else:
            assert_same([*our_memory.mem], their_memory)
        # Squares of logits, so that gradients are large enough to differ.
        (logits.square().mean() + our_loss).backward()
        (plain_logits.square().mean() + sum(auxiliary)).backward()
    assert our_loss > 0 or model == "transformer-xl"
    weights = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(weights[plain_name(name)].grad, parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "lines", "parts"),
    [("transformer_xl", 60, ["Attention", "sinusoids", "Layer", "TransformerXL"]),
     ("compressive", 30, ["CompressiveTransformer", "reconstruction_loss", "content_attention"])],
)  # fmt: skip
def test_the_plain_models_are_as_short_as_the_pages_say(name, lines, parts):
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    nodes = [node for node in ast.parse(source).body if getattr(node, "name", "") in parts]
    assert [node.name for node in nodes] == parts
    texts = [ast.get_source_segment(source, node) for node in nodes]
    docstrings = sum(ast.get_docstring(node) is not None for node in nodes)  # of one line each
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) - docstrings <= lines


@pytest.mark.parametrize("name", ["transformer_xl", "compressive"])
def test_a_plain_file_trains_and_prints_a_sample(plain, name, tmp_path, capsys):
    text = tmp_path / "input.txt"
    text.write_text("ROMEO:\n" + write_play(20_000), encoding="utf-8")
    module = plain[name]
    model = module.TransformerXL if name == "transformer_xl" else module.CompressiveTransformer
    module.main(model, str(text), "2", "20")
    losses, _, sample = capsys.readouterr().out.partition("ROMEO:\n")
    assert losses.count("nats per character") == 2
    assert len(sample) == 20 + len("\n")


def test_the_address_of_the_repository_is_everywhere_the_one_in_pyproject():
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
def test_a_page_has_none_of_the_phrases_that_sound_like_a_translation(path):
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
