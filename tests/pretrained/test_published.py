"""Published Transformer-XL models: folders as Hugging Face and the original write them, and worse files.

``transfo_xl_wt`` is a folder of random weights that transformers 4.35.2 wrote, and its own mean loss of a
text.
"""

import pickle
import sys
from collections import Counter
from pathlib import Path
from shutil import copytree
from types import ModuleType

import pytest
import torch
from torch import nn

from memformers import from_transfo_xl
from memformers.common.errors import UserError
from memformers.common.files import read_json
from memformers.evaluation.evaluate import evaluate
from memformers.pretrained.own import load_checkpoint
from memformers.pretrained.published import load_plain
from tests.builders import Bomb
from tests.pretrained.transfo_xl_reference import Reference

FOLDER = Path(__file__).parent / "transfo_xl_wt"
CPU = torch.device("cpu")
WORDS = ["<eos>", "the", "<unk>", *"abcdefgh"]


@pytest.fixture
def original(monkeypatch):
    """A function that writes an object of the original's classes, whose modules are gone when it is read."""

    def write(path, thing):
        with monkeypatch.context() as context:
            for kind in {type(thing), *(type(inner) for inner in vars(thing).values())}:
                if kind.__module__ in ("mem_transformer", "data_utils", "vocabulary"):
                    module = ModuleType(kind.__module__)
                    setattr(module, kind.__name__, kind)
                    context.setitem(sys.modules, kind.__module__, module)
            torch.save(thing, path)

    return write


def class_of(module, name, base=object):
    """An empty class of the original's program."""
    return type(name, (base,), {"__module__": module})


def whole_model(reference):
    """The original's model with the reference's weights and settings."""
    model = class_of("mem_transformer", "MemTransformerLM", nn.Module)()
    for name, tensor in reference.named(reference.weights()).items():
        *path, last = name.split(".")
        place = model
        for part in path:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place._modules[part]
        place.register_parameter(last, nn.Parameter(tensor.detach()))
    model.drop = nn.Dropout(0.1)
    for layer in model.layers.children():
        layer.dec_attn.pre_lnorm, layer.dec_attn.dropatt = reference.pre_lnorm, nn.Dropout(0.1)
    model.word_emb.div_val, model.word_emb.cutoffs = reference.div_val, [*reference.cutoffs, reference.V]
    sizes = {"d_embed": reference.d_embed, "d_model": reference.D, "n_head": reference.H, "d_head": 4}
    sizes |= {"n_layer": reference.layers, "n_token": reference.V, "ext_len": 0, "attn_type": 0}
    vars(model).update(
        sizes, **{n: reference.config[n] for n in ("tgt_len", "mem_len", "clamp_len", "same_length")}
    )
    return model


def corpus_of(words, **changes):
    """The original's corpus of these words."""
    corpus, vocab = class_of("data_utils", "Corpus")(), class_of("vocabulary", "Vocab")()
    vars(vocab).update(idx2sym=words, counter=Counter(words), lower_case=False, delimiter=None, **changes)
    vars(corpus).update(dataset="wt103", vocab=vocab, train=torch.arange(3))
    return corpus


def test_a_folder_of_hugging_faces_has_its_loss():
    model, tokenizer = load_checkpoint(FOLDER, CPU)
    expected, text = read_json(FOLDER / "expected.json"), (FOLDER / "test.tokens").read_text()
    tokens = tokenizer.encode(text)
    assert tokens.tolist() == expected["ids"]
    assert evaluate(model, tokens, 1).loss == pytest.approx(expected["loss"], abs=1e-6)
    pairs = zip(tokenizer.decode(tokens).split(), text.split(), strict=True)
    assert {word for word, theirs in pairs if word != theirs} == {"<unk>"}


@pytest.mark.parametrize("pre_lnorm", [False, True])
def test_a_folder_of_the_originals_gives_its_outputs_without_its_code(pre_lnorm, original, tmp_path):
    reference = Reference((3, 7), 2, 8, tied=True, pre_lnorm=pre_lnorm, clamp_len=4)
    source = whole_model(reference)
    original(tmp_path / "model.pt", source)
    original(tmp_path / "cache.pt", corpus_of(WORDS))
    model, tokenizer = load_checkpoint(tmp_path, CPU)
    direct = from_transfo_xl(source.state_dict(), reference.config | {"dropout": 0.1})
    assert model.config == direct.config == from_transfo_xl(tmp_path).config
    tokens = tokenizer.encode("the a\nzebra\n")
    assert tokens.tolist() == [1, 3, 0, 2, 0]
    torch.testing.assert_close(model(tokens[:, None]).logits, direct(tokens[:, None]).logits, rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [lambda bomb: bomb, lambda bomb: {"idx2sym": WORDS, "counter": bomb}])
@pytest.mark.parametrize("save", [torch.save, lambda thing, path: path.write_bytes(pickle.dumps(thing))])
def test_code_in_a_pickle_is_refused_by_name_and_never_run(wrap, save, tmp_path):
    save(wrap(Bomb(tmp_path / "bang")), tmp_path / "vocab.pkl")
    with pytest.raises(UserError, match="mkdir"):
        load_plain(tmp_path / "vocab.pkl")
    assert not (tmp_path / "bang").exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_is_refused_before_it_is_loaded(tmp_path):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "vocab.bin")
    with pytest.raises(UserError, match="it is TorchScript, which is code"):
        load_plain(tmp_path / "vocab.bin")


@pytest.mark.parametrize(
    ("vocabulary", "said"),
    [
        ({"idx2sym": WORDS}, "83 words"), ({"idx2sym": None}, "idx2sym"), ([1, 2], "idx2sym"),
        ({"idx2sym": [1, 2]}, "idx2sym"), ({"idx2sym": WORDS, "lower_case": True}, "lower_case"),
        ({"idx2sym": WORDS[1:]}, "<eos>"),
    ],
)  # fmt: skip
def test_a_vocabulary_of_something_else_is_one_line(vocabulary, said, tmp_path):
    folder = copytree(FOLDER, tmp_path / "model")
    (folder / "vocab.bin").write_bytes(pickle.dumps(vocabulary))
    with pytest.raises(UserError, match=said):
        load_checkpoint(folder, CPU)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "vocab.bin", "config.json"])
@pytest.mark.parametrize("change", [lambda raw: b"", lambda raw: raw[: len(raw) // 2], None])
def test_a_missing_or_broken_file_is_one_line(name, change, tmp_path):
    folder = copytree(FOLDER, tmp_path / "model")
    path = folder / name
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    with pytest.raises(UserError):
        load_checkpoint(folder, CPU)
