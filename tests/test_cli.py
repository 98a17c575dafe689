"""The command as a user meets it: in a process of its own."""

import subprocess
import sys

import pytest

from memformers.files import read_json
from memformers.training.run import train_run
from tests.builders import SMALL_RUN, small_training


def memformers(*arguments, cwd=None, input=None):
    command = [sys.executable, "-m", "memformers.cli", *map(str, arguments)]
    return subprocess.run(
        command, cwd=cwd, input=input, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train_run(small_training(tokens=512), tmp_path_factory.mktemp("cli") / "run")


@pytest.mark.parametrize("command", [[], ["train"], ["compare"], ["generate"], ["evaluate"], ["report"]])
def test_help_says_what_each_option_is_for(command):
    result = memformers(*command, "--help")
    assert result.returncode == 0
    assert "usage: memformers" in result.stdout
    words = {"train": "--learning-rate", "compare": "--scale", "generate": "--top-p", "report": "FOLDER",
             "evaluate": "--mem-len"}  # fmt: skip
    for name in command:
        assert words[name] in result.stdout
    if not command:
        assert all(name in result.stdout for name in words)


def test_train_then_generate_then_report(tmp_path):
    result = memformers("train", "--model", "compressive", "--out", tmp_path / "run", *SMALL_RUN)
    assert result.returncode == 0, result.stderr
    assert f"run: {tmp_path / 'run'}" in result.stdout
    assert "corpus: built-in play" in result.stdout
    assert read_json(tmp_path / "run" / "config.json")["model"]["model"] == "compressive"
    text = memformers("generate", "--checkpoint", tmp_path / "run", "--prompt", "BANQUO:", "--tokens", 30,
                      "--seed", 1)  # fmt: skip
    assert text.returncode == 0, text.stderr
    assert text.stdout.startswith("BANQUO:")
    assert len(text.stdout) == len("BANQUO:") + 30 + 1
    report = memformers("report", tmp_path / "run")
    assert report.returncode == 0, report.stderr
    assert (tmp_path / "run" / "report.html").is_file()


def test_runs_go_to_the_runs_folder_by_default(tmp_path):
    result = memformers("train", *SMALL_RUN, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-transformer-xl")


def test_resume_takes_the_newest_run_with_its_own_settings_and_refuses_others(tmp_path):
    arguments = ["train", "--resume", "--out", "runs/first", *SMALL_RUN, "--learning-rate", "0.01"]
    begun = memformers(*arguments, cwd=tmp_path)  # where there is none, one begins
    assert begun.returncode == 0, begun.stderr
    folder = tmp_path / "runs" / "first"
    (folder / "result.json").unlink()
    other = memformers("train", "--resume", "runs/first", "--learning-rate", "0.002", cwd=tmp_path)
    assert (other.returncode, "Traceback" in other.stderr) == (2, False)
    assert "can't be resumed with other settings: learning_rate 0.01 → 0.002" in other.stderr
    resumed = memformers("train", "--resume", "--keep-checkpoints", 1, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "goes on at token" in resumed.stdout
    assert read_json(folder / "result.json")["tokens"] >= 1500
    config = read_json(folder / "config.json")
    assert (config["learning_rate"], config["keep_checkpoints"], config["batch_size"]) == (0.01, 1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--d-model", "100", "--heads", "8"], "d_model=100 is not divisible by heads=8"),
        (["train", "--data", "/gone.txt"], "error: --data=/gone.txt is neither a text file nor a folder"),
        (["train", "--batch-size", "500000", "--data", "builtin"], "too short for 500000 streams"),
        (["train", "--compression-rate", "0"], "compression_rate=0"),
        (["train", "--mem-len", "-3"], "mem_len=-3 is negative"),
        (["train", "--vocab-size", "7", "--data", "builtin"], "vocab_size=7, but the text has"),
        (["train", "--dashboard", "nowhere"], "no http:// or https:// address"),
        (["train", "--device", "warp", "--data", "builtin"], "device='warp' can't be used here"),
        (["train", "--learnin-rate", "1"], "--learning-rate"),
        (["train", "--tokens", "1.5e6"], "--tokens"),
        (["train", "--seed", "-1"], "seed=-1 is outside"),
        (["train", "--skip-bad-steps", "-1"], "skip_bad_steps=-1 is negative"),
        (["train", "--resume"], "error: runs holds no run to resume"),
        (["train", "--resume", "/gone"], "error: /gone is no run's folder"),
        (["train", "--resume", "a", "--out", "b"], "name one run to resume"),
        (["compare", "--scale", "inf"], "scale=inf must be above 0, and finite"),
        (["compare", "--scale", "0"], "scale=0.0 must be above 0"),
        (["compare", "--model", "compressive"], "name them with models"),
        (["compare", "--models", "transformer", "transformer"], "must name each model once"),
        (["generate", "--checkpoint", "/gone"], "error: /gone holds no checkpoint"),
        (["report", "/gone"], "error: /gone holds no run"),
    ],
)
def test_a_mistake_gets_a_clear_answer_and_no_traceback(arguments, message, tmp_path):
    result = memformers(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "Ω mega Ω"], "characters outside the vocabulary of 51: 'Ω' at 0 (2x)"),
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--top-p", "2"], "top_p=2.0 is outside (0, 1]"),
        (["--top-k", "0"], "top_k=0"),
        (["--tokens", "-1"], "max_new_tokens=-1"),
    ],
)
def test_a_mistake_in_generate_gets_a_clear_answer(trained, arguments, message):
    result = memformers("generate", "--checkpoint", trained, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_generate_reads_a_book_keeps_its_memory_and_goes_on_from_there(trained, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("BANQUO: well met.\n" * 200)
    greedy = ["generate", "--checkpoint", trained, "--tokens", 20, "--temperature", 0]
    memory = tmp_path / "memory.safetensors"
    first = memformers(*greedy, "--prompt-file", book, "--save-memory", memory)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout) == 21
    assert "reading" in first.stderr
    second = memformers(*greedy, "--load-memory", memory)
    assert second.returncode == 0, second.stderr
    at_once = memformers(*greedy[:-3], 40, "--temperature", 0, "--prompt-file", book)
    assert at_once.stdout == first.stdout[:-1] + second.stdout


def test_generate_reads_from_a_pipe_and_answers_line_by_line(trained):
    options = ["generate", "--checkpoint", trained, "--tokens", 12, "--temperature", 0]
    piped = memformers(*options, "--prompt-file", "-", input="BANQUO:")
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == memformers(*options, "--prompt", "BANQUO:").stdout.removeprefix("BANQUO:")
    answers = memformers(*options, "--interactive", input="well met.\nwell met.\n")
    assert answers.returncode == 0, answers.stderr
    assert len(answers.stdout) == 2 * 13 + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-file", "/gone.txt"], "/gone.txt can't be read as UTF-8 text"),
        (["--load-memory", "/gone"], "/gone can't be read as a saved memory"),
    ],
)
def test_a_missing_file_in_generate_gets_a_clear_answer(trained, arguments, message):
    result = memformers("generate", "--checkpoint", trained, *arguments)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert message in result.stderr


def test_evaluate_prints_and_writes_the_numbers_of_a_text(trained, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("BANQUO: well met.\n" * 100)
    result = memformers("evaluate", "--checkpoint", trained, "--text", text, "--streams", 2, "--mem-len", 40,
                        "--out", tmp_path / "out")  # fmt: skip
    assert result.returncode == 0, result.stderr
    numbers = read_json(tmp_path / "out" / "evaluation.json")
    assert f"{numbers['loss_nats']:.4f} ± " in result.stdout
    assert numbers["tokens"] == 1799
    assert len(numbers["loss_in_segment"]) == 16
    assert [group["positions_before"] for group in numbers["loss_by_memory"]] == [0, 16, 32, 40]
    assert (tmp_path / "out" / "loss_by_position.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "/gone.txt"], "/gone.txt can't be read as UTF-8 text"),
        (["--text", "-", "--streams", "0"], "streams=0 is too small"),
        (["--text", "-", "--mem-len", "-1"], "mem_len=-1 is negative"),
        (["--text", "-"], "a text of 0 tokens has nothing to predict"),
    ],
)
def test_a_mistake_in_evaluate_gets_a_clear_answer(trained, arguments, message):
    result = memformers("evaluate", "--checkpoint", trained, *arguments, input="")
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert message in result.stderr
