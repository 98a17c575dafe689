import itertools
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memformers.data.corpora import Corpus, load_corpus
from memformers.data.documents import read_documents, split_at
from memformers.data.streams import IGNORED, training_segments


def epochs_of(documents, B, S, seed, n=2):
    """The first ``n`` epochs of documents whose tokens are 0, 1, …: inputs, targets and starts, joined."""
    tokens = torch.arange(sum(documents))
    segments = training_segments(tokens, B, S, seed=seed, documents=documents)
    some = itertools.takewhile(lambda segment: segment.epoch < n, segments)
    epochs = [list(group) for _, group in itertools.groupby(some, lambda segment: segment.epoch)]
    return [[torch.cat([getattr(s, x) for s in epoch]) for x in ("inputs", "targets", "starts")]
            for epoch in epochs]  # fmt: skip


@given(
    documents=st.lists(st.integers(1, 20), min_size=1, max_size=12),
    B=st.integers(1, 4), S=st.integers(1, 6), seed=st.integers(0, 2**63 - 1),
)  # fmt: skip
def test_an_epoch_has_each_document_once_in_one_piece_but_for_the_cuts_between_streams(documents, B, S, seed):
    n = sum(documents)
    if n < B * S + 1:
        return
    firsts = {sum(documents[:i]): length for i, length in enumerate(documents)}
    lasts = {first + length - 1 for first, length in firsts.items()}
    for inputs, targets, doc_starts in epochs_of(documents, B, S, seed):
        assert inputs.shape == (n // B, B)
        joined = inputs.T.flatten()
        assert len(joined.unique()) == len(joined) > n - B  # fewer than B tokens fall off
        begins = torch.isin(joined, torch.tensor(list(firsts)))
        at_stream = torch.arange(len(joined)) % (n // B) == 0
        assert torch.equal(doc_starts.T.flatten(), begins | at_stream)
        assert torch.equal(joined[1:][~begins[1:]], joined[:-1][~begins[1:]] + 1), "in one piece"
        ends = torch.isin(inputs, torch.tensor(list(lasts)))
        assert torch.equal(targets, torch.where(ends, IGNORED, inputs + 1)), "no target crosses a boundary"


def test_the_order_of_documents_is_the_seeds_and_new_in_each_epoch():
    documents = [3, 5, 2, 8, 1, 9, 4, 7]
    first, second = (inputs.tolist() for inputs, _, _ in epochs_of(documents, 2, 4, seed=1))
    assert first != second
    assert [e[0].tolist() for e in epochs_of(documents, 2, 4, seed=1)] == [first, second]
    assert epochs_of(documents, 2, 4, seed=2)[0][0].tolist() != first


def test_streams_of_documents_go_on_from_any_place():
    tokens, documents = torch.arange(90), [30, 7, 1, 22, 18, 12]
    whole = list(itertools.islice(training_segments(tokens, 2, 7, seed=3, documents=documents), 20))
    assert whole[-1].epoch > 1
    for segment, following in itertools.pairwise(whole):
        place = (segment.epoch, segment.end)
        resumed = next(training_segments(tokens, 2, 7, place, seed=3, documents=documents))
        for name in ("inputs", "targets", "starts"):
            assert torch.equal(getattr(resumed, name), getattr(following, name))
        assert (resumed.epoch, resumed.end, resumed.starts_over) == (
            following.epoch, following.end, following.starts_over,
        )  # fmt: skip


def test_a_plain_text_has_no_starts():
    assert next(training_segments(torch.arange(21), 2, 4)).doc_starts is None


def test_documents_of_another_text_are_an_error():
    with pytest.raises(ValueError, match="documents must have 21 tokens in total; 20 came"):
        next(training_segments(torch.arange(21), 2, 4, documents=[12, 8]))


@pytest.fixture
def folder(tmp_path):
    """Texts in folders, and what is none of them."""
    texts = {
        "b.txt": "Second, naïve.\n", "a/z.md": "First.\n", "c.jsonl": '{"text": "Third"}\n{"text": "Fourth"}',
        "a/.hidden": "not read", ".git/config": "not read",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_a_folder_is_read_by_the_order_of_its_paths_without_hidden_files(folder):
    assert [(d.name, d.text) for d in read_documents(folder)] == [
        ("a/z.md", "First.\n"), ("b.txt", "Second, naïve.\n"),
        ("c.jsonl:1", "Third"), ("c.jsonl:2", "Fourth"),
    ]  # fmt: skip
    corpus = load_corpus(str(folder))
    assert corpus.text == "First.\nSecond, naïve.\nThirdFourth"
    assert corpus.documents == (7, 15, 5, 6)
    assert (corpus.name, corpus.source) == (folder.name, str(folder))


def test_files_that_are_no_text_and_documents_without_any_are_left_out_and_named(folder):
    (folder / "picture.png").write_bytes(b"\x89PNG\xff")
    (folder / "blank.txt").write_text(" \n")
    with (
        pytest.warns(UserWarning, match=r"not UTF-8 and left out: picture\.png\.$"),
        pytest.warns(UserWarning, match=r"documents without text are left out: blank\.txt\.$"),
    ):
        assert len(read_documents(folder)) == 4


def test_a_long_list_of_what_is_left_out_is_cut_short(tmp_path):
    for n in range(9):
        (tmp_path / f"{n}.bin").write_bytes(b"\xff")
    (tmp_path / "x.txt").write_text("text")
    with pytest.warns(UserWarning, match=r"left out: 0\.bin, 1\.bin, 2\.bin, 3\.bin, 4\.bin and 4 more\.$"):
        read_documents(tmp_path)


def test_a_folder_without_text_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="is a folder without any file of UTF-8 text; name a text file"):
        load_corpus(str(tmp_path))
    (tmp_path / "blank.txt").write_text("\n")
    with pytest.raises(ValueError, match="contains no text"):
        load_corpus(str(tmp_path))
    with pytest.raises(ValueError, match="doesn't exist; name a text file"):
        read_documents(tmp_path / "gone.jsonl")


def test_json_lines_are_documents(tmp_path):
    path = tmp_path / "x.jsonl"
    lines = [{"text": "One\u2028line", "id": 1}, {"text": "naïve"}]
    path.write_text("\ufeff" + "\r\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    corpus = load_corpus(str(path))
    assert (corpus.text, corpus.documents) == ("One\u2028linenaïve", (8, 5))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut o', 'a JSON object was expected in this line; \'{"text": "cut o\' came'),
        (b'["text"]', 'a JSON object with a string "text" was expected in this line; '),
        (b'{"txt": "a"}', 'with a string "text" was expected'),
        (b'{"text": 3}', 'with a string "text" was expected'),
        (b'{"text": "\xff"}', "a JSON object was expected in this line"),
        (b"[" * 100_000, r"a JSON object was expected in this line; '\[{40}…' came"),
        (b'{"text": "\\ud83d"}', "half of a surrogate pair"),
    ],
)
def test_a_line_that_is_no_document_is_an_error_that_names_it(line, message, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=rf"^x\.jsonl:3: .*{message}") as error:
        load_corpus(str(tmp_path / "x.jsonl"))
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("orrect or remove the line.")


def test_a_separator_cuts_a_text_into_documents(tmp_path):
    (tmp_path / "x.txt").write_text("One\n---\nTwo\nlines\n---\n \n---\nThree\n---\n")
    with pytest.warns(UserWarning, match=r"documents without text are left out: x\.txt:3"):
        corpus = load_corpus(str(tmp_path / "x.txt"), "\n---\n")
    assert (corpus.text, corpus.documents) == ("OneTwo\nlinesThree", (3, 9, 5))


def test_a_separator_that_cannot_cut_is_an_error(folder):
    with pytest.raises(
        ValueError, match=r"document_separator='<end>' doesn't occur in b\.txt; give the text"
    ):
        load_corpus(str(folder / "b.txt"), "<end>")
    with pytest.raises(
        ValueError, match=r"document_separator='x' divides a single text, but .* consists of documents"
    ):
        load_corpus(str(folder), "x")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_whole_documents_are_held_out_and_make_up_about_a_tenth(lengths):
    text = "".join(chr(97 + i % 26) * n for i, n in enumerate(lengths))
    corpus = Corpus("x", "x", text, documents=tuple(lengths))
    assert corpus.train_text + corpus.validation_text == text
    assert "".join(corpus.train_documents) == corpus.train_text
    assert "".join(corpus.validation_documents) == corpus.validation_text
    if len(lengths) == 1:
        assert corpus.split == len(text) * 9 // 10
        return
    held_out = list(map(len, corpus.validation_documents))
    assert list(map(len, corpus.train_documents)) + held_out == lengths
    assert held_out
    assert len(held_out) < len(lengths)
    off = abs(sum(held_out) - len(text) / 10)
    for n in range(1, len(lengths)):
        assert off <= abs(sum(lengths[n:]) - len(text) / 10)


def test_the_checksum_is_that_of_the_text_and_its_boundaries():
    plain, documents, others = (Corpus("x", "x", "abcdef", documents=d) for d in ((), (3, 3), (2, 4)))
    assert len({plain.sha256, documents.sha256, others.sha256}) == 3
    assert plain.sha256 == "bef57ec7f53a6d40beb640a780a639c83bc29ac8a9816f1fc6c5c6dcd93c4721"


def test_a_document_is_named_by_its_place_in_the_text():
    assert [d.name for d in split_at("a|b|", "|", "x.txt")] == ["x.txt:1", "x.txt:2"]
