"""Trainings that begin with given weights, that go on after their end, and that end early."""

import random
import shutil
import threading
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from memformers import ModelConfig, TrainConfig, train
from memformers.commands.train import Train, parse_train
from memformers.common.fields import replace_nested
from memformers.common.files import read_json, write_json
from memformers.common.text import UserError
from memformers.convert.load import load_checkpoint
from memformers.data.builtin import write_play
from memformers.data.streams import training_segments
from memformers.data.tokenizer import ByteTokenizer
from memformers.data.tokenizers import CharacterTokenizer, save_tokenizer
from memformers.models.io import PACKAGED
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CHECKPOINTS, RESULT, read_metrics
from memformers.training import api
from memformers.training import run as run_module
from memformers.training.config import check_all_used, read_train_config
from memformers.training.run import copy_weights, find_text, keep_tokenizer, load_initial
from tests.builders import small_training
from tests.processes import run
from tests.training.runs import SHORT, find_short_text, train_run

CPU = torch.device("cpu")
NETWORK = ModelConfig(model="compressive", d_model=16, heads=2, n_layers=2, d_ff=16, segment_len=8,
                      mem_len=8, c_mem_len=4, compression_rate=2)  # fmt: skip
CONFIG = replace_nested(
    TrainConfig(NETWORK, tokens=2_000, batch_size=4, chunk_len=0), evaluations=2, evaluation_tokens=1_000
)


@pytest.fixture(autouse=True)
def _real_texts(monkeypatch):
    """Trainings read the texts that they name."""
    monkeypatch.setattr(run_module, "find_text", find_text)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text in a file."""
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_text(SHORT)
    return str(path)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """The folder of a finished training."""
    return train_run(replace(CONFIG, data=text), tmp_path_factory.mktemp("trained") / "run", "off")


def test_a_training_begins_with_an_arm_that_shares_lengths_without_use_with_others(tmp_path):
    network = replace(NETWORK, model="transformer-xl", vocab_size=256, c_mem_len=3, compression_rate=3)
    MemoryLM(network).save_pretrained(tmp_path / "arm")
    save_tokenizer(ByteTokenizer(), tmp_path / "arm")
    command = parse_train(["--init-from", str(tmp_path / "arm"), "--mem-len", "4"], Train())
    check_all_used(command.config)
    assert command.config.model == replace(network, mem_len=4, c_mem_len=64, compression_rate=4)


class Killed(Exception):
    """The end of a process, where nothing is saved any more."""


def killed(config, folder, **options):
    """Train in ``folder`` until the process is killed in its third step."""

    def segments(*args, **kwargs):
        yield from islice(training_segments(*args, **kwargs), 2)
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "training_segments", segments)
        with pytest.raises(Killed):
            train_run(config, folder, "off", **options)


def copied(run, folder):
    """A copy of a run in ``folder``."""
    return shutil.copytree(run, folder, symlinks=True)


def weights(folder):
    """The weights of a run's newest checkpoint."""
    return load_checkpoint(folder, CPU)[0].state_dict()


def test_a_training_begins_with_given_weights_their_tokenizer_and_other_lengths(trained, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(write_play(20_000, seed=1))  # some of whose characters may be missing
    options = ["--tokens", 600, "--batch-size", 4, "--evaluations", 1, "--mem-len", 12, "--dashboard", "off"]
    run("train", "--init-from", trained, "--data", other, "--out", tmp_path / "run", *options)
    config = read_train_config(tmp_path / "run")
    assert (config.model.mem_len, config.model.d_model, config.model.model) == (12, 16, "compressive")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (
        next((trained / CHECKPOINTS).glob("0*2*")) / "tokenizer.json"
    ).read_bytes()
    first = CHECKPOINTS + "/000000000000"
    begun = load_checkpoint(tmp_path / "run" / first, CPU)[0]
    assert all(torch.equal(x, begun.state_dict()[name]) for name, x in weights(trained).items())
    assert begun.config.mem_len == 12
    loss = read_metrics(tmp_path / "run")[0]["loss.train"]
    scratch = train_run(replace(config, tokens=200), tmp_path / "scratch", "off")
    assert loss < read_metrics(scratch)[0]["loss.train"] - 0.3


def test_a_model_in_memory_and_a_packaged_one_are_given_weights_too(text, tmp_path):
    name = "compressive-shakespeare"
    model, tokenizer = load_initial(name)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    config = replace_nested(
        TrainConfig(), data=text, tokens=200, batch_size=2, evaluations=1, optimizer="adamw"
    )
    config = replace_nested(config, learning_rate=1e-30)
    of_file = replace(config, tokenizer=str(PACKAGED / name / "tokenizer.json"))
    for init, its in ((model, of_file), (name, config)):
        found = train(its, tmp_path / type(init).__name__, init=init, dashboard="off")
        assert found.tokenizer.to_json() == tokenizer.to_json()
        assert all(torch.equal(x, before[key]) for key, x in found.model.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [("--d-model 32", "d_model 16 → 32"), ("--model transformer-xl", "needs model="),
     ("--tokenizer byte", "leave it out"), ("--init-from no/such", "no/such")],
)  # fmt: skip
def test_given_weights_that_do_not_fit_are_one_line(arguments, said, trained, text, tmp_path):
    options = ["train", "--init-from", trained, "--data", text, "--out", tmp_path / "run", *arguments.split()]
    assert run(*options).said(said)
    assert not (tmp_path / "run" / CHECKPOINTS).exists()


def test_weights_are_read_again_each_time_whatever_lies_in_the_folder(trained, text, tmp_path, monkeypatch):
    """Also a relative path, after the current folder has changed."""
    (tmp_path / "elsewhere").mkdir()
    copied(trained, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    before = load_initial("run")[0].state_dict()
    train_run(replace(CONFIG, data=text, tokens=3_000), tmp_path / "run", "off", resume=True)
    after = load_initial("run")[0].state_dict()
    assert not all(torch.equal(x, after[name]) for name, x in before.items())
    assert all(torch.equal(x, after[name]) for name, x in weights(tmp_path / "run").items())
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="run"):
        load_initial("run")


def test_a_run_with_its_tokenizer_is_resumed_and_evaluated_where_it_was_moved_to(
    trained, text, tmp_path, monkeypatch
):
    """Whether it has the tokenizer of its initial weights or one that was named; by a relative path too."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(next((trained / CHECKPOINTS).glob("0*2*")) / "tokenizer.json", "mine.json")
    begin = {"init": {"init": trained}, "named": {}}
    for name, options in begin.items():
        config = replace(CONFIG, data=text, tokens=600, model=NETWORK if name == "named" else ModelConfig())
        config = replace(config, tokenizer="mine.json") if name == "named" else config
        whole = train_run(config, Path(f"{name}-whole"), "off", **options)
        killed(config, Path(name), **options)
        Path("mine.json").rename("gone.json") if name == "named" else None
        moved = shutil.move(name, tmp_path / "other" / name)
        train_run(read_train_config(moved), moved, "off", resume=True)
        assert all(torch.equal(x, weights(moved)[key]) for key, x in weights(whole).items())
        evaluated = run("evaluate", "--checkpoint", moved, "--out", tmp_path / "out", "--device", "cpu")
        assert evaluated.code == 0, evaluated.err


def test_a_tokenizer_that_lies_in_the_folder_is_not_replaced_by_another(tmp_path):
    save_tokenizer(ByteTokenizer(), tmp_path)
    before = files_of(tmp_path)
    keep_tokenizer(ByteTokenizer(), tmp_path)
    with pytest.raises(UserError, match="is another tokenizer; name a new folder"):
        keep_tokenizer(CharacterTokenizer("abc"), tmp_path)
    assert files_of(tmp_path) == before


def test_given_weights_for_fewer_positions_are_one_line():
    short, long = (MemoryLM(replace(NETWORK, positions="learned", mem_len=n)) for n in (8, 16))
    with pytest.raises(UserError, match="positions='learned'"):
        copy_weights(short, long)


def files_of(folder):
    """The contents of all files in ``folder``."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_training_that_has_seen_the_tokens_is_left_as_it_is(trained, tmp_path):
    """2,016 tokens, since 2,000 are no whole number of steps."""
    folder = copied(trained, tmp_path / "run")
    before, config = files_of(folder), read_train_config(folder)
    for tokens in (2_000, 2_001, 2_016):
        train_run(replace(config, tokens=tokens), folder, "off", resume=True)
        assert "already finished" in run("train", "--resume", folder, "--tokens", tokens).out
        assert files_of(folder) == before
    train_run(replace(config, tokens=2_500), folder, "off", resume=True)
    assert read_json(folder / RESULT)["tokens"] >= 2_500


def test_a_run_whose_end_was_passed_by_its_last_step_gets_its_result_again(trained, tmp_path):
    folder = copied(trained, tmp_path / "run")
    (folder / RESULT).unlink()
    write_json(folder / "config.json", read_json(folder / "config.json") | {"tokens": 2_010})
    train_run(read_train_config(folder), folder, "off", resume=True)
    assert read_json(folder / RESULT)["loss"] == read_json(trained / RESULT)["loss"]


def test_a_finished_training_goes_on_to_more_tokens_and_says_how(trained, tmp_path):
    folder = copied(trained, tmp_path / "run")
    before = read_json(folder / RESULT)
    assert "rises again" in run("train", "--resume", folder, "--tokens", 3_000, "--dashboard", "off").out
    records, result = read_metrics(folder), read_json(folder / RESULT)
    assert result["tokens"] >= 3_000 > before["tokens"]
    assert [r["tokens"] for r in records if "loss.valid" in r] == [1024, 2016, 2528, 3008]
    rates = [r["learning_rate"] for r in records if r["tokens"] > before["tokens"] and "learning_rate" in r]
    assert max(rates) > CONFIG.optim.learning_rate / 2 > min(rates)
    assert "already finished" in run("train", "--resume", folder).out
    assert run("train", "--resume", folder, "--tokens", 2_500).said("tokens 3000 → 2500")
    (tmp_path / "other.txt").write_text(SHORT[::-1])
    assert run("train", "--resume", folder, "--data", tmp_path / "other.txt").said("different")


def test_after_a_kill_a_training_on_given_weights_has_the_same_weights(trained, text, tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    config = replace(CONFIG, data=text, model=ModelConfig(), tokens=600)
    train_run(config, whole, "off", init=trained)
    killed(config, run, init=trained)
    assert not (run / RESULT).exists()
    train_run(read_train_config(run), run, "off", resume=True)
    assert all(torch.equal(x, weights(run)[name]) for name, x in weights(whole).items())


def test_a_training_ends_when_its_loss_falls_no_more(text, tmp_path):
    config = small_training(data=text, tokens=100_000, evaluations=100, stop_after=3, optimizer="adamw")
    folder = train_run(replace_nested(config, learning_rate=1e-30), tmp_path / "run", "off")
    assert len([r for r in read_metrics(folder) if "loss.valid" in r]) == 1 + 3
    assert read_json(folder / RESULT)["tokens"] < 5_000
    assert "already finished" in run("train", "--resume", folder).out


def test_a_training_leaves_the_random_numbers_of_its_program_alone(text, tmp_path):
    drawn = []
    for trains in (False, True):
        random.seed(7), np.random.seed(7), torch.manual_seed(7)
        if trains:
            train_run(small_training(data=text, tokens=512), tmp_path / "run", "off")
        drawn.append((random.random(), np.random.random(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]


def test_two_trainings_in_threads_of_one_process_are_refused(monkeypatch, tmp_path):
    inside, end = threading.Event(), threading.Event()

    def find(config):
        inside.set()
        end.wait(60)
        return find_short_text(config)

    monkeypatch.setattr(run_module, "find_text", find)
    thread = threading.Thread(target=train_run, args=(small_training(tokens=512), tmp_path / "a", "off"))
    thread.start()
    inside.wait(60)
    with pytest.raises(UserError, match="another training"):
        train_run(small_training(tokens=512), tmp_path / "b", "off")
    end.set()
    thread.join()
    assert (tmp_path / "a" / RESULT).exists()
