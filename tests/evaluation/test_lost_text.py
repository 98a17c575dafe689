"""Tokenizers that lose a part of a text: their losses are divided by the bytes that the text itself has."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from memformers import MemoryLM, ModelConfig, train
from memformers import evaluate as evaluate_text
from memformers.common.files import read_json
from memformers.data.files import PIECE
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import dataset_of
from memformers.data.tokenizers import SubwordTokenizer, build_tokenizer, learn_bpe
from memformers.evaluation.units import losses_by_unit, predicted_units
from memformers.report.document import write_report
from memformers.runs.metrics import read_metrics
from tests.builders import small_training
from tests.processes import run

LINE = "Unknowable kings, a  King's ½ crown, ﬁne cröwns\n"
TEXT = LINE + "the king had  crowns, and kings had crowns\n" * 30 + LINE
BYTES = [f"<0x{i:02X}>" for i in range(256)]
# With what each text begins: its first token, which is not predicted, is at most that.
FIRST = "Unknowable "


def subwords(model, trainer=None, normalizer=None, cut=None, decoder=None):
    inner = Tokenizer(model)
    inner.normalizer = normalizer
    inner.pre_tokenizer = cut
    inner.decoder = decoder
    if trainer:
        inner.train_from_iterator(TEXT.splitlines(), trainer)
    return SubwordTokenizer(inner.to_str())


def byte_level(normalizer=None, prefix=False):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    cut = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return subwords(models.BPE(), trainer, normalizer, cut, decoders.ByteLevel())


def unigram():
    """As its trainer makes it: without a token for line breaks, and with few letters."""
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    return subwords(models.Unigram(), trainer, None, pre_tokenizers.Metaspace(), decoders.Metaspace())


def like_llama(model=None):
    """Spaces are letters of words, one before the text is added, and unknown letters are their bytes."""
    letters = sorted({c for c in TEXT if c.isascii() and c not in " \n"})
    vocabulary = [("<unk>", 0.0), *((token, -20.0) for token in BYTES), ("▁", -3.0), ("▁king", -5.0)]
    vocabulary += [(c, -4.0) for c in letters]
    return subwords(
        model or models.Unigram(vocabulary, unk_id=0, byte_fallback=True),
        normalizer=normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        decoder=decoders.Sequence([
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
        ]),
    )  # fmt: skip


def of_single_bytes():
    """As Llama's with letters that it doesn't know."""
    vocabulary = {token: number for number, token in enumerate(["<unk>", *BYTES, "▁"])}
    return like_llama(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))


def words(vocab_size=None):
    return build_tokenizer("word", TEXT, vocab_size)


def word_level():
    trainer = trainers.WordLevelTrainer(vocab_size=8, special_tokens=["[UNK]"], show_progress=False)
    return subwords(models.WordLevel(unk_token="[UNK]"), trainer, cut=pre_tokenizers.Whitespace())


def word_pieces():
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"], show_progress=False)
    cut = pre_tokenizers.BertPreTokenizer()
    model = models.WordPiece(unk_token="[UNK]")
    return subwords(model, trainer, normalizers.BertNormalizer(), cut, decoders.WordPiece())


LOSSY = {
    "words, most unknown": words(8), "words, spaces": words(), "unigram": unigram(),
    "word level": word_level(), "word pieces": word_pieces(),
    "lowercase": byte_level(normalizers.Lowercase()), "NFKC": byte_level(normalizers.NFKC()),
    "stripped": byte_level(normalizers.Strip()),
    "one space": byte_level(normalizers.Replace(Regex(" +"), " ")),
}  # fmt: skip
LOSSLESS = {
    "bpe": learn_bpe([TEXT], 290), "prefix space": byte_level(prefix=True), "llama": like_llama(),
    "NFC of NFC": byte_level(normalizers.NFC()), "byte": build_tokenizer("byte", TEXT),
    "character": build_tokenizer("character", TEXT),
}  # fmt: skip
lossy = pytest.mark.parametrize("tokenizer", LOSSY.values(), ids=LOSSY.keys())
lossless = pytest.mark.parametrize("tokenizer", LOSSLESS.values(), ids=LOSSLESS.keys())


def split_of(tokenizer, folder, texts):
    """The split that ``memformers evaluate --text`` reads of one text, or of documents with separators."""
    separator = "\n***\n" if len(texts) > 1 else ""
    (folder / "text.txt").write_bytes(separator.join(texts).encode())
    spec = CorpusSpec(str(folder / "text.txt"), document_separator=separator)
    return dataset_of(spec, tokenizer).splits["test"]


def bytes_counted(tokenizer, split):
    of_split = predicted_units(tokenizer, split.tokens, tuple(split.documents.tolist()), split.counts)
    return math.log2(math.e) / losses_by_unit(1.0, of_split, tokenizer)["bits_per_byte"]


@lossy
@pytest.mark.parametrize("n", [1, 20])
def test_the_bytes_of_the_text_count_where_tokens_lose_a_part(tokenizer, n, tmp_path):
    texts = [TEXT] * n
    split = split_of(tokenizer, tmp_path, texts)
    assert split.counts.is_lossy
    size = n * len(TEXT.encode())
    assert size - n * len(FIRST) <= bytes_counted(tokenizer, split) < size - 0.5
    assert split.counts.characters == n * len(TEXT)


@pytest.mark.parametrize("n", [1, 20])
def test_of_words_exactly_the_first_is_not_counted(n, tmp_path):
    split = split_of(words(8), tmp_path, [TEXT] * n)
    predicted = n * (len(TEXT.encode()) - len("Unknowable"))
    assert bytes_counted(words(8), split) == pytest.approx(predicted)


@lossless
@pytest.mark.parametrize("n", [1, 20])
def test_a_tokenizer_that_keeps_the_text_counts_its_tokens(tokenizer, n, tmp_path):
    split = split_of(tokenizer, tmp_path, [TEXT] * n)
    assert not split.counts.is_lossy
    # The first token may be a space that the tokenizer adds.
    size = n * len(TEXT.encode())
    assert size - n * len(FIRST) <= bytes_counted(tokenizer, split) <= size + 1e-6


@pytest.mark.parametrize(
    ("tokenizer", "is_lossy"), [(LOSSLESS["llama"], False), (words(), False), (words(5), True)]
)
def test_a_text_of_several_pieces_is_checked_over_their_ends(tokenizer, is_lossy, tmp_path):
    line = "the king had crowns, and kings had crowns\n"
    text = line * (3 * PIECE // len(line))
    split = split_of(tokenizer, tmp_path, [text])
    assert split.counts.bytes == len(text)
    assert split.counts.is_lossy == is_lossy


def test_pieces_that_end_within_a_run_of_bytes_are_kept(tmp_path):
    """Each letter is three tokens, and the line break that begins a piece is one more."""
    line = "መለኮታዊ\n"
    text = line * (3 * PIECE // len(line.encode()))
    split = split_of(of_single_bytes(), tmp_path, [text])
    assert split.counts.bytes == len(text.encode())
    assert not split.counts.is_lossy


@lossy
def test_of_a_part_of_a_text_that_is_lost_nothing_is_known(tokenizer, tmp_path):
    split = split_of(tokenizer, tmp_path, [TEXT])
    half = predicted_units(tokenizer, split.tokens[: len(split.tokens) // 2], (), split.counts)
    measures = losses_by_unit(100.0, half, tokenizer)
    assert math.isnan(measures["bits_per_byte"])
    assert math.isnan(measures["bits_per_character"])


@lossless
def test_a_kept_part_of_a_text_is_what_its_tokens_stand_for(tokenizer, tmp_path):
    split = split_of(tokenizer, tmp_path, [TEXT])
    half = split.tokens[: len(split.tokens) // 2]
    assert predicted_units(tokenizer, half, (), split.counts) == predicted_units(tokenizer, half)


@lossy
@pytest.mark.parametrize("is_list", [False, True])
def test_evaluating_a_lost_text_in_python_warns_once(tokenizer, is_list):
    model = MemoryLM(ModelConfig(vocab_size=tokenizer.vocab_size, d_model=8, n_heads=2, n_layers=1, d_ff=8))
    with pytest.warns(UserWarning, match="loses a part of the text") as warned:
        numbers = evaluate_text(model, tokenizer, [TEXT] * 3 if is_list else TEXT)
    assert len(warned) == 1
    bits = numbers["loss_nats"] * numbers["tokens"] / math.log(2)
    n = 3 if is_list else 1
    size = n * len(TEXT.encode())
    assert size - n * len(FIRST) <= bits / numbers["bits_per_byte"] < size - 0.5


@lossless
def test_evaluating_a_text_that_is_kept_warns_of_nothing(tokenizer):
    model = MemoryLM(ModelConfig(vocab_size=tokenizer.vocab_size, d_model=8, n_heads=2, n_layers=1, d_ff=8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluate_text(model, tokenizer, TEXT)["bits_per_byte"] > 0


@pytest.fixture
def text_on_disk(tmp_path):
    (tmp_path / "text.txt").write_bytes((TEXT * 20).encode())
    return tmp_path / "text.txt"


def trained_on(text, folder, **changes):
    config = small_training(model="compressive", data=str(text), tokenizer="word", max_tokens=512, **changes)
    config = replace(config, model=replace(config.model, vocab_size=8))
    with pytest.warns(UserWarning, match="loses a part of the text") as warned:
        train(config, folder)
    assert [warning.category for warning in warned].count(UserWarning) == 1
    return read_json(folder / "result.json"), write_report(folder).page.with_suffix(".md").read_text()


def test_a_training_divides_by_the_held_out_text(text_on_disk, tmp_path):
    result, report = trained_on(text_on_disk, tmp_path / "run")
    text = text_on_disk.read_text(encoding="utf-8")
    held_out = text[len(text) * 9 // 10 :]
    bits = result["loss"] * result["evaluated_tokens"] / math.log(2)
    first = len(held_out) - len(held_out.lstrip()) + len(held_out.split()[0])
    assert bits / result["bits_per_byte"] == pytest.approx(len(held_out.encode()) - first)
    assert bits / result["bits_per_character"] == pytest.approx(len(held_out) - first)
    assert "> **The tokenizer loses a part of the text**" in report
    assert f"| {result['bits_per_byte']:.3f} |" in report


def test_a_part_of_a_lost_text_has_no_bits_per_byte(text_on_disk, tmp_path):
    result, report = trained_on(text_on_disk, tmp_path / "run", final_tokens=200)
    assert result["evaluated_tokens"] < result["held_out_tokens"]
    assert result["bits_per_byte"] is result["bits_per_character"] is None
    assert "bits per byte" not in report.partition("## How it was made")[0]
    curve = [r["bits_per_character.valid"] for r in read_metrics(tmp_path / "run") if "loss.valid" in r]
    assert np.isfinite(curve).all()


@pytest.mark.filterwarnings("default:the tokenizer loses")
def test_the_command_names_a_lost_text(text_on_disk, tmp_path):
    trained_on(text_on_disk, tmp_path / "run")
    (tmp_path / "other.txt").write_bytes(TEXT.encode())
    shown = run("evaluate", "--checkpoint", str(tmp_path / "run"), "--text", str(tmp_path / "other.txt"),
                "--out", str(tmp_path / "numbers"))  # fmt: skip
    assert shown.err.count("NOTE: the tokenizer loses a part of the text") == 1
    numbers = read_json(tmp_path / "numbers" / "evaluation.json")
    bits = numbers["loss_nats"] * numbers["tokens"] / math.log(2)
    assert bits / numbers["bits_per_byte"] == pytest.approx(len(TEXT.encode()) - len("Unknowable"))
