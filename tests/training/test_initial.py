"""Trainings that start from given weights, that continue after their end, and that end early."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from memformers import ModelConfig, TrainConfig, train
from memformers.commands.train import Train, parse_train
from memformers.common.errors import UserError
from memformers.common.fields import replace_nested
from memformers.common.files import read_json, write_json
from memformers.data.tokenizer import ByteTokenizer
from memformers.data.tokenizers import CharacterTokenizer, save_tokenizer
from memformers.models.config import reject_unused
from memformers.models.io import PACKAGED
from memformers.models.language_model import MemoryLM
from memformers.runs.folder import CHECKPOINTS, RESULT
from memformers.runs.load import load_checkpoint
from memformers.runs.metrics import read_metrics
from memformers.training import text as text_module
from memformers.training.config import read_train_config
from memformers.training.initial_weights import load_initial
from memformers.training.job import build_model
from memformers.training.text import find_text, keep_tokenizer
from tests.builders import small_training
from tests.processes import run
from tests.training.faults import fault_at
from tests.training.runs import SHORT, train_run

CPU = torch.device("cpu")
NETWORK = ModelConfig(model="compressive", d_model=16, n_heads=2, n_layers=1, d_ff=16, segment_len=8,
                      mem_len=8, c_mem_len=4, compression_rate=2)  # fmt: skip
# 512 tokens, since 500 are no whole number of steps.
CONFIG = replace_nested(
    TrainConfig(NETWORK, max_tokens=500, batch_size=4, chunk_len=0), evaluations=2, evaluation_tokens=500,
    final_tokens=500,
)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_text(SHORT)
    return str(path)


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """The folder of a finished training."""
    return train_run(replace(CONFIG, data=text), tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def copy(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy", symlinks=True)


def weights(folder):
    model, _ = load_checkpoint(folder, CPU)
    return model.state_dict()


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def equal(first, second):
    return all(torch.equal(x, second[name]) for name, x in first.items())


def tokenizer_of(folder):
    """The file of the tokenizer in a checkpoint."""
    checkpoint = next(folder.glob("checkpoints/0*"))
    return (checkpoint / "tokenizer.json").read_bytes()


def test_initial_weights_of_an_arm_with_unused_lengths(tmp_path):
    network = replace(NETWORK, model="transformer-xl", vocab_size=256, c_mem_len=3, compression_rate=3)
    MemoryLM(network).save_pretrained(tmp_path / "arm")
    save_tokenizer(ByteTokenizer(), tmp_path / "arm")
    command = parse_train(["--init-from", str(tmp_path / "arm"), "--mem-len", "4"], Train())
    for part in (command.config, command.config.model):
        reject_unused(part, "transformer-xl", lengths=True)
    assert command.config.model == replace(network, mem_len=4, c_mem_len=64, compression_rate=4)


def test_initial_weights_allow_other_lengths(trained, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(SHORT[:12_000])  # where some characters are missing
    options = ["--max-tokens", 64, "--batch-size", 4, "--evaluations", 1, "--mem-len", 12]
    run("train", "--init-from", trained, "--data", other, "--out", tmp_path / "run", *options)
    config = read_train_config(tmp_path / "run")
    assert (config.model.mem_len, config.model.d_model, config.model.model) == (12, 16, "compressive")
    assert tokenizer_of(tmp_path / "run") == tokenizer_of(trained)
    assert equal(weights(trained), weights(tmp_path / "run" / CHECKPOINTS / "000000000000"))


def test_initial_weights_come_from_a_model_or_a_package(text, tmp_path):
    name = "compressive-shakespeare"
    model, tokenizer = load_initial(name)
    initial = {key: weight.clone() for key, weight in model.state_dict().items()}
    config = replace_nested(
        TrainConfig(), data=text, max_tokens=100, batch_size=1, evaluations=1, optimizer="adamw",
        learning_rate=1e-30, final_tokens=500, evaluation_tokens=500,
    )  # fmt: skip
    with_tokenizer = replace(config, tokenizer=str(PACKAGED / name / "tokenizer.json"))
    for init, settings in ((model, with_tokenizer), (name, config)):
        result = train(settings, tmp_path / type(init).__name__, init=init, dashboard="off")
        assert result.tokenizer.to_json() == tokenizer.to_json()
        assert equal(result.model.state_dict(), initial)

        # The same call again loads the finished run, and with more tokens extends it.
        folder = result.folder
        again = train(settings, folder, init=init, resume=True, dashboard="off")
        assert again.result == result.result
        longer = replace(settings, max_tokens=256)
        extended = train(longer, folder, init=init, resume=True, dashboard="off")
        assert extended.result["tokens"] == 256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("--d-model 32", "d_model 16 → 32"), ("--model transformer-xl", "needs model="),
     ("--tokenizer byte", "leave it out"), ("--init-from no/such", "no/such"),
     ("--batch-size 99999", "too short")],
)  # fmt: skip
def test_given_weights_that_do_not_fit_are_one_line(arguments, message, trained, text, tmp_path):
    options = ["train", "--init-from", trained, "--data", text, "--out", tmp_path / "run", *arguments.split()]
    assert run(*options).says(message)
    assert not list(tmp_path.glob("run/*")), "not even a tokenizer, which other weights could not replace"


def test_initial_weights_are_read_each_time(copy, text, tmp_path, monkeypatch):
    """Also a relative path, after the current folder has changed."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    first, _ = load_initial("copy")
    train_run(replace(CONFIG, data=text, max_tokens=600), copy, resume=True)
    second, _ = load_initial("copy")
    assert not equal(first.state_dict(), second.state_dict())
    assert equal(second.state_dict(), weights(copy))
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="copy"):
        load_initial("copy")


@pytest.mark.parametrize("name", ["init", "named"])
def test_a_moved_run_keeps_its_tokenizer(name, trained, text, tmp_path, monkeypatch):
    """Whether it has the tokenizer of its initial weights, from which it continues after a kill, or one that
    was named by a relative path."""
    monkeypatch.chdir(tmp_path)
    Path("mine.json").write_bytes(tokenizer_of(trained))
    config = replace(CONFIG, data=text, max_tokens=200)
    options = {}
    if name == "init":
        config = replace(config, model=ModelConfig())
        options["init"] = trained
    else:
        config = replace(config, tokenizer="mine.json")
    undisturbed = train_run(config, Path("undisturbed"), **options)
    # After this error, nothing is saved any more.
    with fault_at("step", 3, lambda: 1 / 0), pytest.raises(ZeroDivisionError):
        train_run(config, Path("run"), **options)
    assert not (Path("run") / RESULT).exists()
    Path("mine.json").unlink()
    moved = shutil.move("run", tmp_path / "other" / "run")
    train_run(read_train_config(moved), moved, resume=True)
    assert equal(weights(undisturbed), weights(moved))
    evaluated = run("evaluate", "--checkpoint", moved, "--out", tmp_path / "out", "--device", "cpu")
    assert evaluated.code == 0, evaluated.err


def test_a_tokenizer_in_the_folder_stays(tmp_path):
    save_tokenizer(ByteTokenizer(), tmp_path)
    files = files_of(tmp_path)
    keep_tokenizer(ByteTokenizer(), tmp_path)
    with pytest.raises(UserError, match="is another tokenizer; name a new folder"):
        keep_tokenizer(CharacterTokenizer("abc"), tmp_path)
    assert files_of(tmp_path) == files


def test_given_weights_for_fewer_positions_are_one_line():
    short = replace(NETWORK, positions="learned", mem_len=8)
    long = replace(NETWORK, positions="learned", mem_len=16)
    with pytest.raises(UserError, match="positions='learned'"):
        build_model(replace(CONFIG, model=long), initial=MemoryLM(short))


def test_a_finished_run_is_left_alone(copy):
    files = files_of(copy)
    config = read_train_config(copy)
    for tokens in (500, 501, 512):
        train_run(replace(config, max_tokens=tokens), copy, resume=True)
        assert "already finished" in run("train", "--resume", copy, "--max-tokens", tokens).out
        assert files_of(copy) == files


def test_a_finished_run_without_checkpoints_is_refused(copy):
    shutil.rmtree(copy / CHECKPOINTS)
    files = files_of(copy)
    assert run("train", "--resume", copy, "--max-tokens", 1_200).says("no checkpoint to continue from")
    assert files_of(copy) == files
    assert run("train", "--resume", copy, "--preset", "text8-24l").says("leave out --init-from and --preset")


def test_a_lost_result_is_written_again(copy, trained):
    (copy / RESULT).unlink()
    write_json(copy / "config.json", read_json(copy / "config.json") | {"max_tokens": 510})
    train_run(read_train_config(copy), copy, resume=True)
    assert read_json(copy / RESULT)["loss"] == read_json(trained / RESULT)["loss"]


def test_a_finished_run_is_extended(copy, tmp_path):
    assert "rises again" in run("train", "--resume", copy, "--max-tokens", 800).out
    records = read_metrics(copy)
    assert read_json(copy / RESULT)["tokens"] == 800
    assert [record["tokens"] for record in records if "loss.valid" in record] == [256, 512, 672, 800]
    extension = [record for record in records if record["tokens"] > 512]
    rates = [record["learning_rate"] for record in extension if "learning_rate" in record]
    assert max(rates) > CONFIG.optim.learning_rate / 2
    assert "already finished" in run("train", "--resume", copy).out
    assert run("train", "--resume", copy, "--max-tokens", 700).says("max_tokens 800 → 700")
    (tmp_path / "other.txt").write_text(SHORT[::-1])
    assert run("train", "--resume", copy, "--data", tmp_path / "other.txt").says("different")


def test_a_stale_copy_of_the_best_checkpoint_goes(trained, tmp_path):
    copy = shutil.copytree(trained, tmp_path / "copy", symlinks=False)
    assert not (copy / CHECKPOINTS / "best").is_symlink()
    run("train", "--resume", copy, "--max-tokens", 1_200)
    best = read_json(copy / CHECKPOINTS / "best" / "training.json")["validation_loss"]
    assert best == min(r["loss.valid"] for r in read_metrics(copy) if "loss.valid" in r)
    assert not list(copy.glob("checkpoints/.*"))


def test_a_training_ends_when_its_loss_falls_no_more(text, tmp_path):
    config = small_training(data=text, max_tokens=10_000, evaluations=50, patience=3, optimizer="adamw")
    config = replace_nested(config, learning_rate=1e-30, evaluation_tokens=500)
    folder = train_run(config, tmp_path / "run")
    assert len([r for r in read_metrics(folder) if "loss.valid" in r]) == 1 + 3
    assert read_json(folder / RESULT)["tokens"] < 1_000
    assert "already finished" in run("train", "--resume", folder).out


def test_training_restores_the_global_random_state(text, tmp_path):
    torch.manual_seed(7)
    wanted = torch.rand(())
    torch.manual_seed(7)
    train_run(small_training(data=text, max_tokens=64), tmp_path / "run")
    assert torch.rand(()) == wanted


def test_two_trainings_in_threads_of_one_process_are_refused(monkeypatch, tmp_path):
    has_begun = threading.Event()
    may_end = threading.Event()

    def find(config, folder):
        has_begun.set()
        may_end.wait(60)
        return find_text(config, folder)

    monkeypatch.setattr(text_module, "find_text", find)
    thread = threading.Thread(target=train_run, args=(small_training(max_tokens=64), tmp_path / "a"))
    thread.start()
    has_begun.wait(60)
    with pytest.raises(UserError, match="another training"):
        train_run(small_training(max_tokens=64), tmp_path / "b")
    may_end.set()
    thread.join()
    assert (tmp_path / "a" / RESULT).exists()
