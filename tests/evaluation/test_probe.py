"""The probe of a real comparison, and what is said about it in the terminal, the page and the report."""

import html
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from memformers.cli import main
from memformers.common.files import read_json, write_json
from memformers.common.intervals import Mean
from memformers.evaluation.probe import held_out_tokens, probe
from memformers.report.document import write_report
from memformers.report.numbers import number
from tests.builders import COMPARED, small_training
from tests.report.fake_runs import markdown_of
from tests.training.runs import SHORT, dataset_with, train_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def copied(compared, tmp_path_factory):
    """A comparison to probe."""
    return shutil.copytree(compared, tmp_path_factory.mktemp("copied") / "compared", symlinks=True)


def test_terminal_page_and_report_say_the_same_of_a_memory(copied, capsys):
    main(["probe", str(copied), "--tokens", "512"])
    ablation = read_json(copied / "probe.json")["memory_ablation"]
    assert (ablation["tokens"], ablation["streams"]) == (512, 16)
    assert [*ablation["costs"]] == list(COMPARED)
    controls = {f"{part} {how}" for part in ("slots", "memory") for how in ("zeroed", "swapped")}
    assert ablation["costs"]["compressive"].keys() == controls
    out = " ".join(capsys.readouterr().out.split())
    markdown = (copied / "report.md").read_text()
    page = html.unescape((copied / "report.html").read_text())
    page = page.replace("\N{WORD JOINER}", "").replace("\xa0", " ")
    result = read_json(copied / "compressive/result.json")
    of_a_nat = result["bits_per_character"] / result["loss"]
    assert of_a_nat == pytest.approx(1 / math.log(2))
    for control in controls:
        cost = Mean.from_json(ablation["costs"]["compressive"][control])
        shown = number(cost, ".3f", scale=of_a_nat, signed=True)
        assert all(shown in text for text in (out, markdown, page)), control
    for text in (out, markdown, page):
        assert "slots zeroed" in text
        assert "Compressive Transformer makes no significant use of its slots: swapping costs " in text


def test_the_first_seed_of_each_arm_is_probed(copied, tmp_path):
    folder = shutil.copytree(copied, tmp_path / "again", symlinks=True)
    shutil.copytree(folder / "compressive", folder / "compressive-seed1", symlinks=True)
    plan = read_json(folder / "experiment.json")
    plan["runs"]["compressive-seed1"] = {"arm": "compressive", "seed": 1}
    write_json(folder / "experiment.json", plan)
    shutil.rmtree(folder / "transformer" / "checkpoints")
    probed = read_json(probe(folder, 256, CPU))
    assert set(probed["memory_ablation"]["loss"]) == set(COMPARED) - {"transformer"}
    assert "**Not probed, since there is no checkpoint**: No memory." in markdown_of(folder)
    facts = read_json(folder / "compressive" / "run.json")
    facts["corpus"]["sha256"] = "0123"
    write_json(folder / "compressive" / "run.json", facts)
    with pytest.raises(ValueError, match=r"compressive .* sha256 0123, but"):
        probe(folder, 256, CPU)
    for checkpoints in folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)
    with pytest.raises(ValueError, match=r"no run in .* has a checkpoint"):
        probe(folder, 256, CPU)


def test_a_single_run_is_probed_from_inside_its_folder(copied, monkeypatch, capsys):
    monkeypatch.chdir(copied / "compressive")
    main(["probe", ".", "--tokens", "512"])
    probed = read_json(Path("probe.json"))
    assert [*probed["memory_ablation"]["costs"]] == ["compressive"]
    assert "Compressive Transformer makes no significant use of its slots" in capsys.readouterr().out
    # A probe of another version.
    write_json(Path("probe.json"), probed | {"memory_ablation": {"overall": {}}})
    assert "**The probe was left out**" in markdown_of(Path())


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("length", [100, 20])
def test_documents_are_probed_each_from_an_empty_memory(length, tmp_path):
    """Those that are too short to fill the memories, of 28 positions, are not."""
    text = SHORT[:4_000]
    path = tmp_path / "texts.jsonl"
    documents = [text[i : i + length] for i in range(0, len(text), length)]
    path.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    config = small_training(model="compressive", data=str(path), max_tokens=1_000, evaluations=1)
    folder = train_run(config, tmp_path / "run")
    ablation = read_json(probe(folder, 256, CPU))["memory_ablation"]
    assert ("too short to fill" in write_report(folder).page.read_text()) == (length == 20)
    if length == 20:
        assert ablation is None
        return
    held_out = 400 // length
    assert [ablation[name] for name in ("of_documents", "streams", "warm_up")] == [True, held_out, 32]
    assert ablation["tokens"] == held_out * 64
    assert "which reads another document" in markdown_of(folder)


def test_held_out_are_the_tokens_and_documents_of_training():
    corpus = dataset_with("cat cat hat " * 10 + "hat he" + "at cat", small_training(), (120, 6, 6))
    tokens, lengths = held_out_tokens(corpus)
    assert (corpus.tokenizer.decode(tokens), lengths) == ("hat heat cat", (6, 6))
