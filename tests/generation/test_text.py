"""Text read and written in a stream, and the memory of it saved and taken up again."""

import pytest
import torch
from memformers.generation.memory_file import MODEL, fingerprint, load_memory, save_memory
from safetensors.torch import load_file, save_file

from memformers.data.tokenizer import CharacterTokenizer, WordTokenizer
from memformers.generation.generate import Sampling, TextStream, continue_text, make_generator
from memformers.generation.incremental import Stepper
from tests.builders import small_lm
from tests.texts import documents, kept, read_on, same, tokens

LETTERS = CharacterTokenizer("abcdefghij\n")
GREEDY = Sampling(temperature=0.0)


def written(stream, n, **options):
    return "".join(stream.write(n, GREEDY, make_generator(0, stream.device), **options))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
@pytest.mark.parametrize("read", [9, 14, 33, 37])
def test_a_saved_memory_goes_on_in_its_document(model, read, tmp_path):
    """Whether that began in the running segment or before it."""
    lm, path, text = small_lm(model).eval(), tmp_path / "memory", tokens(60, 1)
    starts = documents(60, 1, (8, 0), (36, 0))
    first = Stepper(lm, 1)
    first.read(text[:read], starts[:read])
    save_memory(first, path)
    second = load_memory(lm, path)
    same([second.last, *kept(second.memory())], [first.last, *kept(first.memory())])
    same([read_on(second, text[read:], starts[read:])], [read_on(first, text[read:], starts[read:])])


def test_a_memory_of_another_model_or_a_broken_one_is_an_error(tmp_path):
    path, lm = tmp_path / "memory", small_lm("transformer-xl")
    decoder = Stepper(lm, 1)
    with pytest.raises(ValueError, match="nothing was read"):
        save_memory(decoder, path)
    decoder.read(tokens(9, 1))
    save_memory(decoder, path)
    whole = load_file(path)
    assert set(whole) == {"mem.0", "mem.1", "running", "logits"}
    for changed in (
        {"doc_starts": torch.zeros(3, 1, dtype=torch.bool)}, {"valid": torch.zeros(2, dtype=torch.int64)},
        {"mem.0": torch.tensor(3.0)}, {"mem.0": torch.zeros(4, 1)}, {"mem.0": torch.zeros(5, 1, 11)},
        {"mem.0": torch.full((5, 1, 12), torch.nan)}, {"logits": torch.zeros(1, 3)}, {"mem.7": torch.ones(1)},
        {"running": torch.zeros(7, 1, dtype=torch.int64)}, {"running": torch.tensor(3)},
        {"running": torch.zeros(2, 2, dtype=torch.int64)}, {"running": torch.full((2, 1), 11)},
    ):  # fmt: skip
        save_file(whole | changed, path, metadata={MODEL: fingerprint(lm)})
        with pytest.raises(ValueError, match="not a complete memory"):
            load_memory(lm, path)
    with pytest.raises(ValueError, match="another model"):
        load_memory(small_lm("transformer-xl"), path)  # the same shape, but other weights
    path.write_bytes(path.read_bytes()[:50])
    for broken in (path, tmp_path / "gone", tmp_path):
        with pytest.raises(ValueError, match="can't be read"):
            load_memory(lm, broken)
    with pytest.raises(ValueError, match="exists already and is not a saved memory"):
        save_memory(decoder, path)
    with pytest.raises(ValueError, match="is not a folder"):
        save_memory(decoder, tmp_path / "gone" / "memory")
    with pytest.raises(ValueError, match="no memory to save"):
        save_memory(Stepper(small_lm("transformer"), 1), path)


def test_writing_ends_with_the_stop():
    lm = small_lm("transformer-xl").eval()
    text = continue_text(lm, LETTERS, "abc", 200, Sampling(), seed=3)
    stop = text[20:23]
    shorter = continue_text(lm, LETTERS, "abc", 200, Sampling(), seed=3, stop=stop)
    assert shorter == text[: text.index(stop) + 3]
    with pytest.raises(ValueError, match="max_new_tokens=-1"):
        continue_text(lm, LETTERS, "abc", -1, Sampling())


@pytest.mark.parametrize(("prompt", "before"), [("a b", " "), ("a b\n", "")])
def test_a_word_follows_a_space_and_a_line_none_in_the_prompt_and_in_portions(prompt, before):
    words = WordTokenizer(["<eos>", "<unk>", *"abcdefgh"])
    lm = small_lm("transformer-xl", vocab_size=words.vocab_size).eval()
    stream = TextStream(lm, words)
    stream.read(prompt)
    text = written(stream, 5) + written(stream, 4)
    again = TextStream(lm, words)
    again.read(prompt)
    assert written(again, 9) == text
    assert text.startswith(before)
    assert words.encode(prompt + text).tolist()[: len(words.encode(prompt))] == words.encode(prompt).tolist()
