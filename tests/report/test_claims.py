"""What a report claims, of runs that were never trained."""

import json

import pytest

from tests.report.fake_runs import FACTS, changed, fake_comparison, fake_run, markdown_of

XL = [2.40, 2.50, 2.45]


def less(*differences):
    return [round(a + b, 4) for a, b in zip(XL, differences, strict=True)]


def test_a_difference_is_claimed_where_its_interval_leaves_out_zero(tmp_path):
    """Student's t of 2 degrees is 4.303: differences of deviation 0.001 give 4.303 · 0.001 / √3 = 0.0025."""
    better, worse = less(-0.020, -0.021, -0.019), less(0.020, 0.021, 0.019)
    fake_comparison(tmp_path, {"transformer": worse, "transformer-xl": XL, "compressive": better})
    markdown = markdown_of(tmp_path)
    assert "**Compressive Transformer is better by 0.0200 ± 0.0025**, or 0.8% (3 seeds)." in markdown
    assert "**Transformer, no memory is worse by 0.0200 ± 0.0025**" in markdown
    assert "compared with Transformer-XL by its bits per character" in markdown
    assert "mean over 3 seeds" in markdown
    assert "| −0.0200 ± 0.0025 |" in markdown
    assert "no difference was seen" not in markdown
    assert (tmp_path / "figures" / "differences.png").is_file()


def test_where_none_was_seen_the_report_says_how_large_a_difference_could_have_hidden(tmp_path):
    """Differences of deviation 0.01: 4.303 · 0.01 / √3 = 0.0248."""
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": less(-0.02, -0.03, -0.01)})
    markdown = markdown_of(tmp_path)
    (said,) = [line for line in markdown.splitlines() if "no difference was seen" in line]
    assert said.startswith("- Compressive Transformer")
    assert all(number in said for number in ("−0.0200 ± 0.0248", "below zero", "3 seeds", "up to 0.0448"))
    assert " is better by" not in markdown


@pytest.mark.parametrize("compared", [True, False])
def test_one_seed_claims_nothing_and_says_how_to_get_more(compared, tmp_path):
    bits = {"transformer-xl": [2.5], "compressive": [1.5]}
    fake_comparison(tmp_path, bits)
    if not compared:  # runs that were trained one by one
        (tmp_path / "experiment.json").unlink()
    markdown = markdown_of(tmp_path)
    assert "only one seed, so nothing is claimed" in markdown
    assert "`--seeds 5 --resume`" in markdown
    assert "| Compressive Transformer | 1 | 1.0500 | 1.5000 |" in markdown
    assert "±" not in markdown
    assert " is better by" not in markdown
    assert not (tmp_path / "figures" / "differences.png").exists()


def test_without_transformer_xl_the_first_arm_is_the_baseline(tmp_path):
    fake_comparison(tmp_path, {"wide": XL, "compressive": less(-0.020, -0.021, -0.019)})
    assert "compared with wide by its bits per character" in markdown_of(tmp_path)


def test_means_are_over_seeds_with_their_intervals(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL})
    markdown = markdown_of(tmp_path)
    assert "| Transformer-XL | 3 | 1.7150 ± 0.0870 | 2.4500 ± 0.1242 | 50.0% ± 0.0% |" in markdown
    assert "means over 3 seeds" in markdown


def test_a_failed_seed_is_named_and_the_others_are_compared(tmp_path):
    bits = {"transformer-xl": XL, "compressive": [*less(-0.020, -0.021, -0.019)[:2], None]}
    fake_comparison(tmp_path, bits, seeds=4)
    (tmp_path / "compressive-seed2").mkdir()
    (tmp_path / "compressive-seed2" / "config.json").write_text("{}")
    fake_run(tmp_path / "transformer-xl-seed3", "transformer-xl", 9.0, seed=3, finished=False)
    markdown = markdown_of(tmp_path)
    assert "> **compressive-seed2 failed before its first step**" in markdown
    assert "> **compressive-seed3 was not started**" in markdown
    assert "> **Transformer-XL, seed 3, did not finish**" in markdown
    assert "| Transformer-XL | 3 | 1.7150 ± 0.0870 |" in markdown
    assert "(2 seeds)" in markdown


def test_differences_are_of_the_same_seed_even_where_another_is_missing(tmp_path):
    bits = {"transformer-xl": XL, "compressive": [None, *less(0, -0.021, -0.019)[1:]]}
    fake_comparison(tmp_path, bits)
    assert "| −0.0200 ± 0.0127 |" in markdown_of(tmp_path)  # 12.706 · 0.0014142 / √2


def test_an_arm_without_two_seeds_of_the_baseline_is_not_compared(tmp_path):
    fake_comparison(
        tmp_path, {"transformer-xl": XL, "a": less(-0.02, -0.021, -0.019), "b": [2.4, None, None]}
    )
    assert "- b has fewer than two seeds in common with Transformer-XL" in markdown_of(tmp_path)


def test_a_baseline_that_never_finished_is_said_to_be(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [None], "compressive": [2.4]})
    fake_run(tmp_path / "transformer-xl", "transformer-xl", 2.4, finished=False)
    (tmp_path / "transformer-xl" / "metrics.jsonl").write_text("")
    assert "No run of Transformer-XL has finished" in markdown_of(tmp_path)


def test_many_arms_are_said_to_differ_by_chance(tmp_path):
    arms = {"transformer-xl": XL} | {name: less(0.01, -0.01, 0.0) for name in ("a", "b")}
    fake_comparison(tmp_path / "few", arms)
    assert "of twenty arms" not in markdown_of(tmp_path / "few")
    fake_comparison(tmp_path / "many", arms | {"c": XL})
    assert "of twenty arms" in markdown_of(tmp_path / "many")


def with_records(folder, change):
    """The run in ``folder`` with its records of speed changed by ``change(number, record)``."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for number, record in enumerate(r for r in records if "tokens_per_second" in r):
        record |= change(number, record)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def speeds(folder, of_records):
    """The run in ``folder``, made as fast in each of its records."""
    with_records(folder, lambda number, _: {"tokens_per_second": of_records[number]})


def test_a_ratio_of_time_has_its_spread_over_seeds(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": XL})
    for name, seconds in (("compressive", 13.0), ("compressive-seed1", 13.0), ("compressive-seed2", 13.3)):
        speeds(tmp_path / name, [500.0] + [1000.0] * 9)  # the first record is of the warm-up
        changed(tmp_path / name / "result.json", seconds=seconds)
    markdown = markdown_of(tmp_path)
    assert "training time divided by that of Transformer-XL" in markdown
    assert "| 1.31 ± 0.04 |" in markdown  # 4.303 · 0.017321 / √3
    assert "are left out" not in markdown


@pytest.mark.parametrize(
    ("seeds", "disturbed", "facts", "why"),
    [
        (2, True, {}, "the speed of compressive varied by a factor of 1.6"),
        (1, False, {}, "they need several seeds"),
        (2, False, {"environment": FACTS["environment"] | {"cores": 3}}, "not all runs had the same machine"),
    ],
)
def test_there_is_no_ratio_of_time_where_it_would_mislead(seeds, disturbed, facts, why, tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL[:seeds], "compressive": XL[:seeds]})
    changed(tmp_path / "compressive" / "run.json", **facts)
    if disturbed:
        speeds(tmp_path / "compressive", [1000.0] * 9 + [1600.0])
    markdown = markdown_of(tmp_path)
    curves = "" if seeds == 1 else " and curves against time"
    assert f"Ratios of training time{curves} are left out: {why}" in markdown
    assert "divided by that of" not in markdown
    assert (tmp_path / "figures" / "validation_time.png").exists() == (seeds == 1)


def test_short_runs_have_no_ratio_of_time(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": XL})
    path = tmp_path / "compressive" / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:6]))  # 3 records of speed
    assert "are left out: compressive is too short" in markdown_of(tmp_path)


@pytest.mark.parametrize(("early_length", "left_out"), [(16, False), (64, True)])
def test_a_speed_that_falls_while_the_memory_grows_is_no_sign_of_other_programs(
    early_length, left_out, tmp_path
):
    """Records 1 to 4 were twice as fast, with a shorter memory or not."""
    fake_comparison(tmp_path, {"transformer-xl": XL[:2], "compressive": XL[:2]})

    def grown(number, _):
        early = number < 4
        return {
            "tokens_per_second": 2000.0 if early else 1000.0,
            "memory.length": early_length if early else 64,
        }

    with_records(tmp_path / "compressive", grown)
    assert ("compressive varied by a factor of 2.0" in markdown_of(tmp_path)) == left_out


def test_costs_say_keys_and_operations(tmp_path):
    fake_comparison(
        tmp_path,
        {"transformer-xl": [2.4], "compressive": [2.4]},
        keys={"transformer-xl": 64, "compressive": 128},
    )
    assert (
        "| Compressive Transformer | 128 | 64 / 256 | 1,234,567 | 12,345 | 1,006 | 10 s | 12 s | 300 MiB |"
        in (markdown_of(tmp_path))
    )


def test_what_differs_beside_the_memory_is_called_out(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.4], "slow": [None]})
    fake_run(tmp_path / "slow", "transformer-xl", 2.4, learning_rate=1e-4)
    assert "**These runs differ in more than their memory**: learning_rate; see" in markdown_of(tmp_path)
    changed(tmp_path / "slow" / "run.json", parameters=12345 + 1234)
    assert "slow has 1,234 more parameters than Transformer-XL (10.0%)" in markdown_of(tmp_path)
