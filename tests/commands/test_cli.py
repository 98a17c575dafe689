"""The command as a user meets it; but for two processes of its own, in this one, where Python and PyTorch
need not start each time."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from memformers.cli import COMMANDS
from memformers.common.files import read_json
from memformers.data.files import bytes_of
from tests.builders import SMALL_RUN, SMALL_SIZES
from tests.processes import finish, program, run


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path, monkeypatch):
    """Where ``runs`` may come to be."""
    monkeypatch.chdir(tmp_path)


def test_help_has_readable_values_no_empty_defaults_and_no_errors(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run().out == run("--help").out
    assert run().code == 0
    for name in COMMANDS:
        said = run(name, "--help-all")
        assert said.code == 0
        assert not re.search(r"\{None\}|\|\{|default: (None|''|)\)|Raises|Error", said.out), name


@pytest.mark.parametrize(
    ("command", "first"),
    [("train", "model data tokenizer tokens n-layers d-model mem-len preset init-from out resume dashboard"),
     ("compare", "data scale seeds models out dashboard resume")],
)  # fmt: skip
def test_help_has_a_dozen_options_and_the_names_of_the_groups_of_all_others(command, first, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    box, *others = run(command, "--help").out.split("╭─ ")[1:]
    assert not others
    assert re.findall(r"^│ --([a-z-]+)", box, re.MULTILINE) == first.split()
    assert f"\nmemformers {command} --help-all shows all options\n" in box
    listed = re.findall(r"^  (\w+) +[A-Z]", box, re.MULTILINE)
    boxes = run(command, "--help-all").out.split("╭─ ")[1:]
    assert boxes[0].split()[0] == "options"
    assert [each.partition(" options")[0] for each in boxes[1:]] == listed
    assert {"network", "memory", "compression", "optim", "checkpoint"} <= set(listed)
    assert sum(len(re.findall("^│ --", each, re.MULTILINE)) for each in boxes) > 60


def test_no_command_imports_what_only_several_processes_or_a_compiler_need():
    """Each of them takes half a second or more, before anything is shown."""
    program = (
        "import sys, memformers.commands.train, memformers.commands.generate\n"
        "late = 'torch.distributed.fsdp', 'torch.distributed.tensor', 'torch._dynamo', 'matplotlib'\n"
        "sys.exit(', '.join(name for name in late if name in sys.modules) or 0)"
    )
    ended = finish([sys.executable, "-c", program])
    assert ended.returncode == 0, ended.stderr


def test_train_in_a_process_of_its_own_then_generate_then_report(tmp_path):
    """The training without standard input and errors, which are then as the null device."""
    folder = tmp_path / "run"
    command = shlex.join(program("train", "--model", "compressive", "--out", folder, *SMALL_RUN))
    trained = finish(["sh", "-c", f"{command} <&- 2>&-"])
    assert (trained.returncode, trained.stderr) == (0, "")
    assert f"run: {folder}" in trained.stdout
    assert "corpus: built-in play" in trained.stdout
    assert read_json(folder / "config.json")["model"]["model"] == "compressive"
    text = run("generate", "--checkpoint", folder, "--prompt", "BANQUO:", "--tokens", 30).out
    assert text.startswith("BANQUO:")
    assert len(text) == len("BANQUO:") + 30 + 1
    assert run("report", folder).code == 0
    assert (folder / "report.html").is_file()


def test_a_name_cannot_write_to_the_terminal_and_a_narrow_one_has_its_help(monkeypatch):
    assert run("report", "\x1b[31mrun\a").said("\ufffd[31mrun\ufffd")
    monkeypatch.setenv("COLUMNS", "3")
    assert "--model" in run("train", "--help").out


@pytest.mark.usefixtures("quick_runs")
def test_resume_takes_the_newest_run_in_runs_with_its_own_settings_and_refuses_others(tmp_path):
    assert run("train", *SMALL_RUN, "--learning-rate", "0.01").code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-transformer-xl")
    (folder / "result.json").unlink()
    assert run("train", "--resume", folder, "--learning-rate", "0.002").said("learning_rate 0.01 → 0.002")
    resumed = run("train", "--resume", "--keep-checkpoints", 1)
    assert resumed.code == 0, resumed.err
    assert "continues at token" in resumed.out
    assert read_json(folder / "result.json")["tokens"] >= 1500
    config = read_json(folder / "config.json")
    kept = config["optim"]["learning_rate"], config["checkpoint"]["keep_checkpoints"], config["batch_size"]
    assert kept == (0.01, 1, 4)
    assert run("train", "--resume", "--out", "runs/first", *SMALL_RUN).code == 0, "where there is none"
    assert (tmp_path / "runs" / "first" / "result.json").is_file()


MISTAKES = """
train --batch-size 500000 --data builtin | 500000
train --vocab-size 7 --data builtin | vocab_size=7
train --embedding adaptive --cutoffs 9 --data builtin | tokenizer='frequency'
train --dashboard nowhere | dashboard='nowhere'
train --device warp --data builtin | device='warp'
train --learnin-rate 1 | --learning-rate
train --resume | --resume
train --resume /gone | error: /gone
train --resume a --out b | --out
compare --model transformer | models
compare --models transformer transformer | 'transformer'
recall --arms compresive | 'compresive'
recall --resume | --out
recall --device warp | device='warp'
recall --dashboard nowhere | http://
doctor --device cuda:77 | device='cuda:77'
report /gone | error: /gone
generate --prompt= | prompt
generate --prompt ΩmegaΩ | 53: 'Ω' at 0 (2x)
generate --tokens -1 | tokens=-1
generate --prompt-file /gone.txt | /gone.txt
evaluate --text /gone.txt | /gone.txt
evaluate --text - --out= | out=''
evaluate --text - --streams 0 | streams=0
evaluate --text - | no text
evaluate --text - --model compressive | model=compressive
generate --gate gru | gate=gru
train --data builtin --d-model 4398046511104 --heads 1 --d-ff 8 | memory
"""


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_a_mistake_gets_a_clear_answer_before_anything_is_written(mistake, trained, tmp_path):
    given, _, word = mistake.partition(" | ")
    command, *others = given.split()
    needs_run = command in ("generate", "evaluate") and "--checkpoint" not in others
    ended = run(command, *(["--checkpoint", trained] if needs_run else []), *others)
    assert ended.said(word), ended.err
    assert not list(tmp_path.iterdir())


def test_generate_reads_a_book_keeps_its_memory_and_goes_on_from_there(trained, tmp_path):
    book, memory = tmp_path / "book.txt", tmp_path / "memory.safetensors"
    book.write_text("BANQUO: well met.\n" * 200)

    def written(tokens, *options):
        ended = run("generate", "--checkpoint", trained, "--tokens", tokens, "--temperature", 0, *options)
        assert ended.code == 0, ended.err
        return ended

    first = written(20, "--prompt-file", book, "--save-memory", memory)
    assert len(first.out) == 21
    assert "prefill" in first.err
    second = written(20, "--load-memory", memory, "--save-memory", memory)
    assert written(40, "--prompt-file", book).out == first.out[:-1] + second.out


def test_generate_reads_from_a_pipe_and_answers_line_by_line(trained):
    options = ["generate", "--checkpoint", trained, "--tokens", 12, "--temperature", 0]
    piped = run(*options, "--prompt-file", "-", input="BANQUO:")
    assert piped.code == 0, piped.err
    assert piped.out == run(*options, "--prompt", "BANQUO:").out.removeprefix("BANQUO:")
    answers = run(*options, "--interactive", input="well met.\nwell met.\n")
    assert answers.code == 0, answers.err
    assert len(answers.out) == 2 * 13 + 1


@pytest.mark.drawn
def test_evaluate_prints_and_writes_the_numbers_of_a_text(trained, tmp_path):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("BANQUO: well met.\n" * 100)
    ended = run("evaluate", "--checkpoint", trained, "--text", text, "--streams", 2, "--mem-len", 40, "--out",
                out)  # fmt: skip
    assert ended.code == 0, ended.err
    numbers = read_json(out / "evaluation.json")
    so_far = re.findall(r"evaluating: 100%, .* loss ([\d.]+) nats", ended.err)[-1]
    assert float(so_far) == pytest.approx(numbers["loss_nats"], abs=6e-4)
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
    assert run(*again).said("has a evaluation.json that no run wrote")
    assert read_json(out / "evaluation.json") == {"mine": 1}


@pytest.mark.usefixtures("quick_runs")
def test_evaluate_reads_what_a_run_was_trained_on_and_refuses_it_once_it_has_changed(tmp_path):
    text, lines = tmp_path / "text.txt", [f"BANQUO: well met, {i}.\n" for i in range(600)]
    text.write_text("".join(lines))
    assert run("train", *SMALL_SIZES, "--data", text, "--out", "run").code == 0
    again = run("evaluate", "--checkpoint", "run", "--streams", 16)
    loss = read_json(Path("run", "result.json"))["loss"]
    assert f"loss            {loss:.4f} ± " in again.out, again.err
    for option in (["--text-field", "body"], ["--document-separator", "x"]):
        assert run("evaluate", "--checkpoint", "run", *option).said("are for the file of --text")
    text.write_text("".join(reversed(lines)))
    assert run("evaluate", "--checkpoint", "run").said("restore the text if it was changed")


@pytest.mark.usefixtures("quick_runs")
def test_text_and_names_that_are_not_utf8_are_trained_on_reported_and_continued(tmp_path):
    texts, held_out = tmp_path / "caf\udce9", "d\udce9j\udce0 vu\n"
    texts.mkdir()
    (texts / "book.txt").write_bytes(bytes_of(f"{held_out}un caf\udce9 bien noir\n" * 400))
    assert run("train", "--data", "builtin", "--out", "\udcff").said("not UTF-8")
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
    assert read_json(folder / "experiment.json")["settings"]["tokens"] == 100
    shutil.rmtree(folder / "figures")
    assert run("report", folder).code == 0
    assert (folder / "figures" / "recall_accuracy.svg").is_file()
    assert run("report", folder / "compressive").said("experiment.json")
