"""What memory saves on a long text, at a size that takes seconds."""

import csv
from dataclasses import replace

import pytest

from experiments import memory_worth as program
from experiments.memory_worth import KINDS, NEVER, NO_WORD, VARIANTS, MemoryWorth, word_distances, word_groups
from memformers.common.files import read_json
from memformers.data.tokenizer import ByteTokenizer
from memformers.data.tokenizers import learn_bpe
from tests.builders import small_training

ARMS = ("none", "slots: model=compressive mem_len=4 c_mem_len=4 compression_rate=2")


@pytest.fixture
def text(tmp_path, monkeypatch, quick_runs):
    base = small_training(tokenizer="bpe", evaluations=1)
    monkeypatch.setattr(program, "BASE", replace(base, model=replace(base.model, model="compressive")))
    monkeypatch.setattr(program, "READ", 64)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(30):
        words = " ".join(f"name_{i * number % 17}" for i in range(60))
        (folder / f"{number:02}.py").write_text(words)
    return folder


def measured(out, text, **changes):
    """An experiment of moments in ``out``: its page, and its values by measure, arm and seed."""
    usual = {"arms": ARMS, "budgets": (64,), "seeds": 1, "vocab_size": 260, "documents": 2}
    command = MemoryWorth(data=str(text), out=out, dashboard="off", **(usual | changes))
    command.run()
    with (out / "results.csv").open() as file:
        lines = list(csv.DictReader(file))
    rows = {(row["measure"], row["arm"], row["seed"]): float(row["value"]) for row in lines}
    return command, (out / "report.md").read_text(), rows


def test_runs_are_measured_and_differences_are_paired(tmp_path, text):
    out = tmp_path / "a"
    command, page, rows = measured(out, text, budgets=(128,), seeds=2)
    slots = read_json(out / "128/slots-seed1/by_distance.json")["by_distance"]
    whole = slots.pop("all")
    assert whole["tokens"] == 2 * 64 == sum(group["tokens"] for group in slots.values())
    weighted = sum(group["tokens"] * group["untouched"] for group in slots.values())
    assert weighted / (2 * 64) == pytest.approx(whole["untouched"])
    changed = {f"{part} {how}" for part in ("slots", "memory") for how in ("zeroed", "swapped")}
    assert set(slots["first"]) == {"tokens", "untouched", *changed}
    assert rows["all", "slots", "1"] == whole["untouched"]
    for control in ("slots swapped", "memory swapped"):
        rise = slots["first"][control] - slots["first"]["untouched"]
        assert rows[f"first, {control}", "slots", "1"] == rise
        assert (f"first, {control}", "none", "1") not in rows
    bits = "bits per byte, 128 tokens"
    gains = [rows[bits, "slots", seed] - rows[bits, "none", seed] for seed in "01"]
    report = read_json(out / "results.json")
    (row,) = (r for r in report["results"] if (r["arm"], r.get("minus")) == ("slots", "none"))
    assert report["made"]["name"] == "128"
    assert report["arms"]["no memory"]["state per stream"] == 0 < report["arms"]["slots"]["state per stream"]
    assert row[bits]["mean"] == pytest.approx(sum(gains) / 2)
    assert (out / "figures/memory-worth.svg").is_file()
    (out / "report.md").unlink()
    command.report(out)
    assert (out / "report.md").read_text() == page


def test_every_budget_is_trained_from_the_chosen_seed(tmp_path, text):
    _, page, rows = measured(tmp_path / "a", text, arms=ARMS[1:], budgets=(64, 128), seed=7)
    assert "minus" not in page
    assert "\n\n\n" not in page
    assert {seed for _, _, seed in rows} == {"7"}
    assert {m for m, _, _ in rows} >= {f"bits per byte, {n} tokens" for n in (64, 128)}


def test_arms_have_rivals_with_as_many_keys():
    def keys(arm):
        sizes = arm.arm(program.BASE).config.model.memory_sizes
        return sum(size.keys for size in sizes) / len(sizes)

    rivals = MemoryWorth().rivals_of
    assert [*rivals("most-positions-upper")] == ["xl-upper", "xl-256", "none"]
    assert [*rivals("none")] == []
    arms = {name: arm for name, arm in {**KINDS, **VARIANTS}.items() if name != "xl-832"}
    assert {keys(arm) for arm in (*VARIANTS.values(), KINDS["xl-256"])} == {256}
    for name, arm in arms.items():
        if arm.rival:
            assert keys(arm) == keys(arms[arm.rival]), name


def test_all_tokens_of_a_word_have_its_distance():
    distances = word_distances(ByteTokenizer().encode("né_2, ab: né_2 ab"), ByteTokenizer())
    expected = 5 * [NEVER] + 2 * [NO_WORD] + 2 * [NEVER] + 2 * [NO_WORD] + 5 * [11] + [NO_WORD, 10, 10]
    assert distances.tolist() == expected
    groups, names = word_groups(distances, [1, 11])
    assert [names[i] for i in groups[[0, 5, 11, -1]].tolist()] == ["first", "no word", "11 or more", "1 – 10"]


def test_a_subword_belongs_to_the_word_of_its_last_character():
    tokenizer = learn_bpe(["one two one two one two"] * 9)
    tokens = tokenizer.encode("one two (one")
    assert [tokenizer.decode(token[None]) for token in tokens] == ["one", " two", " ", "(", "one"]
    assert word_distances(tokens, tokenizer).tolist() == [NEVER, NEVER, NO_WORD, NO_WORD, 4]
