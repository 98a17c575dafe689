"""What a report claims, of runs that were never trained."""

import json

import pytest

from memformers.report.document import write_report
from tests.report.fake_runs import FACTS, fake_comparison, fake_run

XL = [2.40, 2.50, 2.45]


def report(folder):
    return write_report(folder).with_suffix(".md").read_text(encoding="utf-8")


def less(*differences):
    return [round(a + b, 4) for a, b in zip(XL, differences, strict=True)]


def test_a_difference_is_claimed_where_its_interval_leaves_out_zero(tmp_path):
    """Student's t of 2 degrees is 4.303: differences of deviation 0.001 give 4.303 · 0.001 / √3 = 0.0025."""
    better, worse = less(-0.020, -0.021, -0.019), less(0.020, 0.021, 0.019)
    fake_comparison(tmp_path, {"transformer": worse, "transformer-xl": XL, "compressive": better})
    markdown = report(tmp_path)
    assert "**Compressive Transformer is better by 0.0200 ± 0.0025**, or 0.8% (3 seeds)." in markdown
    assert "**Transformer, no memory is worse by 0.0200 ± 0.0025**" in markdown
    assert "compared with Transformer-XL by its bits per character" in markdown
    assert "below is its mean over 3 seeds, and ± is half the width of a 95 % interval by Student's t. " \
           "Rounding alone" in markdown  # fmt: skip
    assert "| −0.0200 ± 0.0025 |" in markdown
    assert "no difference was seen" not in markdown
    assert (tmp_path / "figures" / "differences.png").is_file()


def test_a_speed_that_falls_while_the_memory_grows_is_no_sign_of_other_programs(tmp_path):
    """Records 1 to 4 were twice as fast, with a shorter memory."""
    fake_comparison(tmp_path, {"transformer-xl": XL[:2], "compressive": XL[:2]})
    assert "are left out" not in report(tmp_path)
    path = tmp_path / "compressive" / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for lengths in ((16, 64), (64, 64)):
        for record in records:
            if "tokens_per_second" in record:
                early = record["tokens"] <= 400
                record |= {
                    "tokens_per_second": 2000.0 if early else 1000.0,
                    "memory.length": lengths[not early],
                }
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        assert ("the speed of compressive varied by a factor of 2.0" in report(tmp_path)) == (
            lengths[0] == 64
        )


def test_where_none_was_seen_the_report_says_how_large_a_difference_could_have_hidden(tmp_path):
    """Differences of deviation 0.01: 4.303 · 0.01 / √3 = 0.0248."""
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": less(-0.02, -0.03, -0.01)})
    markdown = report(tmp_path)
    assert (
        "Compressive Transformer: **no difference was seen**: −0.0200 ± 0.0248, where a value below zero is "
        "better (3 seeds). A difference of up to 0.0448 is not excluded." in markdown
    )
    assert " is better by" not in markdown


def test_one_seed_claims_nothing_and_says_how_to_get_more(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.5], "compressive": [1.5]})
    markdown = report(tmp_path)
    assert "**There is only one seed, so nothing is claimed about which arm is better.**" in markdown
    assert "`memformers compare --seeds 5 --resume`" in markdown
    assert "±" not in markdown
    assert " is better by" not in markdown
    assert not (tmp_path / "figures" / "differences.png").exists()


def test_a_folder_of_an_older_comparison_is_read_as_one_seed(tmp_path):
    for model in ("transformer", "compressive"):
        fake_run(tmp_path / model, model, 2.5)
    markdown = report(tmp_path)
    assert "only one seed, so nothing is claimed" in markdown
    assert "| Compressive Transformer | 1 | 1.7500 | 2.5000 |" in markdown


def test_without_transformer_xl_the_first_arm_is_the_baseline(tmp_path):
    fake_comparison(tmp_path, {"wide": XL, "compressive": less(-0.020, -0.021, -0.019)})
    assert "compared with wide by its bits per character" in report(tmp_path)


def test_means_are_over_seeds_with_their_intervals(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL})
    markdown = report(tmp_path)
    assert "| Transformer-XL | 3 | 1.7150 ± 0.0870 | 2.4500 ± 0.1242 | 50.0% ± 0.0% |" in markdown
    assert "Curves are means over 3 seeds, and bands are 95 % intervals by Student's t." in markdown


def test_a_failed_seed_is_named_and_the_others_are_compared(tmp_path):
    bits = {"transformer-xl": XL, "compressive": [*less(-0.020, -0.021, -0.019)[:2], None]}
    fake_comparison(tmp_path, bits, seeds=4)
    (tmp_path / "compressive-seed2").mkdir()
    (tmp_path / "compressive-seed2" / "config.json").write_text("{}")
    fake_run(tmp_path / "transformer-xl-seed3", "transformer-xl", 9.0, seed=3, finished=False)
    markdown = report(tmp_path)
    assert "> **compressive-seed2 failed before its first step** and is missing here." in markdown
    assert "> **compressive-seed3 was not started** and is missing here." in markdown
    assert "> **Transformer-XL, seed 3, did not finish**; it is not part of any mean or curve." in markdown
    assert "| Transformer-XL | 3 | 1.7150 ± 0.0870 |" in markdown
    assert "(2 seeds)" in markdown


def test_differences_are_of_the_same_seed_even_where_another_is_missing(tmp_path):
    bits = {"transformer-xl": XL, "compressive": [None, *less(0, -0.021, -0.019)[1:]]}
    fake_comparison(tmp_path, bits)
    assert "| −0.0200 ± 0.0127 |" in report(tmp_path)  # 12.706 · 0.0014142 / √2


def test_a_baseline_that_never_finished_is_said_to_be(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [None], "compressive": [2.4]})
    fake_run(tmp_path / "transformer-xl", "transformer-xl", 2.4, finished=False)
    (tmp_path / "transformer-xl" / "metrics.jsonl").write_text("")
    assert "No run of Transformer-XL has finished, so nothing is compared with it." in report(tmp_path)


def with_speed(folder, speeds, seconds):
    """The run in ``folder``, made as fast."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = (r for r in records if "tokens_per_second" in r)
    for record, speed in zip(measured, speeds, strict=True):
        record["tokens_per_second"] = speed
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {"seconds": seconds}))


def test_a_ratio_of_time_has_its_spread_over_seeds(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": XL})
    for name, seconds in (("compressive", 13.0), ("compressive-seed1", 13.0), ("compressive-seed2", 13.3)):
        with_speed(tmp_path / name, [500.0] + [1000.0] * 9, seconds)  # the first record is of the warm-up
    markdown = report(tmp_path)
    assert "training time divided by that of Transformer-XL" in markdown
    assert "| 1.31 ± 0.04 |" in markdown  # 4.303 · 0.017321 / √3
    assert "Ratios of training time are left out" not in markdown


@pytest.mark.parametrize(
    ("seeds", "disturbed", "facts", "why"),
    [
        (2, True, FACTS, "the speed of compressive varied by a factor of 1.6"),
        (1, False, FACTS, "they need several seeds"),
        (2, False, FACTS | {"environment": FACTS["environment"] | {"cores": 3}}, "not all runs had the same "
         "machine"),
    ],
)  # fmt: skip
def test_there_is_no_ratio_of_time_where_it_would_mislead(seeds, disturbed, facts, why, tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL[:seeds], "compressive": XL[:seeds]})
    (tmp_path / "compressive" / "run.json").write_text(json.dumps(facts))
    if disturbed:
        with_speed(tmp_path / "compressive", [1000.0] * 9 + [1600.0], 13.0)
    markdown = report(tmp_path)
    curves = "" if seeds == 1 else " and curves against time"
    assert f"Ratios of training time{curves} are left out: {why}" in markdown
    assert "divided by that of" not in markdown
    assert (tmp_path / "figures" / "validation_time.png").exists() == (seeds == 1)


def test_short_runs_have_no_ratio_of_time(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": XL})
    path = tmp_path / "compressive" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))  # 3 records of speed
    assert "are left out: compressive is too short to tell whether other programs" in report(tmp_path)


def test_many_arms_are_said_to_differ_by_chance(tmp_path):
    arms = {"transformer-xl": XL} | {name: less(0.01, -0.01, 0.0) for name in ("a", "b")}
    fake_comparison(tmp_path / "few", arms)
    assert "of twenty arms that are all alike" not in report(tmp_path / "few")
    fake_comparison(tmp_path / "many", arms | {"c": XL})
    assert "of twenty arms that are all alike, about one will seem to differ" in report(tmp_path / "many")


def test_costs_say_keys_and_operations(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.4], "compressive": [2.4]})
    facts = FACTS | {"keys": 128, "attention_operations": 1_234_567}
    (tmp_path / "compressive" / "run.json").write_text(json.dumps(facts))
    assert "| Compressive Transformer | 128 | 64 / 256 | 1,234,567 | 12,345 |" in report(tmp_path)


def test_arms_that_differ_in_more_than_their_memory_are_called_out_by_setting(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.4], "slow": [None]})
    fake_run(tmp_path / "slow", "transformer-xl", 2.4, learning_rate=1e-4)
    assert "**These runs differ in more than their memory**: learning_rate; see" in report(tmp_path)


@pytest.mark.parametrize("name", ["$x$", "_hidden", "a_b"])
def test_any_name_of_a_folder_can_be_drawn(name, tmp_path):
    fake_run(tmp_path / name, "transformer-xl", 2.4)
    fake_run(tmp_path / "other", "transformer-xl", 2.4)
    assert "Transformer-XL" not in report(tmp_path).partition("## Samples")[0]  # names tell them apart
    assert (tmp_path / "figures" / "validation_tokens.png").stat().st_size > 10_000
