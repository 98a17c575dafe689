"""The probe of a real comparison, and its part of the report."""

import json
import math
import shutil

import pytest
import torch

from memformers.cli import main
from memformers.common.files import read_json, write_json
from memformers.evaluation.frequency_buckets import NO_WORD
from memformers.evaluation.probe import ProbeConfig, held_out_tokens, occurrences_in, probe
from memformers.report.document import write_report
from tests.builders import MODELS, small_training
from tests.report.fake_runs import markdown_of
from tests.training.runs import SHORT, finding, train_run

QUICK = ProbeConfig(step=16, positions=20, longest=64, streams=2, tokens=256)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def copied(compared, tmp_path_factory):
    """A comparison to probe."""
    return shutil.copytree(compared, tmp_path_factory.mktemp("copied") / "compared", symlinks=True)


@pytest.mark.drawn
def test_a_comparison_is_probed_and_its_report_shows_it(copied, capsys):
    main(["probe", str(copied), "--step", "16", "--positions", "20", "--longest", "64", "--tokens", "512"])
    assert str(copied / "report.html") in capsys.readouterr().out
    results = read_json(copied / "probe.json")
    assert set(results["attention"]) == set(results["effective_context"]["recl"]["0.1"]) == set(MODELS)
    ablation, markdown = results["memory_ablation"], (copied / "report.md").read_text()
    assert (ablation["overall"]["tokens"], ablation["streams"]) == (512, 16)
    assert set(ablation["overall"]["less_untouched"]["compressive"]) == {
        "slots zeroed", "slots swapped", "memory zeroed", "memory swapped"
    }  # fmt: skip
    assert ablation["by_occurrences"][-1]["tokens"] > 0
    for name in ("effective_context", "attention", "memory_ablation"):
        assert (copied / "figures" / f"{name}.svg").stat().st_size > 10_000
        assert f"figures/{name}.svg" in markdown


def test_the_first_seed_of_each_arm_is_probed_and_runs_that_cannot_be_are_named(copied, tmp_path):
    folder = shutil.copytree(copied, tmp_path / "again", symlinks=True)
    shutil.copytree(folder / "compressive", folder / "compressive-seed1", symlinks=True)
    plan = read_json(folder / "experiment.json")
    plan["runs"]["compressive-seed1"] = {"arm": "compressive", "seed": 1}
    write_json(folder / "experiment.json", plan)
    shutil.rmtree(folder / "transformer" / "checkpoints")
    with pytest.warns(UserWarning, match="no checkpoint of it: transformer"):
        assert set(read_json(probe(folder, QUICK, CPU))["attention"]) == set(MODELS) - {"transformer"}
    said = "**Not probed, since no checkpoint was there**: No memory."
    assert said in markdown_of(folder)
    facts = read_json(folder / "compressive" / "run.json")
    facts["corpus"]["sha256"] = "0123"
    write_json(folder / "compressive" / "run.json", facts)
    without = pytest.warns(match="not probed")
    with without, pytest.raises(ValueError, match=r"compressive .* sha256 0123, but"):
        probe(folder, QUICK, CPU)
    for checkpoints in folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)
    with pytest.raises(ValueError, match=r"no run in .* has a checkpoint"):
        probe(folder, QUICK, CPU)


def test_a_single_run_is_probed_from_inside_its_folder_and_says_what_it_found(copied, monkeypatch, capsys):
    monkeypatch.chdir(copied / "compressive")
    main(["probe", ".", "--step", "16", "--positions", "10", "--longest", "32", "--tokens", "512"])
    results = read_json(copied / "compressive" / "probe.json")
    costs = results["memory_ablation"]["overall"]["less_untouched"]["compressive"]
    zeroed, swapped = (costs[f"memory {how}"]["mean"] / math.log(2) for how in ("zeroed", "swapped"))
    said = capsys.readouterr().out
    assert f"zeroing them costs {zeroed:.4f} bits per token, swapping them {swapped:.4f}" in said
    assert said.startswith(("compressive uses its slots:", "compressive is not seen to use its slots:"))
    assert set(results["attention"]) == {"compressive"}


@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("length", [100, 20])
def test_documents_are_probed_each_from_an_empty_memory(length, tmp_path):
    """Those that are too short to fill the memories, of 28 positions, are not."""
    text, path = SHORT[:4_000], tmp_path / "texts.jsonl"
    documents = [text[i : i + length] for i in range(0, len(text), length)]
    path.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    config = small_training(model="compressive", data=str(path), tokens=1_000, evaluations=1)
    folder = train_run(config, tmp_path / "run")
    results = read_json(probe(folder, QUICK, CPU))
    held_out = 400 // length
    assert results["documents"] == held_out
    assert ("too short" in write_report(folder).with_suffix(".md").read_text()) == (length == 20)
    ablation = results["memory_ablation"]
    if length == 20:
        assert results["effective_context"] is results["attention"] is ablation is None
        return
    assert results["effective_context"]["positions"] == 20
    assert set(results["attention"]) == {"run"}
    assert [ablation[name] for name in ("of_documents", "streams", "warm_up")] == [True, held_out, 32]
    for groups in ([ablation["overall"]], ablation["by_occurrences"]):
        assert sum(group["tokens"] for group in groups) == held_out * 64


def test_held_out_are_the_tokens_of_training_and_words_of_documents_end_with_them():
    """Held out are the last two; cut anywhere else, "he" and "at" would be one word that nobody has said."""
    corpus = finding("cat cat hat " * 10 + "hat he" + "at cat", (120, 6, 6))(small_training())
    tokens, lengths = held_out_tokens(corpus)
    assert (corpus.tokenizer.decode(tokens), lengths) == ("hat heat cat", (6, 6))
    found = occurrences_in(corpus, tokens, lengths)
    assert found.tolist() == [10, 10, 10, NO_WORD, 0, 0, 0, 0, NO_WORD, 20, 20, 20]
    corpus = finding("to be or not\nto be" * 10, (18,) * 10)(small_training(tokenizer="word"))
    tokens, lengths = held_out_tokens(corpus)
    assert tokens.tolist() == corpus.validation.tokens.tolist(), "each document's last line ends with a token"
    assert lengths == (8,)
    found = occurrences_in(corpus, tokens, lengths)
    assert found.tolist() == [18, 18, 9, 9, NO_WORD, 18, 18, NO_WORD], "of the tokens themselves"


@pytest.mark.parametrize(
    ("field", "message"),
    [({"step": 0}, "step=0"), ({"positions": 0}, "positions=0"), ({"tokens": 0}, "tokens=0"),
     ({"longest": 40}, "64.* 40")],
)  # fmt: skip
def test_a_config_that_measures_nothing_is_an_error(field, message):
    with pytest.raises(ValueError, match=message):
        ProbeConfig(**field)
