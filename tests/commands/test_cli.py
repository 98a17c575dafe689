"""The command as a user meets it, in this process, where Python and PyTorch need not start each time."""

import os
import re
import shlex
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from memformers import Memory, MemoryLM, ModelConfig, prepare_ids, train
from memformers.cli import COMMANDS
from memformers.commands import options
from memformers.commands.train import parse_train
from memformers.common.errors import UserError
from memformers.common.files import read_json
from memformers.common.processes import StopSignals
from memformers.comparison.text import CompareConfig
from memformers.data import tokenize_corpus
from memformers.data.files import bytes_of
from memformers.data.tokenizer import ByteTokenizer
from memformers.data.tokenizers import load_tokenizer, save_tokenizer
from tests.builders import SMALL_RUN, SMALL_SIZES, small_training
from tests.processes import finish, run

pytestmark = pytest.mark.usefixtures("here")  # where ``runs`` may come to be
OF_TRAINING = "data tokenizer max-tokens batch-size seed chunk-len memory-warmup"
FIRST = {
    "train": f"out resume preset init-from dashboard track {OF_TRAINING}",
    "compare": f"out resume dashboard track scale seeds models arms equal-keys {OF_TRAINING}",
    "generate": "checkpoint pretrained prompt prompt-file tokens",
    "evaluate": "checkpoint pretrained text split",
}


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_readable_and_starts_with_what_a_newcomer_needs(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    shown = run(command, "--help") if command else run()
    assert shown.code == 0
    assert not re.search(r"\{None\}|\|\{|default: (None|''|)\)|Raises|Error", shown.out)
    options = re.findall(r"^│ --([a-z-]+)", shown.out, re.MULTILINE)
    first = FIRST.get(command, "").split()
    assert options[: len(first)] == first


@pytest.mark.parametrize("command", ["train", "compare"])
def test_help_begins_with_the_twenty_options_that_people_use(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    lines = run(command, "--help").out.partition("╭")[0].splitlines()
    most_used = [line for line in lines if line.startswith("  --")]
    assert len(most_used) == 20
    assert max(map(len, most_used)) <= 90
    for option in ("--batch-size 64", "--learning-rate 0.004", "--segment-len 64", "--vocab-size"):
        (line,) = [line for line in most_used if line.startswith(f"  {option} ")]
        assert len(line.split("  ")[-1]) > 10, "what it is"


def test_a_mistyped_command_is_corrected():
    assert run("trian").says("error: unknown command 'trian'; did you mean 'train'?")
    assert run("xyz").says("unknown command 'xyz'; memformers --help lists all commands.")


def test_a_shell_completes_commands_and_options():
    script = run("--tyro-print-completion", "bash").out
    complete = "COMP_WORDS=(memformers {}); COMP_CWORD={}; _tyro_memformers; echo ${{COMPREPLY[@]}}\n"
    script += complete.format("tr", 1) + complete.format("train --c-m", 2)
    ended = finish(["bash", "-c", script])
    assert ended.stdout.split() == ["train", "--c-mem-len"], ended.stderr


def test_make_alone_lists_its_targets():
    folder = Path(options.__file__).parents[2]
    listed = finish(["make", "-C", folder, "--no-print-directory"]).stdout
    targets = re.findall(r"^make ([a-z-]+) +\S", listed, re.MULTILINE)
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (folder / "Makefile").read_text(), re.MULTILINE)
    assert targets == phony.split()


def test_no_command_imports_what_takes_long_before_it_is_needed():
    program = (
        "import sys, memformers.commands.train, memformers.commands.generate\n"
        "slow = {'torch._dynamo', 'matplotlib', 'huggingface_hub'}\n"
        "sys.exit(', '.join(slow & sys.modules.keys()) or 0)"
    )
    ended = finish([sys.executable, "-c", program])
    assert ended.returncode == 0, ended.stderr


@pytest.mark.usefixtures("quick_runs")
def test_train_then_generate_then_report(tmp_path):
    folder = tmp_path / "a run"
    trained = run("train", "--model", "compressive", "--out", folder, *SMALL_RUN)
    assert trained.code == 0, trained.err
    assert f"run: {folder}" in trained.out
    assert "corpus: built-in play" in trained.out
    for command, line in zip(("generate", "evaluate"), trained.out.splitlines()[-2:], strict=True):
        program, *words = shlex.split(line.removeprefix("next: "))
        assert shutil.which(program), "it runs from here"
        assert words[-3:] == [command, "--checkpoint", str(folder)]
    assert read_json(folder / "config.json")["model"]["model"] == "compressive"
    text = run("generate", "--checkpoint", folder, "--prompt", "BANQUO:", "--tokens", 30).out
    assert text.startswith("BANQUO:")
    assert len(text) == len("BANQUO:") + 30 + 1
    assert run("report", folder).code == 0
    assert (folder / "report.html").is_file()


@pytest.mark.parametrize(("words", "shifted"), [
    ((), True), (("--no-token-shift",), False), (("--model", "compressive"), True),
    (("--preset", "text8-24l"), False),
    (("--model", "experiments/memories/averages.py:Averages"), True),
    (("--model", "experiments/memories/infini.py:InfiniAttention"), False),
    (("--init-from", "transformer-xl-shakespeare"), False),
])  # fmt: skip
def test_a_new_training_has_a_token_shift_where_it_can(words, shifted, monkeypatch):
    monkeypatch.chdir(Path(options.__file__).parents[2])
    assert parse_train([*words]).config.model.token_shift == shifted
    assert CompareConfig().train.model.token_shift
    assert not ModelConfig().token_shift


def test_names_are_printable_and_help_fits_a_narrow_terminal(monkeypatch):
    assert run("report", "\x1b[31mrun\a").says("\ufffd[31mrun\ufffd")
    monkeypatch.setenv("COLUMNS", "3")
    assert "--model" in run("train", "--help").out


@pytest.mark.usefixtures("quick_runs")
def test_resume_takes_the_newest_run_with_its_settings(tmp_path):
    assert run("train", *SMALL_RUN, "--learning-rate", "0.01").code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-transformer-xl")
    (folder / "result.json").unlink()
    assert run("train", "--resume", folder, "--learning-rate", "0.002").says("learning_rate 0.01 → 0.002")
    resumed = run("train", "--resume", "--keep-checkpoints", 1)
    assert resumed.code == 0, resumed.err
    assert "continues at token" in resumed.out
    assert read_json(folder / "result.json")["tokens"] >= 1500
    config = read_json(folder / "config.json")
    kept = config["optim"]["learning_rate"], config["checkpoint"]["keep_checkpoints"], config["batch_size"]
    assert kept == (0.01, 1, 4)
    assert run("train", "--resume", "--out", "runs/first", *SMALL_RUN).code == 0, "where there is none"
    assert (tmp_path / "runs" / "first" / "result.json").is_file()


@pytest.mark.usefixtures("quick_runs")
def test_every_folder_may_be_below_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    prepare_ids("~/ids", np.arange(1000) % 7, vocab_size=7)
    trained = train(small_training(model="compressive", data="~/ids", max_tokens=64), "~/run")
    trained.model.save_pretrained("~/model")
    save_tokenizer(ByteTokenizer(), tmp_path / "home")
    assert load_tokenizer(Path("~/tokenizer.json")).name == "byte"
    averages = Path(options.__file__).parents[2] / "experiments" / "memories" / "averages.py"
    flagged = "@dataclass(frozen=True)\nclass Flagged(Settings):\n    flag: bool = False\n\n\n"
    mine = f"{averages.read_text()}\n\n{flagged}class Mine(Averages):\n    Config = Flagged\n"
    (tmp_path / "home" / "of_home.py").write_text(mine)
    checked = run("check", "~/of_home.py:Mine", "--flag=True")
    assert checked.code == 0, checked.err
    Memory.empty(trained.model.config, 1).save("~/memory")
    Memory.load("~/memory")
    MemoryLM.from_pretrained("~/model")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert {path.name for path in (tmp_path / "home").iterdir()} >= {"ids", "run", "model", "memory"}


def test_an_unwritable_cache_is_one_line_with_two_ways_out(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("BANQUO: well met.\n" * 100)
    # The cache is a file, in which an administrator can't make a folder either.
    monkeypatch.setenv("XDG_CACHE_HOME", str(text))
    monkeypatch.setattr(tokenize_corpus, "BIG", 0)
    ended = run("train", *SMALL_SIZES, "--data", text)
    assert ended.says(
        "set XDG_CACHE_HOME to a folder with space, or choose one with memformers prepare --out"
    )


OWN = """
from dataclasses import dataclass
from memformers import MemoryRule, MemorySizes
@dataclass(frozen=True)
class Settings:
    data: str = "x"
class Two(MemoryRule):
    @classmethod
    def sizes(cls, config):
        return [MemorySizes(4), MemorySizes(8)]
class Named(Two):
    Config = Settings
"""


def test_a_memory_may_fix_its_layers_and_name_its_settings(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    words = ["--n-layers", "2", "--model", f"{tmp_path / 'own.py'}:"]
    assert parse_train([*words[:3], f"{words[3]}Two"]).config.model.n_layers == 2
    with pytest.raises(UserError, match="two options are called data; rename"):
        parse_train([*words[:3], f"{words[3]}Named"])


MISTAKES = """
train --batch-size 500000 --data builtin | 500000
train --vocab-size 7 --data builtin | vocab_size=7
train --dashboard nowhere | dashboard='nowhere'
train --device warp --data builtin | device='warp'
train --model : --data builtin | FILE.py:Class
train --model my.py --data builtin | or your my.py:Class
train --tokenizer bpe --vocab-size 999999999 --data builtin | 16,777,216
evaluate --text - --out /dev/null | not a folder
train --learnin-rate 1 | --learning-rate
train --resume | --resume
train --resume /gone | error: /gone
train --resume a --out b | --out
compare --model transformer | models
recall --arms compresive | 'compresive'
recall --resume | --out
report /gone | error: /gone
generate --prompt= | prompt
generate --prompt ΩmegaΩ | 53: 'Ω' at 0 (2x)
generate --tokens -1 | tokens=-1
generate --prompt-file /gone.txt | /gone.txt
evaluate --text /gone.txt | /gone.txt
evaluate --text - | no text
evaluate --text - --model compressive | was trained with model=
generate --gate gru | --gate
train --data builtin --d-model 4398046511104 --n-heads 1 --d-ff 8 | memory
"""


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_a_mistake_gets_an_answer_before_anything_is_written(mistake, trained, tmp_path):
    words, _, word = mistake.partition(" | ")
    command, *others = words.split()
    ended = run(command, *["--checkpoint", trained] * (command in ("generate", "evaluate")), *others)
    assert ended.says(word), ended.err
    assert not list(tmp_path.iterdir())


def test_generate_reads_a_book_or_answers_line_by_line(trained, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text("BANQUO: well met.\n" * 200)
    options = ["generate", "--checkpoint", trained, "--tokens", 12, "--temperature", 0]
    read = run(*options, "--prompt-file", book)
    assert (read.code, len(read.out)) == (0, 13), read.err
    piped = run(*options, "--prompt-file", "-", input="BANQUO:")
    assert piped.out == run(*options, "--prompt", "BANQUO:").out.removeprefix("BANQUO:"), piped.err
    answers = run(*options, "--interactive", input="well met.\nwell € met.\nwell met.\n")
    assert (answers.code, len(answers.out)) == (0, 2 * 13 + 1), answers.err
    assert "error: characters outside the vocabulary" in answers.err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 0)])
@pytest.mark.parametrize("at", [1, 9])
def test_a_signal_ends_generate_at_any_moment(number, code, at, trained, monkeypatch):
    check = StopSignals.check
    times = []

    def signalled(self):
        times.append(self)
        if len(times) == at:
            os.kill(os.getpid(), number)
        check(self)

    monkeypatch.setattr(StopSignals, "check", signalled)
    prompt = "BANQUO: well met.\n"
    ended = run("generate", "--checkpoint", trained, "--prompt", prompt, "--tokens", 10_000_000)
    assert (ended.code, ended.err) == (code, "")
    assert ended.out.startswith(prompt) == (at > 1)
    assert len(times) == at


@pytest.mark.parametrize(
    ("on_path", "extra", "advice"),
    [(True, True, "memformers dashboard"), (False, True, "{python} -m memformers dashboard"),
     (False, False,
      "{python} -m memformers dashboard, after pip install '.[dashboard]' in a clone of the repository")],
)  # fmt: skip
def test_the_advice_names_a_command_that_works_from_here(on_path, extra, advice, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent) if on_path else "")
    monkeypatch.setattr(options, "find_spec", lambda name: extra or None)
    assert options.dashboard_here() == advice.format(python=sys.executable)
    monkeypatch.chdir(Path(options.__file__).parents[2])
    assert extra or options.dashboard_here() == "make dashboard"


@pytest.mark.drawn
def test_evaluate_prints_and_writes_the_numbers_of_a_text(trained, tmp_path):
    text = tmp_path / "text.txt"
    out = tmp_path / "out"
    text.write_text("BANQUO: well met.\n" * 100)
    ended = run("evaluate", "--checkpoint", trained, "--text", text, "--streams", 2, "--mem-len", 40, "--out",
                out)  # fmt: skip
    assert ended.code == 0, ended.err
    numbers = read_json(out / "evaluation.json")
    assert f"{numbers['loss_nats']:.4f} ± " in ended.out
    assert numbers["tokens"] == 1799
    assert len(numbers["loss_in_segment"]) == 16
    assert [group["positions_before"] for group in numbers["loss_by_memory"]] == [0, 16, 32, 40]
    assert (out / "loss_by_position.png").stat().st_size > 10_000
    (tmp_path / "short.txt").write_text("BAN")
    assert "nan" not in run("evaluate", "--checkpoint", trained, "--text", tmp_path / "short.txt").out
    again = ["evaluate", "--checkpoint", trained, "--text", text, "--out", out]
    assert run(*again).code == 0, "what an evaluation wrote may be written again"
    (out / "evaluation.json").write_text('{"mine": 1}')
    assert run(*again).says("has a evaluation.json that memformers didn't write")
    assert read_json(out / "evaluation.json") == {"mine": 1}


@pytest.mark.usefixtures("quick_runs")
def test_evaluate_reads_the_text_of_a_run_unless_it_has_changed(tmp_path):
    text = tmp_path / "text.txt"
    lines = [f"BANQUO: well met, {i}.\n" for i in range(600)]
    text.write_text("".join(lines))
    (held_out := tmp_path / "held_out.txt").write_text("".join(lines[300:]))
    assert run("train", *SMALL_SIZES, "--data", text, "--validation", held_out, "--out", "run").code == 0
    again = run("evaluate", "--checkpoint", "run", "--streams", 16)
    loss = read_json(Path("run", "result.json"))["loss"]
    assert f"loss            {loss:.4f} ± " in again.out, again.err
    for option in (["--text-field", "body"], ["--document-separator", "x"]):
        assert run("evaluate", "--checkpoint", "run", *option).says("are for the file of --text")
    moved = ("--data", text.rename(tmp_path / "moved.txt"))
    moved += ("--validation", held_out.rename(tmp_path / "moved_too.txt"))
    for command in ("evaluate", "--checkpoint", "run"), ("probe", "run"), ("train", "--resume", "run"):
        more = ["--max-tokens", 1600] * (command[0] == "train")
        assert run(*command, *more).says("text.txt doesn't exist")
        assert run(*command, *more, *moved).code == 0
    # The run names this text since it was resumed.
    moved[1].write_text("".join(reversed(lines)))
    assert run("evaluate", "--checkpoint", "run").says("the text that it was trained on with --data")


@pytest.mark.usefixtures("quick_runs")
def test_text_and_names_need_not_be_utf8(tmp_path):
    texts = tmp_path / "caf\udce9"
    held_out = "d\udce9j\udce0 vu\n"
    texts.mkdir()
    (texts / "book.txt").write_bytes(bytes_of(f"{held_out}un caf\udce9 bien noir\n" * 400))
    assert run("train", "--data", "builtin", "--out", "\udcff").says("surrogates not allowed")
    trained = run("train", *SMALL_SIZES, "--data", texts / "book.txt", "--tokenizer", "byte", "--out", "run")
    assert trained.code == 0, trained.err
    result = Path("run", "result.json")
    assert "\udce9" in read_json(result)["prompt"]
    result.unlink()
    assert run("train", "--resume", "run").code == 0
    assert "\udce9" in read_json(result)["prompt"]
    assert run("report", "run").code == 0
    assert "\ufffd" in Path("run", "report.md").read_text()
    generated = run("generate", "--checkpoint", "run", "--prompt", held_out, "--tokens", 1)
    assert generated.out.startswith("d?j? vu\n"), generated.err
    (texts / "\udce0.txt").write_text("plain text\n")
    (texts / "book.txt").unlink()
    evaluated = run("evaluate", "--checkpoint", "run", "--text", texts, "--out", "numbers")
    assert ", in 1 document\n" in evaluated.out, evaluated.err
    assert read_json(Path("numbers", "evaluation.json"))["documents"][0]["name"] == "\udce0.txt"


@pytest.mark.usefixtures("quick_runs")
def test_recall_trains_reports_and_is_reported_again(tmp_path):
    ended = run("recall", "--quick", "--arms", "compressive", "--tokens", "1e2")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-recall")
    assert ended.code == 0, ended.err
    assert "Recall by distance" in ended.out
    assert read_json(folder / "experiment.json")["settings"]["max_tokens"] == 100
    shutil.rmtree(folder / "figures")
    assert run("report", folder).code == 0
    assert (folder / "figures" / "recall_accuracy.svg").is_file()
    assert run("report", folder / "compressive").says("experiment.json")
