"""What a report claims, of runs that were never trained."""

import json
from types import SimpleNamespace

import pytest

from memformers.report.arms import arms_of
from memformers.report.recall import beyond_base
from memformers.report.sections import stages_of
from memformers.runs.reader import read_runs
from tests.report.fake_runs import FACTS, XL, changed, fake_comparison, fake_run, less, markdown_of

BETTER = less(-0.020, -0.021, -0.019)


@pytest.mark.parametrize(
    ("bits", "said"),
    [
        # Student's t of 2 degrees is 4.303; of deviations of 0.001 that is 4.303 · 0.001 / √3 = 0.0025
        ({"transformer": less(0.020, 0.021, 0.019), "transformer-xl": XL, "compressive": BETTER},
         ["**Compressive Transformer is better by 0.020 ± 0.002**, or 0.8% (3 seeds).",
          "**No memory is worse by 0.020 ± 0.002**", "mean over 3 seeds", "means over 3 seeds",
          "compared with Transformer-XL by its bits per character", "| −0.020 ± 0.002 |",
          "| Transformer-XL | 3 | 2.450 ± 0.124 | – |",
          "| Transformer-XL | 1.715 ± 0.087 | 1.225 ± 0.062 | 99.0 ± 0.0 |"]),
        # the differences are of the same seed: 12.706 · 0.0014142 / √2
        ({"transformer-xl": XL, "compressive": [None, *less(0, -0.021, -0.019)[1:]]}, ["| −0.020 ± 0.013 |"]),
        # without Transformer-XL the first arm is the baseline
        ({"wide": XL, "compressive": BETTER}, ["compared with wide by its bits per character"]),
        ({"transformer-xl": XL, "a": BETTER, "b": [2.4, None, None]},
         ["- b has fewer than two seeds in common with Transformer-XL"]),
    ],
)  # fmt: skip
def test_a_difference_is_claimed_where_its_interval_leaves_out_zero(bits, said, tmp_path):
    fake_comparison(tmp_path, bits)
    markdown = markdown_of(tmp_path)
    assert [words for words in said if words not in markdown] == []
    assert "no difference was seen" not in markdown
    assert "*−0.0" not in markdown
    assert (tmp_path / "figures" / "differences.svg").is_file()


@pytest.mark.parametrize("others", [2, 3])
def test_where_none_was_seen_the_report_says_how_large_a_difference_could_have_hidden(others, tmp_path):
    """Differences of deviation 0.01: 4.303 · 0.01 / √3 = 0.0248."""
    arms = dict.fromkeys(["compressive", "a", "b"][:others], less(-0.02, -0.03, -0.01))
    fake_comparison(tmp_path, {"transformer-xl": XL} | arms)
    markdown = markdown_of(tmp_path)
    said, *_ = [line for line in markdown.splitlines() if "no difference was seen" in line]
    numbers = ("- Compressive Transformer", "−0.020 ± 0.025", "below zero", "3 seeds", "up to 0.045")
    assert all(number in said for number in numbers)
    assert " is better by" not in markdown
    assert "| *−0.020 ± 0.025* |" in markdown, "a page shows it in grey"
    assert ("of twenty models" in markdown) == (others == 3), "many arms differ by chance"


@pytest.mark.parametrize("compared", [True, False])
def test_one_seed_claims_nothing_and_says_how_to_get_more(compared, tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.5], "compressive": [1.5]})
    changed(tmp_path / "experiment.json", commands=["memformers compare --seeds 1 --scale 0.1 --out=old"])
    if not compared:  # runs that were trained one by one
        (tmp_path / "experiment.json").unlink()
    markdown = markdown_of(tmp_path)
    assert "only one seed, so nothing is claimed" in markdown
    assert ("memformers compare --scale 0.1 --seeds 5 --resume --out" in markdown) == compared
    assert "are 1.000 bits per character apart" in markdown
    assert "| Compressive Transformer | 1 | 1.500 |" in markdown
    assert not [words for words in ("±", " is better by", "The lower panel has") if words in markdown]
    assert not (tmp_path / "figures" / "differences.svg").exists()


def test_a_failed_seed_is_named_and_the_others_are_compared(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": [*BETTER[:2], None]}, seeds=4)
    (tmp_path / "compressive-seed2").mkdir()
    (tmp_path / "compressive-seed2" / "config.json").write_text("{}")
    fake_run(tmp_path / "transformer-xl-seed3", "transformer-xl", 9.0, seed=3, finished=False)
    said = (
        "> **compressive-seed2**: no step was made", "> **compressive-seed3**: not started", "(2 seeds)",
        "> **Transformer-XL, seed 3, did not finish**", "| Transformer-XL | 3 | 2.450 ± 0.124 |",
    )  # fmt: skip
    markdown = markdown_of(tmp_path)
    assert [words for words in said if words not in markdown] == []
    for result in tmp_path.glob("transformer-xl*/result.json"):
        result.unlink()
    assert "No run of Transformer-XL has finished" in markdown_of(tmp_path)


def with_speeds(folder, speeds, **changes):
    """The run in ``folder``, made as fast in each of its records, with ``changes`` to the first four."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    of_speed = [record for record in records if "tokens_per_second" in record]
    for number, (record, speed) in enumerate(zip(of_speed, speeds, strict=True)):
        record |= {"tokens_per_second": speed, "memory.length": 64} | (changes if number < 4 else {})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_ratio_of_time_has_its_spread_over_seeds(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": XL})
    for name, seconds in (("compressive", 13.0), ("compressive-seed1", 13.0), ("compressive-seed2", 13.3)):
        with_speeds(tmp_path / name, [500.0] + [1000.0] * 9)  # the first record is of the warm-up
        changed(tmp_path / name / "result.json", seconds=seconds)
    markdown = markdown_of(tmp_path)
    assert "training time divided by that of Transformer-XL" in markdown
    assert "| 1.31 ± 0.04 |" in markdown  # 4.303 · 0.017321 / √3
    assert "are left out" not in markdown


@pytest.mark.parametrize(
    ("seeds", "speeds", "records", "facts", "why"),
    [(2, [1000.0] * 9 + [1600.0], 20, {}, "the speed of compressive varied by a factor of 1.6"),
     (1, None, 20, {}, "they need several seeds"),
     (2, None, 6, {}, "compressive is too short"),  # 3 records of speed
     (2, None, 20, {"environment": FACTS["environment"] | {"cores": 3}}, "not all runs had the same")],
)  # fmt: skip
def test_there_is_no_ratio_of_time_where_it_would_mislead(seeds, speeds, records, facts, why, tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL[:seeds], "compressive": XL[:seeds]})
    changed(tmp_path / "compressive" / "run.json", **facts)
    if speeds:
        with_speeds(tmp_path / "compressive", speeds)
    path = tmp_path / "compressive" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:records]))
    markdown = markdown_of(tmp_path)
    curves = "" if seeds == 1 else " and curves against time"
    assert f"Ratios of training time{curves} are left out: {why}" in markdown
    assert "divided by that of" not in markdown
    assert (tmp_path / "figures" / "validation_time.svg").exists() == (seeds == 1)


@pytest.mark.parametrize(("length", "left_out"), [(16, False), (64, True)])
def test_a_speed_that_falls_while_the_memory_grows_is_no_sign_of_other_programs(length, left_out, tmp_path):
    """Records 1 to 4 were twice as fast, with a shorter memory or not."""
    fake_comparison(tmp_path, {"transformer-xl": XL[:2], "compressive": XL[:2]})
    with_speeds(tmp_path / "compressive", [2000.0] * 4 + [1000.0] * 6, **{"memory.length": length})
    assert ("compressive varied by a factor of 2.0" in markdown_of(tmp_path)) == left_out
    assert stages_of(arms_of(read_runs(tmp_path))) == ([] if left_out else [450.0])


def test_costs_say_keys_operations_and_sizes_and_what_else_differs_is_called_out(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.4], "slow": [None]}, keys={"transformer-xl": 64})
    fake_run(tmp_path / "slow", "transformer-xl", 2.4, learning_rate=1e-4, facts=FACTS | {"keys": 128})
    changed(tmp_path / "slow" / "run.json", parameters=12345 + 1234)
    markdown = markdown_of(tmp_path)
    row = "| slow | 128 | 64 / 256 | 32 KiB | 1,234,567 | 13,579 | 1,006 | 10 s | 12 s | 300 MiB |"
    assert row in markdown
    assert "**These runs differ in more than their memory**: optim.learning_rate; see" in markdown
    assert "slow has 1,234 more parameters than Transformer-XL (10.0%)" in markdown


def test_a_claim_about_recall_names_the_distances_of_the_whole_bins_that_it_counts():
    recall = {"edges": [0, 256, 512, 2048, 2304], "asks": [1] * 4, "accuracy": [0.1, 0.2, 0.3, 0.4]}
    base, slots = (
        SimpleNamespace(
            name=name, first=SimpleNamespace(facts={"sees_back": reach}), results={0: {"recall": recall}}
        )
        for name, reach in {"transformer-xl": 320, "compressive": 2112}.items()
    )
    [(far, measure)] = beyond_base([base, slots], base).items()
    assert far == "set 512 to 2,048 positions ago"
    assert measure.of({"recall": recall}) == 0.3
    assert beyond_base([base], base) == {}
