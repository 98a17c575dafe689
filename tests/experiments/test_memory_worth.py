"""What memory is worth on a long text, at a size of moments."""

import json
from dataclasses import replace

import pytest

from experiments.memory_worth import __main__ as program
from experiments.memory_worth import report
from experiments.memory_worth.__main__ import MemoryWorth
from experiments.memory_worth.arms import ALL, Kind, rivals_of
from experiments.memory_worth.report import write_report
from experiments.memory_worth.word_distances import word_distances, word_groups, word_lengths
from memformers.common.errors import UserError
from memformers.data.subwords import learn_bpe
from memformers.data.tokenizers import ByteTokenizer
from memformers.evaluation.frequency_buckets import NEVER, NO_WORD
from tests.builders import small_training

ARMS = (
    "none",
    "xl-64: mem_len=8 model=transformer-xl",
    "slots-32-32: model=compressive mem_len=4 c_mem_len=4 compression_rate=2",
)


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


def test_every_budget_is_trained_and_measured_and_differences_are_paired(tmp_path, text, monkeypatch):
    out = tmp_path / "a"
    settings = MemoryWorth(
        data=str(text),
        arms=ARMS,
        out=out,
        budgets=(64, 128),
        seeds=2,
        vocab_size=260,
        documents=2,
        dashboard="off",
    )
    settings.run()
    found = json.loads((out / "results.json").read_text())
    assert list(found) == ["64", "128"]
    assert list(found["64"]) == [arm.partition(":")[0] for arm in ARMS]
    slots = found["128"]["slots-32-32"]["1"]["by_distance"]
    assert slots["all"]["tokens"] == 2 * 64 == sum(slots[name]["tokens"] for name in slots if name != "all")
    weighted = sum(slots[name]["tokens"] * slots[name]["untouched"] for name in slots if name != "all")
    assert weighted / (2 * 64) == pytest.approx(slots["all"]["untouched"])
    changed = {
        f"{part} {how}" for part in ("slots", "memory") for how in ("zeroed", "swapped", "twice as long")
    }
    assert set(slots["first"]) == {"tokens", "untouched", *changed - {"slots twice as long"}}
    positions, none = (found["128"][arm]["1"]["by_distance"]["all"] for arm in ("xl-64", "none"))
    assert positions["memory twice as long"] != positions["untouched"]
    assert "memory twice as long" not in none
    assert (out / "figures/gains.svg").is_file()
    page = (out / "report.md").read_text()
    assert "32 positions, 32 slots, minus 64 positions" in page
    assert "32 positions, 32 slots: slots swapped" in page
    assert "| 64 positions: memory twice as long |" in page
    (out / "report.md").unlink()
    write_report(out)
    assert (out / "report.md").read_text() == page
    variants = {"slots-32-32": Kind("", "f_c begins as the mean", "xl-64")}
    monkeypatch.setitem(ALL, "slots-32-32", variants["slots-32-32"])
    monkeypatch.setattr(report, "VARIANTS", variants)
    write_report(out)
    _, changed = (out / "report.md").read_text().split("## With one setting changed")
    assert "f_c begins as the mean, minus 64 positions |" in changed
    assert "slots swapped |" not in changed, "of a variant only the difference is shown"


def test_arms_are_compared_with_their_rivals_and_those_of_their_rivals():
    assert [*rivals_of("most-positions-upper")] == ["xl-upper", "xl-256"]
    assert [*rivals_of("none")] == [*rivals_of("one of your own")] == []


def test_without_an_arm_that_has_no_memory_the_report_has_only_differences_at_equal_keys(tmp_path, text):
    how = {"budgets": (64,), "seeds": 1, "seed": 7, "vocab_size": 260, "documents": 2, "dashboard": "off"}
    MemoryWorth(data=str(text), arms=ARMS[1:], out=tmp_path / "a", **how).run()
    page = (tmp_path / "a/report.md").read_text()
    assert "The gain" not in page
    assert "\n\n\n" not in page
    assert page.count("32 positions, 32 slots, minus 64 positions") == 4, "one table of bits, three of groups"
    found = json.loads((tmp_path / "a/results.json").read_text())
    assert [*found["64"]["xl-64"]] == ["7"], "the first seed is the one that was asked for"


def test_the_report_of_no_memory_alone_has_its_losses_and_no_empty_section(tmp_path, text):
    how = {"budgets": (64,), "seeds": 1, "vocab_size": 260, "documents": 2, "dashboard": "off"}
    MemoryWorth(data=str(text), arms=ARMS[:1], out=tmp_path / "a", **how).run()
    page = (tmp_path / "a/report.md").read_text()
    titles = [line for line in page.splitlines() if line.startswith("##")]
    assert [title.split()[1] for title in titles] == ["The", "Where", "What", "How"]
    assert "\n\n\n" not in page
    assert "![" not in page


def test_only_its_own_arms_can_be_named():
    with pytest.raises(UserError, match="xl-full-length, or NAME: settings; got 'other'"):
        MemoryWorth(arms=("none", "other"))


def test_all_tokens_of_a_word_have_the_distance_to_where_it_last_began():
    found = word_distances(ByteTokenizer().encode("né_2, ab: né_2 ab"), ByteTokenizer())
    assert found.tolist() == [NEVER] * 5 + [NO_WORD] * 2 + [NEVER] * 2 + [NO_WORD] * 2 + [11] * 5 + [
        -1,
        10,
        10,
    ]
    groups, names = word_groups(found, [1, 11])
    assert [names[i] for i in groups[[0, 5, 11, -1]].tolist()] == ["first", "no word", "11 or more", "1 – 10"]


def test_a_subword_belongs_to_the_word_that_has_its_last_character():
    tokenizer = learn_bpe(["one two one two one two"] * 9)
    tokens = tokenizer.encode("one two (one")
    assert [tokenizer.decode(token[None]) for token in tokens] == ["one", " two", " ", "(", "one"]
    assert word_distances(tokens, tokenizer).tolist() == [NEVER, NEVER, NO_WORD, NO_WORD, 4]
    assert word_lengths(tokens, tokenizer).tolist() == [1, 1, 0, 0, 1]
    assert word_lengths(tokenizer.encode("(onex"), tokenizer).tolist() == [0, 2, 2]
