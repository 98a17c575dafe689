"""Texts, byte for byte, and documents from folders, JSON lines and between separators."""

import errno
import json
import os
import re
from pathlib import Path

import pytest

from memformers.common.errors import UserError
from memformers.data import files
from memformers.data.corpora import corpus_at, load_corpus
from memformers.data.gathering import Recipe, gather
from memformers.data.texts import bytes_of, read_text, text_of
from memformers.data.tokenizers import ByteTokenizer, CharacterTokenizer, build_tokenizer


@pytest.mark.parametrize(
    "raw", [b"a\r\nb\r\n", b"a\rb", "a\u2028é€".encode(), b"abc\xff\xfe", bytes(range(256))]
)
def test_text_is_the_bytes_that_it_was_read_from(raw, tmp_path):
    (tmp_path / "x.txt").write_bytes(raw)
    assert read_text(str(tmp_path / "x.txt")) == corpus_at(tmp_path / "x.txt", "byte").text == text_of(raw)
    assert bytes_of(text_of(raw)) == raw
    assert bytes(ByteTokenizer().encode(text_of(raw)).tolist()) == raw
    assert text_of(b"\xef\xbb\xbf" + raw) == text_of(raw), "a byte order mark is no character"


def test_bytes_that_are_no_utf8_are_an_error_for_a_model_of_characters_alone():
    text = text_of("é".encode() + b"bc\xff")
    with pytest.raises(ValueError, match=r"not UTF-8 text: byte 0xff at offset 4; .* tokenizer='byte'"):
        build_tokenizer("character", text)
    assert build_tokenizer("byte", text).encode(text).tolist() == [0xC3, 0xA9, 98, 99, 255]


@pytest.mark.parametrize(("vocabulary", "expected"), [("a\n\r", "\n"), ("a\r", "\r"), ("ba", "b")])
def test_a_default_prompt_is_one_that_the_model_knows(vocabulary, expected):
    assert CharacterTokenizer(vocabulary).line_break == expected


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
    assert gather(Recipe(folder)).documents == [
        ("a/z.md", "First.\n"), ("b.txt", "Second, naïve.\n"),
        ("c.jsonl:1", "Third"), ("c.jsonl:2", "Fourth"),
    ]  # fmt: skip
    corpus = load_corpus(str(folder))
    assert (corpus.text, corpus.documents) == ("First.\nSecond, naïve.\nThirdFourth", (7, 15, 5, 6))
    assert (corpus.name, corpus.source) == (folder.name, str(folder))


@pytest.mark.parametrize(
    ("count", "named"), [(1, "0.bin (a PNG image)."), (6, "4.bin (a PNG image) and 1 more.")]
)
def test_files_that_are_no_text_and_documents_without_any_are_left_out_and_the_first_named(
    count, named, folder
):
    for n in range(count):
        (folder / f"{n}.bin").write_bytes(b"\x89PNG\xff")
    (folder / "blank.txt").write_text(" \n")
    with (
        pytest.warns(UserWarning, match=rf"not text and left out: .*{re.escape(named)}$"),
        pytest.warns(UserWarning, match=r"documents without text are left out: blank\.txt\.$"),
    ):
        assert len(gather(Recipe(folder)).documents) == 4


@pytest.mark.parametrize("content", [b"", b" \n"])
def test_a_folder_or_file_without_text_is_an_error(content, tmp_path):
    with pytest.raises(ValueError, match="contains no text"):
        load_corpus(str(tmp_path))
    (tmp_path / "blank.txt").write_bytes(content)
    for path in (tmp_path, tmp_path / "blank.txt"):
        with pytest.raises(ValueError, match="contains no text"):
            load_corpus(str(path))
    with pytest.raises(UserError, match=r"gone\.jsonl doesn't exist; name a text file"):
        gather(Recipe(tmp_path / "gone.jsonl"))


@pytest.mark.parametrize(("where", "name"), [(os, "scandir"), (files, "open")])
def test_a_part_of_a_folder_that_cannot_be_read_is_an_error(where, name, folder, monkeypatch):
    real = getattr(where, name, open)

    def refused(path, *mode):
        if "a" in Path(path).parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *mode)

    monkeypatch.setattr(where, name, refused, raising=False)
    with pytest.raises(UserError, match=r"/a(/z\.md)? can't be read: Permission denied"):
        load_corpus(str(folder))


@pytest.mark.parametrize(
    "files", [["config.json", "run.json"], ["experiment.json"], ["card.json", "tokenizer.json"]]
)
def test_a_folder_of_a_run_below_the_texts_is_no_text(files, folder):
    before = load_corpus(str(folder))
    (folder / "runs" / "x" / "figures").mkdir(parents=True)
    for name in (*files, "report.md", "figures/loss.csv"):
        (folder / "runs" / "x" / name).write_text("{}")
    with pytest.warns(UserWarning, match=r"folders of runs or tokens are left out: runs/x\.$"):
        assert load_corpus(str(folder)).sha256 == before.sha256


@pytest.mark.parametrize("name", ["x.jsonl", "x.JSON", "texts/x.json"])
def test_json_lines_are_documents(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    lines = [{"text": "One\u2028line", "id": 1}, {"text": "naïve"}]
    path.write_text("\ufeff" + "\r\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    corpus = load_corpus(str(path.parent if "/" in name else path))
    assert (corpus.text, corpus.documents) == ("One\u2028linenaïve", (8, 5))


@pytest.mark.parametrize("text", ['{\n"text": "a"}', '["a"]\n', '{"txt": "a"}\n', "plain"])
def test_other_json_is_a_text(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    found = gather(Recipe(tmp_path / "x.json"))
    assert (found.text, found.documents) == (text, [])


@pytest.mark.parametrize(
    ("line", "message"),
    [(b'{"text": "cut o', '"text", got \'{"text": "cut o\' \\('),
     (b'["text"]', r"""got '\["text"\]';"""),
     (b'{"txt": "a"}', "txt"),
     (b'{"text": 3}', "3"),
     (b'{"text": "\xff"}', "codec"),
     (b"[" * 100_000, r"got '\[{40}…' \("),
     (b'{"text": "\\ud83d"}', "half of a surrogate pair")],
)  # fmt: skip
def test_a_line_that_is_no_document_is_an_error_that_names_it(line, message, tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=rf"^x\.jsonl:3: .*{message}") as error:
        load_corpus(str(tmp_path / "x.jsonl"))
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("orrect or remove the line.")


def test_a_separator_cuts_a_text_into_documents_named_by_their_places(tmp_path):
    (tmp_path / "x.txt").write_text("One\n---\nTwo\nlines\n---\n \n---\nThree\n---\n")
    with pytest.warns(UserWarning, match=r"documents without text are left out: x\.txt:3"):
        corpus = load_corpus(str(tmp_path / "x.txt"), "\n---\n")
    assert (corpus.text, corpus.documents) == ("OneTwo\nlinesThree", (3, 9, 5))
    (tmp_path / "x.txt").write_text("a|b|")
    assert gather(Recipe(tmp_path / "x.txt", "", "|")).documents == [("x.txt:1", "a"), ("x.txt:2", "b")]


@pytest.mark.parametrize(
    ("name", "message"),
    [("b.txt", r"document_separator='<end>' doesn't occur in b\.txt; give the text"),
     ("", r"document_separator='<end>' divides a single text, but .* consists of documents")],
)  # fmt: skip
def test_a_separator_that_cannot_cut_is_an_error(name, message, folder):
    with pytest.raises(ValueError, match=message):
        load_corpus(str(folder / name), "<end>")
