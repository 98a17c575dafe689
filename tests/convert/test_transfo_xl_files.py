"""Files that other programs wrote, and worse ones: weights, and folders as Hugging Face's transformers write
them.

``transfo_xl_wt`` is a folder of random weights that transformers 4.35.2 wrote, and its own mean loss of a
text.
"""

from collections import Counter, OrderedDict
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import save_file

from memformers import from_labml, from_transfo_xl, load_weights
from memformers.common.files import read_json
from memformers.convert.transfo_xl import load_vocabulary
from memformers.evaluation.evaluate import evaluate
from memformers.runs.load import load_checkpoint
from tests.builders import Bomb

FOLDER = Path(__file__).parent / "transfo_xl_wt"
CPU = torch.device("cpu")
WORDS = ["<eos>", "the", "<unk>", *"abcdefgh"]
WEIGHTS = "pytorch_model.bin"
VOCABULARY = "vocab.bin"


@pytest.fixture
def folder(tmp_path):
    """A copy of the folder, to change."""
    return copytree(FOLDER, tmp_path / "model")


def test_a_folder_of_hugging_faces_has_its_loss():
    model, tokenizer = load_checkpoint(FOLDER, CPU)
    expected = read_json(FOLDER / "expected.json")
    text = (FOLDER / "test.tokens").read_text()
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == expected["ids"]
    assert evaluate(model, tokens, 1).loss == pytest.approx(expected["loss"], abs=1e-6)
    decoded = tokenizer.decode(tokens).split()
    changed = {word for word, wanted in zip(decoded, text.split(), strict=True) if word != wanted}
    assert changed == {"<unk>"}


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [({"idx2sym": WORDS}, "83 .* 11"), ({"idx2sym": None}, "idx2sym"), ([1, 2], "idx2sym"),
     ({"idx2sym": [1, 2]}, "idx2sym"), ({"idx2sym": WORDS, "lower_case": True}, "lower_case"),
     ({"idx2sym": WORDS[1:]}, "<eos>")],
)  # fmt: skip
def test_a_wrong_vocabulary_is_one_line(vocabulary, message, folder):
    torch.save(vocabulary, folder / VOCABULARY)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder, CPU)


@pytest.mark.parametrize(
    ("name", "message"), [(WEIGHTS, "weights"), (VOCABULARY, "vocabulary"), ("config.json", "config")]
)
@pytest.mark.parametrize("cut", [2, None])
def test_a_missing_or_broken_file_is_one_line(name, message, cut, folder):
    path = folder / name
    if cut:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // cut])
    else:
        path.unlink()
    with pytest.raises(ValueError, match=message):
        load_checkpoint(folder, CPU)


def test_weights_without_a_head_are_an_error_that_says_so(folder):
    state = {name: t for name, t in load_weights(folder / WEIGHTS).items() if not name.startswith("crit.")}
    torch.save(state, folder / WEIGHTS)
    with pytest.raises(ValueError, match=r"no head, crit\..* TransfoXLLMHeadModel"):
        load_checkpoint(folder, CPU)


@pytest.mark.parametrize("prefix", ["module.", "module._orig_mod.model.", "transformer."])
def test_a_prefix_that_all_names_share_is_left_out(prefix, tmp_path):
    state = load_weights(FOLDER / WEIGHTS)
    labml = {"layers.0.self_attn.key_pos_embeddings": torch.zeros(8192, 3, 4), "norm.weight": torch.ones(2)}
    layer = {"layers.0.a": torch.ones(2)}
    for name, weights in {"transfo_xl": state, "labml": labml, "layer": layer}.items():
        torch.save({prefix + key: tensor for key, tensor in weights.items()}, tmp_path / name)
        assert load_weights(tmp_path / name).keys() == weights.keys()
    named = {prefix + name: t for name, t in state.items()}
    prefixed = from_transfo_xl(named, read_json(FOLDER / "config.json"))
    assert all(map(torch.equal, prefixed.parameters(), from_transfo_xl(FOLDER).parameters()))
    ours = from_labml({prefix + name: t for name, t in labml.items()})
    assert ours.keys() == from_labml(labml).keys()
    assert ours["layers.0.self_attn.r"].shape == (3, 4096, 4)  # all distances


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    vocabulary = tmp_path / VOCABULARY
    exploded = tmp_path / "exploded"
    harmless = {"counter": Counter(WORDS), "sym2idx": OrderedDict(a=3), "special": {"<eos>"}}
    torch.save({"idx2sym": WORDS, **harmless}, vocabulary)
    assert load_vocabulary(tmp_path).vocabulary == WORDS
    for hostile in (Bomb(exploded), {"idx2sym": WORDS, "counter": Bomb(exploded)}):
        torch.save(hostile, vocabulary)
        for load, argument in ((load_vocabulary, tmp_path), (load_weights, vocabulary)):
            with pytest.raises(ValueError, match=r"vocab\.bin is refused: .*\.mkdir") as error:
                load(argument)
            assert "\n" not in str(error.value)
    assert not exploded.exists()
    # Unsafe on purpose: this file was made above, and its code only makes a folder. Without this check, a
    # file whose code never runs would pass the test.
    torch.load(vocabulary, weights_only=False)
    assert exploded.exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("none.bin", None, "missing"), ("list.bin", [1, 2], "list"), ("numbers.bin", {3: torch.ones(2)}, "3"),
     ("run.bin", {"state_dict": {}, "epoch": 3}, "state_dict, epoch"), ("empty.bin", {}, "by name"),
     ("text.bin", "no weights\n", r"text\.bin"), ("text.safetensors", "no weights\n", r"text\.safetensors")],
)  # fmt: skip
def test_files_without_weights_are_named(name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        if isinstance(content, str):
            path.write_text(content)
        else:
            torch.save(content, path)
    with pytest.raises(ValueError, match=message):
        load_weights(path)


@pytest.mark.parametrize("save", [torch.save, save_file])
def test_a_broken_file_is_an_error_or_the_tensors(save, tmp_path):
    path = tmp_path / ("model.safetensors" if save is save_file else "model.bin")
    save({"a": torch.randn(7, 3), "b": torch.randn(5)}, path)
    content = path.read_bytes()
    messages = []
    for broken in [*truncated(content), *with_a_changed_byte(content)]:
        path.write_bytes(broken)
        try:
            assert all(isinstance(tensor, torch.Tensor) for tensor in load_weights(path).values())
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) >= 20  # the truncated ones at least
    assert not [message for message in messages if "\n" in message]


def truncated(content):
    return [content[: len(content) * part // 20] for part in range(20)]


def with_a_changed_byte(content):
    """Each with one bit changed, at 200 random positions."""
    generator = torch.Generator().manual_seed(0)
    changed = []
    for position in torch.randint(0, len(content), (200,), generator=generator).tolist():
        copy = bytearray(content)
        copy[position] ^= 16
        changed.append(bytes(copy))
    return changed
