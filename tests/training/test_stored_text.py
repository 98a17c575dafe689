"""Trainings on folders of tokens, and on words and subwords."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from memformers import prepare_ids
from memformers.commands.evaluate import Evaluate
from memformers.commands.generate import Generate
from memformers.common.command_line import parse_arguments
from memformers.common.errors import UserError
from memformers.common.files import read_json
from memformers.convert.load import load_checkpoint
from memformers.data import tokenize_corpus
from memformers.data.sources import CorpusSpec
from memformers.data.tokenize_corpus import prepare
from memformers.evaluation.probe import ProbeConfig, probe
from memformers.generation.memory_file import load_memory, save_memory
from memformers.generation.sampling import Sampling
from memformers.generation.text import TextStream, continue_text
from memformers.report.document import write_report
from memformers.runs.folder import read_metrics
from memformers.training import run as run_module
from memformers.training.data_module import find_text
from tests.builders import small_training
from tests.training.runs import SHORT, stop, train_run, without_times


@pytest.fixture(autouse=True)
def _its_own_text(monkeypatch, tmp_path):
    monkeypatch.setattr(run_module, "find_text", find_text)
    monkeypatch.setattr(tokenize_corpus.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    (tmp_path / "play.txt").write_text(SHORT)
    return tmp_path / "play.txt"


def config_on(data, **changes):
    return small_training(data=str(data), evaluations=2, **changes)


def found(run):
    result, facts = read_json(run / "result.json"), read_json(run / "run.json")
    times = {"seconds", "evaluation_seconds", "peak_memory_bytes", "tokens_per_second"}
    facts = {k: v for k, v in facts["corpus"].items() if k not in ("source", "name")}
    return without_times(read_metrics(run)), {k: v for k, v in result.items() if k not in times}, facts


@pytest.mark.parametrize("separator", ["", "\n\n"])
def test_a_training_on_tokens_from_the_disk_is_that_on_the_text(separator, text, tmp_path, monkeypatch):
    """Prepared before, or because the text is large; and resumed, bit for bit."""
    direct = train_run(config_on(text, document_separator=separator), tmp_path / "direct")
    folder = prepare(CorpusSpec(str(text), document_separator=separator), tmp_path / "tokens")
    stored = train_run(config_on(folder), tmp_path / "stored")
    assert found(stored) == found(direct)
    monkeypatch.setattr(tokenize_corpus, "BIG", 1000)
    config = config_on(text, document_separator=separator)
    stop(config, tmp_path / "large", 3)
    assert found(train_run(config, tmp_path / "large", resume=True)) == found(direct)
    kept = [path for path in (tmp_path / "cache" / "tokens").iterdir() if path.is_dir()]
    assert len(kept) == 1, "prepared once"


@pytest.mark.parametrize(("name", "size"), [("bpe", 300), ("word", 500)])
def test_a_model_of_words_or_subwords_trains_writes_and_remembers(name, size, text, tmp_path):
    config = config_on(text, tokenizer=name, model="transformer-xl")
    run = train_run(replace(config, model=replace(config.model, vocab_size=size)), tmp_path / "run")
    result = read_json(run / "result.json")
    held_out = SHORT[len(SHORT) * 9 // 10 :]
    nats = result["loss"] * result["evaluated_tokens"]
    assert result["evaluated_tokens"] == result["held_out_tokens"]
    model, tokenizer = load_checkpoint(run, torch.device("cpu"))
    if name == "word":
        assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
        assert result["word_perplexity"] is None
    else:
        assert result["bits_per_character"] == pytest.approx(nats / math.log(2) / len(held_out), rel=2e-3)
        predicted = len(held_out.split()) - bool(tokenizer.decode(tokenizer.encode(held_out)[:1]).strip())
        assert result["word_perplexity"] == pytest.approx(math.exp(nats / predicted), rel=1e-6)
    assert (tokenizer.name, model.config.vocab_size) == (name, size)
    written = continue_text(model, tokenizer, "PORTIA:\n", 20, Sampling(), seed=1)
    assert written
    stream = TextStream(model, tokenizer)
    stream.read("PORTIA:\n")
    save_memory(stream.reader, tmp_path / "memory")
    again = TextStream(model, tokenizer)
    again.reader = load_memory(model, tmp_path / "memory")
    generator = torch.Generator().manual_seed(1)
    assert "".join(again.write(20, Sampling(), generator)) == written
    probe(run, ProbeConfig(step=2, positions=5, longest=8, streams=2, tokens=200), torch.device("cpu"))
    assert read_json(run / "probe.json")["memory_ablation"]


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
@pytest.mark.parametrize("separator", ["", "\n\n"])
def test_a_text_is_evaluated_alike_in_memory_on_the_disk_and_prepared(
    tokenizer, separator, text, tmp_path, monkeypatch, trained_on
):
    run, held_out = trained_on(tokenizer, text), text.with_name("held_out.txt")
    held_out.write_text(text.read_text()[-3000:].lstrip() + "naïve")

    def evaluated(source):
        given = ["--document-separator", separator] * (source == held_out)
        command = parse_arguments(Evaluate, [
            "--checkpoint", str(run), "--text", str(source), "--out", str(tmp_path / "out"), *given
        ])  # fmt: skip
        command.run()
        numbers = read_json(tmp_path / "out" / "evaluation.json")
        for document in numbers.get("documents", ()):
            del document["name"]
        return numbers

    in_memory = evaluated(held_out)
    assert in_memory["bits_per_byte"] > 0
    assert ("documents" in in_memory) == bool(separator)
    tokens = load_checkpoint(run, torch.device("cpu"))[1]
    spec = CorpusSpec(str(held_out), document_separator=separator, tokenizer="byte")
    assert evaluated(prepare(spec, tmp_path / "test", tokens)) == in_memory
    monkeypatch.setattr(tokenize_corpus, "BIG", 0)
    assert evaluated(held_out) == in_memory
    other = prepare(CorpusSpec(str(held_out)), tmp_path / "other")
    with pytest.raises(UserError, match="another tokenizer"):
        evaluated(other)


@pytest.fixture
def trained_on(tmp_path):
    def train(tokenizer, text):
        config = config_on(text, tokenizer=tokenizer, model="compressive")
        size = {"bpe": 300}.get(tokenizer, config.model.vocab_size)
        return train_run(replace(config, model=replace(config.model, vocab_size=size)), tmp_path / "run")

    return train


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": "byte"}, "'character'"), ({"document_separator": "x"}, "divided"),
        ({"tokenizer": "letters"}, "'letters'"), ({"batch_size": 10**6}, "too short"),
    ],
)  # fmt: skip
def test_settings_that_a_folder_of_tokens_cant_have_are_errors(changes, words, text, tmp_path):
    folder = prepare(CorpusSpec(str(text)), tmp_path / "tokens")
    with pytest.raises(UserError, match=words):
        train_run(config_on(folder, **changes), tmp_path / "run")


def test_token_ids_are_trained_on_evaluated_and_written(tmp_path, capsys):
    rng = np.random.default_rng(0)
    pieces = [np.tile(rng.integers(0, 40, 12), 60) for _ in range(20)]
    prepare_ids(tmp_path / "ids", pieces, vocab_size=40)
    run = train_run(config_on(tmp_path / "ids"), tmp_path / "run")
    result = read_json(run / "result.json")
    assert result["bits_per_character"] == pytest.approx(result["loss"] / math.log(2), rel=1e-6)
    assert (result["bits_per_byte"], result["word_perplexity"]) == (None, None)
    assert all(0 <= int(word) < 40 for word in (run / "sample.txt").read_text().split())
    assert "token ids, each of which counts as a character" in write_report(run).read_text(encoding="utf-8")
    capsys.readouterr()
    parse_arguments(Evaluate, ["--checkpoint", str(run)]).run()
    assert f"per token       {result['bits_per_character']:.4f} bits" in capsys.readouterr().out
    parse_arguments(Generate, ["--checkpoint", str(run), "--prompt", "3 39", "--tokens", "5"]).run()
    written = capsys.readouterr().out.split()
    assert written[:2] == ["3", "39"]
    assert len(written) == 7
    (tmp_path / "x.txt").write_text("some text " * 50)
    with pytest.raises(UserError, match="the model reads token ids"):
        parse_arguments(Evaluate, ["--checkpoint", str(run), "--text", str(tmp_path / "x.txt")]).run()


def test_no_training_reads_the_test_part_which_evaluate_measures(text, tmp_path):
    parts = {"validation": text.read_text()[-2000:], "test": text.read_text()[:1500]}
    for name, part in parts.items():
        (tmp_path / f"{name}.txt").write_text(part)
    given = {name: str(tmp_path / f"{name}.txt") for name in parts}
    run = train_run(config_on(text, **given), tmp_path / "run")
    (tmp_path / "other.txt").write_text(parts["test"][::-1])
    other = train_run(config_on(text, **{**given, "test": str(tmp_path / "other.txt")}), tmp_path / "other")
    assert found(other)[:2] == found(run)[:2]
    assert read_json(run / "result.json")["evaluated_tokens"] == len(parts["validation"]) - 1

    def measured(*options):
        arguments = ["--checkpoint", str(run), "--out", str(tmp_path / "out"), *options]
        parse_arguments(Evaluate, arguments).run()
        return read_json(tmp_path / "out" / "evaluation.json")["loss_nats"]

    assert measured() == measured("--split", "test") == measured("--text", given["test"])
    assert measured("--split", "validation") == measured("--text", given["validation"])
    with pytest.raises(UserError, match="has no validation part, but test"):
        measured("--text", given["test"], "--split", "validation")
    (tmp_path / "validation.txt").write_text(parts["validation"] + "#")
    with pytest.raises(UserError, match="has changed since the training"):
        measured()
