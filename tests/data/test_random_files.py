"""Random files, valid and broken, are the right tokens or one line: never a traceback, never other text."""

import os
import random
import shutil
from importlib.util import find_spec

import numpy as np
import pytest

from memformers.common.errors import UserError
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import dataset_of, prepare
from memformers.data.tokenizer import ByteTokenizer
from tests.data.random_files import ERROR, ID_KINDS, LINE_KINDS, N_IDS, TABLE_KINDS, TEXT_KINDS, RandomFile
from tests.data.reading import as_text, write

# More of them once: RANDOM_FILES=10000.
N_CASES = int(os.environ.get("RANDOM_FILES", "400"))
FIRST_SEED = int(os.environ.get("FIRST_SEED", "0"))
# At least this fraction of all cases must be read, so that not everything is refused.
READABLE = 0.5
KINDS = [TEXT_KINDS, LINE_KINDS, ID_KINDS]
if find_spec("datasets"):
    KINDS.append(TABLE_KINDS)


def expected_of(files):
    """What is read of these files, of which there are several in a folder, and whether an error is right."""
    texts = []
    n_errors = 0
    may_fail = any(file.may_fail for file in files)
    for file in files:
        content = file.content
        if content is None:
            return None, True
        if isinstance(content, str) and content == ERROR:
            n_errors += 1
        elif isinstance(content, str):
            texts += [content] if content.strip() else []
        else:
            texts += content
    if files[0].kind in ID_KINDS:
        return np.concatenate(texts or [[]]), n_errors > 0
    # In a folder, a file that is no text is left out, or an error.
    return "".join(texts), may_fail or n_errors > 0 or not texts


def read_case(path, is_ids):
    """The tokens of a file or folder: ids, or the text."""
    if is_ids:
        splits = dataset_of(CorpusSpec(str(path), vocab_size=N_IDS)).splits.values()
        return np.concatenate([split.tokens for split in splits])
    return as_text(bytes(dataset_of(CorpusSpec(str(path)), ByteTokenizer()).splits["test"].tokens))


def is_same(read, expected):
    return read == expected if isinstance(read, str) else np.array_equal(read, expected)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_random_files_are_the_right_tokens_or_one_line(tmp_path):
    n_read = 0
    for seed in range(FIRST_SEED, FIRST_SEED + N_CASES):
        rng = random.Random(seed)
        kinds = rng.choice(KINDS)
        files = [RandomFile(rng, kinds) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        folder = tmp_path / "case"
        names = []
        for number, file in enumerate(files):
            name = f"{number} {rng.choice(['x', 'ünï', 'attest', 'A.b'])}"
            names.append(f"{name}{file.suffix}")
            siblings = {f"{name}{suffix}": raw for suffix, raw in file.siblings.items()}
            write(folder, {names[-1]: file.raw, **siblings})
        path = folder / names[0] if len(files) == 1 else folder
        expected, may_fail = expected_of(files)
        try:
            read = read_case(path, files[0].kind in ID_KINDS)
        except UserError as error:
            assert "\n" not in str(error), f"seed {seed}"  # noqa: PT017
            # What is cut short may have too few ids to be divided, or be a text of one byte.
            least = 20 if isinstance(expected, np.ndarray) else 2
            is_short = expected is not None and len(expected) < least
            assert may_fail or is_short, f"seed {seed}: {error}"  # noqa: PT017
        else:
            n_read += 1
            is_ids = files[0].kind in ID_KINDS
            assert not is_ids or not may_fail or expected is None, f"seed {seed} is read"
            assert expected is None or is_same(read, expected), f"seed {seed}"
        shutil.rmtree(folder)
    assert n_read > READABLE * N_CASES


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("before", ["", "x.", "a-", "set_1_"])
@pytest.mark.parametrize("after", ["", ".raw", "_data", "-00000", " x/y"])
def test_splits_by_any_name_are_the_splits_or_one_line(before, after, tmp_path):
    """Never documents among others."""
    rng = random.Random(before + after)
    texts = {split: f"{split} text. " * rng.randint(9, 90) for split in ("train", "val", "test")}
    ending = ".txt" if not after.startswith(" ") else ""
    write(tmp_path / "x", {f"{before}{split}{after}{ending}": text for split, text in texts.items()})
    data = dataset_of(CorpusSpec(str(tmp_path / "x"), tokenizer="byte"))
    assert [as_text(bytes(split.tokens)) for split in data.splits.values()] == list(texts.values())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_random_file_that_is_refused_leaves_no_folder(tmp_path):
    for seed in range(30):
        rng = random.Random(seed)
        file = RandomFile(rng, rng.choice(KINDS))
        path = write(tmp_path, {f"{seed}{file.suffix}": file.raw}) / f"{seed}{file.suffix}"
        out = tmp_path / "tokens" / str(seed)
        try:
            prepare(CorpusSpec(str(path), tokenizer="byte" if rng.random() < 0.5 else "character"), out)
        except UserError:
            assert not out.exists()
        else:
            assert (out / "card.json").is_file()
    assert not list((tmp_path / "tokens").glob(".unfinished*"))
