"""What memory saves on a long text, at a size that takes seconds."""

import csv
from dataclasses import replace

import pytest

from experiments import memory_worth as program
from experiments.memory_worth import KINDS, ONE_CHANGE, MemoryWorth
from experiments.word_distances import NEVER, NO_WORD, group_distances, word_distances
from memformers.common.files import read_json
from memformers.data.tokenizer import ByteTokenizer
from memformers.data.tokenizers import learn_bpe
from tests.builders import small_training

ARMS = ("none", "slots: model=compressive mem_len=4 c_mem_len=4 compression_rate=2")


@pytest.fixture
def text(tmp_path, monkeypatch, quick_runs):
    """A folder of 30 documents of words."""
    base = small_training(tokenizer="bpe", evaluations=1)
    monkeypatch.setattr(program, "BASE", replace(base, model=replace(base.model, model="compressive")))
    monkeypatch.setattr(program, "N_READ", 64)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        words = " ".join(f"name_{i * number % 17}" for i in range(60))
        (folder / f"{number:02}.py").write_text(words)
    return folder


def run_experiment(out, text, **changes):
    """An experiment of moments in ``out``: its command, and its values by measure, arm and seed."""
    settings = {"arms": ARMS, "budgets": (64,), "seeds": 1, "vocab_size": 260, "documents": 2} | changes
    command = MemoryWorth(data=str(text), out=out, dashboard="off", **settings)
    command.run()
    values = {}
    with (out / "results.csv").open() as file:
        for row in csv.DictReader(file):
            values[row["measure"], row["arm"], row["seed"]] = float(row["value"])
    return command, values


def test_runs_are_measured_and_differences_are_paired(tmp_path, text):
    out = tmp_path / "a"
    command, values = run_experiment(out, text, budgets=(128,), seeds=2)
    check_groups(read_json(out / "128/slots-seed1/by_distance.json")["by_distance"], values)
    check_difference(read_json(out / "results.json"), values)
    assert (out / "figures/memory-worth.svg").is_file()
    page = (out / "report.md").read_text()
    (out / "report.md").unlink()
    command.write_report(out)
    assert (out / "report.md").read_text() == page


def check_groups(groups, values):
    """Groups of one run with slots: together they are all tokens, and controls count from as trained."""
    all_tokens = groups.pop("all")
    assert all_tokens["tokens"] == 2 * 64 == sum(group["tokens"] for group in groups.values())
    total = sum(group["tokens"] * group["untouched"] for group in groups.values())
    assert total / (2 * 64) == pytest.approx(all_tokens["untouched"])
    assert values["all", "slots", "1"] == all_tokens["untouched"]
    controls = {"slots zeroed", "slots swapped", "memory zeroed", "memory swapped"}
    first = groups["first"]
    assert set(first) == {"tokens", "untouched", *controls}
    for control in ("slots swapped", "memory swapped"):
        assert values[f"first, {control}", "slots", "1"] == first[control] - first["untouched"]
        assert (f"first, {control}", "none", "1") not in values


def check_difference(report, values):
    measure = "bits per byte, 128 tokens"
    differences = [values[measure, "slots", seed] - values[measure, "none", seed] for seed in "01"]
    [row] = [row for row in report["results"] if (row["arm"], row.get("minus")) == ("slots", "none")]
    assert row[measure]["mean"] == pytest.approx(sum(differences) / 2)
    assert report["made"]["name"] == "128"
    assert report["arms"]["no memory"]["state per stream"] == 0 < report["arms"]["slots"]["state per stream"]


def test_every_budget_is_trained_from_the_chosen_seed(tmp_path, text):
    out = tmp_path / "a"
    _, values = run_experiment(out, text, arms=ARMS[1:], budgets=(64, 128), seed=7)
    page = (out / "report.md").read_text()
    assert "minus" not in page
    assert "\n\n\n" not in page
    assert {seed for _, _, seed in values} == {"7"}
    assert {measure for measure, _, _ in values} >= {
        "bits per byte, 64 tokens",
        "bits per byte, 128 tokens",
    }


def mean_keys(variant):
    """The keys of a layer, on average."""
    sizes = variant.arm(program.BASE).config.model.memory_sizes
    return sum(size.keys for size in sizes) / len(sizes)


def test_arms_have_rivals_with_the_same_number_of_keys():
    variants = {**KINDS, **ONE_CHANGE}
    more_keys = "xl-832"  # it keeps exactly what 192 slots cover
    for name, variant in variants.items():
        if variant.rival and name != more_keys:
            assert mean_keys(variant) == mean_keys(variants[variant.rival]), name
    for variant in (*ONE_CHANGE.values(), KINDS["xl-256"]):
        assert mean_keys(variant) == 256


def test_rivals_lead_to_no_memory():
    rivals_of = MemoryWorth().rivals_of
    assert [*rivals_of("most-positions-upper")] == ["xl-upper", "xl-256", "none"]
    assert [*rivals_of("none")] == []


def test_all_tokens_of_a_word_have_its_distance():
    distances = word_distances(ByteTokenizer().encode("né_2, ab: né_2 ab"), ByteTokenizer())
    expected = 5 * [NEVER] + 2 * [NO_WORD] + 2 * [NEVER] + 2 * [NO_WORD] + 5 * [11] + [NO_WORD, 10, 10]
    assert distances.tolist() == expected
    groups, names = group_distances(distances, [1, 11])
    first_of_each = groups[[0, 5, 11, -1]].tolist()
    assert [names[group] for group in first_of_each] == ["first", "no word", "11 or more", "1 – 10"]


def test_a_subword_belongs_to_the_word_of_its_last_character():
    tokenizer = learn_bpe(["one two one two one two"] * 9)
    tokens = tokenizer.encode("one two (one")
    assert [tokenizer.decode(token[None]) for token in tokens] == ["one", " two", " ", "(", "one"]
    assert word_distances(tokens, tokenizer).tolist() == [NEVER, NEVER, NO_WORD, NO_WORD, 4]
