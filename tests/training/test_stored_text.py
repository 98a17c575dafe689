"""Trainings on folders of tokens, and on words and subwords."""

import math

import numpy as np
import pytest

from memformers import prepare_ids
from memformers.commands.evaluate import Evaluate
from memformers.commands.generate import Generate
from memformers.common.command_line import parse_arguments
from memformers.common.errors import UserError
from memformers.common.fields import replace_nested
from memformers.common.files import read_json
from memformers.data import tokenize_corpus
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import prepare
from memformers.runs.metrics import read_metrics
from tests.builders import small_training
from tests.training.runs import SHORT, stop, train_run, without_times


@pytest.fixture(autouse=True)
def _its_own_text(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenize_corpus.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "play.txt").write_text(SHORT)
    return tmp_path / "play.txt"


def config_on(data, **changes):
    settings = {"evaluations": 1, "evaluation_tokens": 500, "final_tokens": 500, "max_tokens": 320} | changes
    return small_training(data=str(data), **settings)


def facts(run):
    corpus = read_json(run / "run.json")["corpus"]
    records = without_times([*read_metrics(run), read_json(run / "result.json")])
    return records, {k: v for k, v in corpus.items() if k not in ("source", "name")}


def evaluate(run, out, *options):
    """The numbers of a run that the command writes into ``out``."""
    parse_arguments(Evaluate, ["--checkpoint", str(run), "--out", str(out), *map(str, options)]).run()
    return read_json(out / "evaluation.json")


def test_stored_tokens_train_like_their_text(text, tmp_path, monkeypatch):
    """Prepared before, or because the text is large; and resumed, bit for bit."""
    config = config_on(text, document_separator="\n\n")
    direct = train_run(config, tmp_path / "direct")
    folder = prepare(CorpusSpec(str(text), document_separator="\n\n"), tmp_path / "tokens")
    assert facts(train_run(config_on(folder), tmp_path / "stored")) == facts(direct)
    monkeypatch.setattr(tokenize_corpus, "BIG", 1000)
    stop(config, tmp_path / "large", 3)
    assert facts(train_run(config, tmp_path / "large", resume=True)) == facts(direct)
    kept = [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]
    assert len(kept) == 1, "prepared once"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": "byte"}, "'character'"), ({"document_separator": "x"}, "omit document_separator"),
        ({"tokenizer": "letters"}, "'letters'"), ({"batch_size": 10**6}, "too short"),
    ],
)  # fmt: skip
def test_settings_that_a_folder_of_tokens_cant_have_are_errors(changes, words, text, tmp_path):
    folder = prepare(CorpusSpec(str(text)), tmp_path / "tokens")
    with pytest.raises(UserError, match=words):
        train_run(config_on(folder, **changes), tmp_path / "run")


def test_token_ids_are_trained_on_evaluated_and_written(tmp_path, capsys):
    rng = np.random.default_rng(0)
    pieces = [np.tile(rng.integers(0, 40, 12), 60) for _ in range(10)]
    prepare_ids(tmp_path / "ids", pieces, vocab_size=40)
    run = train_run(config_on(tmp_path / "ids"), tmp_path / "run")
    result = read_json(run / "result.json")
    assert result["bits_per_character"] == pytest.approx(result["loss"] / math.log(2), rel=1e-6)
    assert (result["bits_per_byte"], result["word_perplexity"]) == (None, None)
    assert all(0 <= int(word) < 40 for word in (run / "sample.txt").read_text().split())
    capsys.readouterr()
    evaluate(run, tmp_path / "out")
    assert f"per token       {result['bits_per_character']:.4f} bits" in capsys.readouterr().out
    parse_arguments(Generate, ["--checkpoint", str(run), "--prompt", "3 39", "--tokens", "5"]).run()
    written = capsys.readouterr().out.split()
    assert (written[:2], len(written)) == (["3", "39"], 7)
    (tmp_path / "x.txt").write_text("some text " * 50)
    with pytest.raises(UserError, match="reads token ids"):
        evaluate(run, tmp_path / "out", "--text", tmp_path / "x.txt")


def test_training_never_reads_the_test_split(text, tmp_path):
    files = {name: tmp_path / f"{name}.txt" for name in ("validation", "test", "other")}
    files["validation"].write_text(SHORT[-1000:])
    files["test"].write_text(SHORT[:800])
    files["other"].write_text(SHORT[800::-1])
    config = config_on(text, max_tokens=64, final_tokens=0, validation=str(files["validation"]))
    run, other = (
        train_run(replace_nested(config, test=str(files[name])), tmp_path / name)
        for name in ("test", "other")
    )
    assert facts(other)[0] == facts(run)[0]
    assert read_json(run / "result.json")["evaluated_tokens"] == 1000 - 1

    def measured(*options):
        return evaluate(run, tmp_path / "out", *options)["loss_nats"]

    assert measured() == measured("--text", files["test"]) != measured("--split", "validation")
    with pytest.raises(UserError, match="no validation part"):
        measured("--text", files["test"], "--split", "validation")
    files["validation"].write_text(SHORT[-1000:] + "#")
    with pytest.raises(UserError, match="was trained on"):
        measured()
