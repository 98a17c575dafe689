"""What a report claims, of runs that were never trained."""

import shlex
from types import SimpleNamespace

import pytest

from memformers.common.command_line import OF_A_FOLDER, without_options
from memformers.common.files import read_json
from memformers.report.recall import beyond_base
from tests.report.fake_runs import FACTS, XL, changed, fake_comparison, fake_run, less, markdown_of

BETTER = less(-0.020, -0.021, -0.019)


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        # Student's t of 2 degrees is 4.303; of deviations of 0.001 that is 4.303 · 0.001 / √3 = 0.0025
        ({"transformer": less(0.020, 0.021, 0.019), "transformer-xl": XL, "compressive": BETTER},
         ["**Compressive Transformer is better by 0.020 ± 0.002**, or 0.8% (3 seeds).",
          "**No memory is worse by 0.020 ± 0.002**", "mean over 3 seeds", "means over 3 seeds",
          "compared with Transformer-XL by its bits per character", "| −0.020 ± 0.002 |",
          "| Transformer-XL | 3 | 2.450 ± 0.124 | – |",
          "| Transformer-XL | 1.715 ± 0.087 | 1.225 ± 0.062 | 99.0 ± 0.0 |"]),
        # without Transformer-XL the first arm is the baseline
        ({"wide": XL, "compressive": BETTER}, ["compared with wide by its bits per character"]),
        ({"transformer-xl": XL, "a": BETTER, "b": [2.4, None, None]},
         ["- b has fewer than 3 seeds in common with Transformer-XL"]),
    ],
)  # fmt: skip
def test_a_difference_is_claimed_if_its_interval_excludes_zero(bits, expected, tmp_path):
    fake_comparison(tmp_path, bits)
    markdown = markdown_of(tmp_path)
    assert [words for words in expected if words not in markdown] == []
    assert "no significant difference" not in markdown
    assert "*−0.0" not in markdown
    assert (tmp_path / "figures" / "differences.svg").is_file()


def test_nats_are_compared_where_bits_per_character_are_not_known(tmp_path):
    """As of a part of a text that its tokens lose."""
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": BETTER})
    for path in tmp_path.glob("*/result.json"):
        changed(path, bits_per_character=None, bits_per_byte=None)
    markdown = markdown_of(tmp_path)
    assert "**Compressive Transformer is better by 0.014 ± 0.002**" in markdown
    assert "compared with Transformer-XL by its nats per token" in markdown
    assert "| model | seeds | nats per token | minus Transformer-XL |" in markdown
    compressive = read_json(tmp_path / "results.json")["arms"][1]
    assert compressive["loss_minus_base"]["mean"] == pytest.approx(-0.014)


def test_no_difference_comes_with_its_resolution(tmp_path):
    """Differences of deviation 0.01: 4.303 · 0.01 / √3 = 0.0248."""
    arms = dict.fromkeys(["compressive", "a", "b"], less(-0.02, -0.03, -0.01))
    fake_comparison(tmp_path, {"transformer-xl": XL} | arms)
    markdown = markdown_of(tmp_path)
    sentence, *_ = [line for line in markdown.splitlines() if "no significant difference" in line]
    numbers = ("- Compressive Transformer", "−0.020 ± 0.025", "below zero", "3 seeds", "up to 0.045")
    assert all(number in sentence for number in numbers)
    assert " is better by" not in markdown
    assert "| *−0.020 ± 0.025* |" in markdown, "a page shows it in grey"
    assert "of twenty identical models" in markdown, "many arms differ by chance"


@pytest.mark.parametrize("compared", [True, False])
def test_one_seed_claims_nothing_but_names_the_next_command(compared, tmp_path):
    folder = tmp_path / "two words"
    fake_comparison(folder, {"transformer-xl": [2.5], "compressive": [1.5]})
    command = "python -m memformers compare --seeds 1 --tokens 1000 --data '/a b/c.txt' --out=old"
    changed(folder / "experiment.json", commands=[command])
    if not compared:  # runs that were trained one by one
        (folder / "experiment.json").unlink()
    markdown = markdown_of(folder)
    assert "only one seed, so nothing is claimed" in markdown
    more = "python -m memformers compare --tokens 1000 --data '/a b/c.txt' --seeds 5 --resume --out"
    assert (f"```text\n{more} '{folder}'\n```" in markdown) == compared
    assert "are 1.000 bits per character apart" in markdown
    assert "| Compressive Transformer | 1 | 1.500 |" in markdown
    assert not [words for words in ("±", " is better by", "The lower panel has") if words in markdown]
    assert not (folder / "figures" / "differences.svg").exists()


def test_two_seeds_claim_nothing_but_show_differences(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL[:2], "compressive": less(-0.021, -0.019, 0)[:2]})
    markdown = markdown_of(tmp_path)
    assert "**Two seeds are too few to claim which model is better.**" in markdown
    assert "| *−0.021 and −0.019* |" in markdown
    assert " is better by" not in markdown
    assert "bands are" not in markdown


@pytest.mark.parametrize(
    ("options", "scale", "percent"),
    [("--scale 5e-2", 0.05, "5 %"), ("--scale=.1", 0.1, "10 %"), ("--seeds 1", 1.0, "")],
)
def test_a_trial_advises_the_full_run(options, scale, percent, tmp_path):
    folder = tmp_path / "trial"
    fake_comparison(folder, {"transformer-xl": [2.5], "compressive": [1.5]})
    command = f"memformers compare {options} --data book.txt"
    changed(folder / "experiment.json", commands=[command], scale=scale)
    markdown = markdown_of(folder)
    assert (f"**Trial: {percent} of the tokens." in markdown) == (scale < 1)
    assert (f"\nmemformers compare --data book.txt --out {folder}-whole\n" in markdown) == (scale < 1)
    assert ("trains more seeds" in markdown) == (scale == 1)


@pytest.mark.parametrize(
    ("command", "less"),
    [("memformers recall --quick --jobs 1", "memformers recall --jobs 1"),
     ("memformers recall --out a --resume --jobs 2", "memformers recall --jobs 2")],
)  # fmt: skip
def test_options_of_a_command_are_dropped_with_their_values(command, less):
    options = (*OF_A_FOLDER, "--quick", "--tokens")
    assert shlex.join(without_options(shlex.split(command), options)) == less


def test_a_failed_seed_is_named_and_the_others_are_compared(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": [*BETTER[:2], None]}, seeds=4)
    (tmp_path / "compressive-seed2").mkdir()
    (tmp_path / "compressive-seed2" / "config.json").write_text("{}")
    fake_run(tmp_path / "transformer-xl-seed3", "transformer-xl", 9.0, seed=3, finished=False)
    expected = (
        "> **compressive-seed2**: no step was made", "> **compressive-seed3**: not started",
        "Two seeds are too few",
        "> **Transformer-XL, seed 3, did not finish**", "| Transformer-XL | 3 | 2.450 ± 0.124 |",
    )  # fmt: skip
    markdown = markdown_of(tmp_path)
    assert [words for words in expected if words not in markdown] == []
    for result in tmp_path.glob("transformer-xl*/result.json"):
        result.unlink()
    assert "No run of Transformer-XL has finished" in markdown_of(tmp_path)


def test_costs_name_everything_that_differs(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": [2.4], "slow": [None]}, keys={"transformer-xl": 64})
    fake_run(tmp_path / "slow", "transformer-xl", 2.4, learning_rate=1e-4, facts=FACTS | {"keys": 128})
    changed(tmp_path / "slow" / "run.json", parameters=12345 + 1234)
    markdown = markdown_of(tmp_path)
    row = "| slow | 128 | 64 | 256 | 32 KiB | 1,234,567 | 13,579 | 1,006 | 10 s | 12 s | 300 MiB |"
    assert row in markdown
    assert "**These runs differ in more than their memory**: optim.learning_rate; see" in markdown
    assert "slow has 1,234 more parameters than Transformer-XL (10.0%)" in markdown


def test_a_recall_claim_names_its_distances():
    recall = {"edges": [0, 256, 512, 2048, 2304], "asks": [1] * 4, "accuracy": [0.1, 0.2, 0.3, 0.4]}
    base, slots = (
        SimpleNamespace(
            name=name,
            first=SimpleNamespace(facts={"sees_back": reach}, config={"model": {"model": name}}),
            results={0: {"recall": recall}},
        )
        for name, reach in {"transformer-xl": 320, "compressive": 2112}.items()
    )
    [(far, measure)] = beyond_base([base, slots], base).items()
    assert far == "set 512 to 2,048 tokens ago"
    assert measure.of({"recall": recall}) == 0.3
    assert beyond_base([base], base) == {}


def test_a_number_that_is_zero_is_in_the_tables(tmp_path):
    fake_comparison(tmp_path, {"transformer-xl": XL, "compressive": XL})
    for run in tmp_path.glob("*/result.json"):
        changed(run, word_perplexity=None, perplexity=0.0, accuracy=0.0, peak_memory_bytes=0)
    markdown = markdown_of(tmp_path)
    assert "| model | nats per token | bits per byte | perplexity | accuracy |" in markdown
    assert "| 0.0 ± 0.0 | 0.0 ± 0.0 % |" in markdown
    assert "| 0 MiB |" in markdown
