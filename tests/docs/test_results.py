"""The pages of results say what the files of results have."""

import json
import re
import shlex
from dataclasses import asdict
from importlib import import_module
from itertools import combinations, product

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from docs.building.__main__ import written
from docs.building.figures import forest
from docs.building.markdown import BLOCK
from docs.building.results import (
    DATA,
    ROOT,
    about,
    experiments,
    kib,
    mean,
    rows,
    seeds,
    table_of,
    verdicts,
)
from docs.building.svg import STYLE
from docs.building.tables.cells import share
from docs.building.tables.comparisons import KEYS, cost_of_keys
from docs.building.tables.learning import READINGS
from docs.building.tables.memories import claims
from docs.building.tables.recall import MODELS
from experiments.memories import ALL_MEMORIES
from experiments.mqar import SHORTEST, level_without_association
from experiments.prompt_learning import N_PREDICTED, PROMPT_LENGTHS
from memformers import LearnConfig
from memformers.cli import command_class
from memformers.common.command_line import parse_arguments
from memformers.common.intervals import paired
from memformers.report.numbers import number
from tests.builders import small_lm
from tests.docs.pages import in_one_line, page_id, read_file
from tests.texts import read

PAGES = sorted((ROOT / "docs/results").glob("*.md"))
# The pages whose numbers are looked up.
TRACED = [*PAGES, ROOT / "docs/which-memory.md"]
# Files with numbers of which no page has the table.
FILES = [DATA / "tiny_shakespeare/results.json", *(ROOT / "experiments/benchmarks").glob("*.md")]
# Versions, and sizes that are settings or stand in the recipes' page.
GIVEN = {"0.5.1", "2.31.10", "2.13", "0.03", "2.7", "0.02"}
FLOAT32_BYTES = 4

GUIDE_TO_EVALUATION = "docs/how-to/evaluate.md"
GUIDE_TO_GENERATION = "docs/how-to/generate.md"


def stem(page):
    return page.stem


def prose(page):
    """A page as one line."""
    return in_one_line(read_file(page))


def as_written(value):
    return f"{value.mean:.3f} ± {value.half_width:.3f}"


def as_json(config):
    """The fields of a config as a file has them, with lists for tuples."""
    return json.loads(json.dumps(asdict(config)))


# What the building of the pages writes.


@pytest.fixture(scope="module")
def wanted():
    return written()


def test_pages_and_figures_are_as_their_data_and_the_source_say(wanted):
    stale = []
    for path, text in wanted.items():
        if read_file(path) != text:
            stale.append(page_id(path))
    assert stale == [], "run: make docs-tables"
    # No figure is left that nothing draws.
    assert wanted.keys() >= {*(ROOT / "docs/results/figures").iterdir()}


def test_verdicts_need_three_seeds_and_the_right_sign():
    for verdict in verdicts():
        assert verdict.gain.n > 2
        winner = ""
        if verdict.gain.mean - verdict.gain.half_width > 0:
            winner = "compressive"
        elif verdict.gain.mean + verdict.gain.half_width < 0:
            winner = "transformer-xl"
        assert verdict.winner == winner


@pytest.fixture(scope="module")
def known_numbers(wanted):
    """Every number that a sentence may quote, alone or with its interval."""
    texts = [read_file(path) for path in FILES]
    for text in wanted.values():
        texts.extend(block[0] for block in BLOCK.finditer(text))
    for arm in MODELS:
        texts.append(share(mean(seeds("recall_chosen", arm, "correct, 192 – 384"))))
    numbers = set(GIVEN)
    for text in texts:
        for quoted in re.findall(r"\d+\.\d+(?: ± \d+\.\d+)?", text):
            numbers.add(quoted)
            # A sentence may also give the mean without its interval.
            numbers.update(quoted.split(" ± "))
    numbers.add(f"{100 * level_without_association(SHORTEST):.1f}")
    for arm in KEPT:
        difference = paired(answers(arm), answers("selective-128-shift"))
        numbers.update((points(difference), points(difference).split(" ± ")[0]))
    return numbers


@pytest.mark.parametrize("page", TRACED, ids=stem)
def test_numbers_in_sentences_come_from_tables(page, known_numbers):
    # Without tables, links, code, and the numbers of papers.
    sentences = re.sub(r"\]\([^)]*\)|`[^`]*`|arXiv [\d.]+", "", BLOCK.sub("", read_file(page)))
    quoted = re.findall(r"(?<![\d.])\d+\.\d+(?:\.\d+)?(?: ± \d+\.\d+)?", in_one_line(sentences))
    assert [text for text in quoted if text not in known_numbers] == []


@pytest.mark.parametrize("page", PAGES, ids=stem)
def test_pages_answer_first(page):
    text = read_file(page)
    assert re.match(r"# .+\n\n\*\*[A-Z]", text)
    if page.stem != "commands":
        # A figure for each part that starts with a claim in bold.
        assert text.count("](figures/") == len(re.findall(r"^##? .+\n\n\*\*[A-Z]", text, re.MULTILINE))
    if page.stem not in ("index", "commands"):
        assert "<summary>How measured</summary>" in text
        assert "```sh" in text
        assert "KiB" in text or page.stem == "speed"  # the state of a stream


# The files of results.


def command_of_module(name):
    """The class of options of ``python -m name``, which its module defines."""
    module = import_module(name)
    if hasattr(module, "__path__"):
        module = import_module(f"{name}.__main__")
    commands = []
    for value in vars(module).values():
        is_defined_here = isinstance(value, type) and value.__module__ == module.__name__
        if is_defined_here and hasattr(value, "run"):
            commands.append(value)
    [command] = commands
    return command


@pytest.mark.parametrize("name", experiments())
def test_an_experiment_has_its_numbers_and_a_command_that_is_read(name):
    assert len(rows(name)) >= 2
    experiment = experiments()[name]
    # Without a command, it is the comparison that make runs.
    program, *arguments = shlex.split(experiment["command"]) or ["make"]
    if program == "memformers":
        options = parse_arguments(command_class(arguments[0]), arguments[1:])
        assert f"seeds={experiment['seeds']}" in repr(options)
    elif program == "python":
        # After "-m" and the module's name.
        parse_arguments(command_of_module(arguments[1]), arguments[2:])
    else:
        assert program == "make"


def test_no_numbers_are_left_that_no_experiment_has():
    folders = {path.name for path in DATA.iterdir() if path.is_dir()}
    assert folders == experiments().keys()


# Learning while reading.


@pytest.mark.parametrize("step", ["sgd", "rms"])
def test_the_guide_to_evaluation_says_what_learning_saved_and_took(step):
    def measured(model, measure):
        return seeds("learning", f"{model}-shakespeare", measure)[0]

    sentences = []
    for model in MODELS:
        saved = measured(model, f"{step}: saved (nats)")
        half_width = measured(model, f"{step}: saved, half width (nats)")
        assert saved > half_width
        static = measured(model, "loss (nats)")
        learning = measured(model, f"{step}: loss (nats)")
        sentences.append(f"`{model}-shakespeare` from {static:.4f} to {learning:.4f}")
        sentences.append(f"(−{saved:.3f} ± {half_width:.3f})")
    ratios = [f"{measured(model, f'{step}: CPU time, ratio'):.1f}" for model in MODELS]
    sentences.append(" and ".join(ratios))
    late = [f"{measured(model, f'{step}: saved in the second half (nats)'):.3f}" for model in MODELS]
    sentences.append(" and ".join(late))
    guide = prose(GUIDE_TO_EVALUATION)
    assert [sentence for sentence in sentences if sentence not in guide] == []
    assert about("learning")["learn"][step] == as_json(LearnConfig(learn_step=step))


def test_the_recipes_page_quotes_few_position_features():
    measure = "held-out loss, characters (nats)"
    losses = {}
    for arm in ("all", "p16-1k"):
        # The first seed is from another experiment than the rest.
        first = seeds("position_features", arm, measure)
        losses[arm] = first | seeds("position_features_seeds", arm, measure)
    difference = paired(losses["p16-1k"], losses["all"])
    sentence = f"**{number(difference, '.3f', signed=True)} nats over {difference.n} seeds**"
    assert sentence in prose("docs/recipes.md")


def test_the_generation_guide_quotes_prompt_learning():
    saved = {}
    for n_prompt in PROMPT_LENGTHS:
        static, learning = (seeds("prompt_learning", f"prompt-{n_prompt}", reading) for reading in READINGS)
        saved[n_prompt] = paired(static, learning)
        assert saved[n_prompt].leaves_out_zero
    short, long = saved.values()
    sentence = (
        f"The loss of the next 256 characters falls by {as_written(short)} nats per character after a prompt "
        f"of 256, and by {as_written(long)} after one of 1,024 ({short.n} prompts"
    )
    assert sentence in prose(GUIDE_TO_GENERATION)
    assert about("prompt_learning")["learn"] == as_json(LearnConfig())
    assert about("prompt_learning")["predicted tokens"] == N_PREDICTED == 256


# The experiments on learning, and how the guide to evaluation names their texts.
LEARNED_TEXTS = {"learning_worth": "On Tiny Shakespeare", "learning_worth_python": "On Python"}


def learned_losses(experiment, arm, measure):
    return seeds(experiment, arm, f"{measure} (nats)")


@pytest.mark.parametrize(("experiment", "text"), [*LEARNED_TEXTS.items()])
def test_the_evaluation_guide_quotes_learning(experiment, text):
    def losses(arm, measure):
        return learned_losses(experiment, arm, measure)

    memory_static = paired(losses("none", "static"), losses("xl", "static"))
    memory_learning = paired(losses("none", "learning"), losses("xl", "learning"))
    learning_without_memory = mean(losses("none", "learning saves"))
    learning_with_memory = mean(losses("xl", "learning saves"))
    learning_not_memory = paired(losses("xl", "static"), losses("none", "learning"))
    forgotten = paired(losses("xl", "training text, after learning"), losses("xl", "training text, static"))
    for gain in (
        memory_static, memory_learning, learning_without_memory, learning_with_memory, learning_not_memory,
        forgotten,
    ):  # fmt: skip
        assert gain.leaves_out_zero
        assert gain.mean > 0

    def after(words):
        return guide[guide.index(words) :]

    guide = prose(GUIDE_TO_EVALUATION)
    assert (
        f"saves {as_written(memory_static)} nats per character without learning and "
        f"{as_written(memory_learning)} with it"
    ) in after(text)
    assert (
        f"learning saves {as_written(learning_without_memory)} without memory and "
        f"{as_written(learning_with_memory)} with it"
    ) in after(text)
    assert as_written(learning_not_memory) in after("better than memory without learning, by")
    assert as_written(forgotten) in after("the loss of the training text rises by")


def test_the_evaluation_guide_names_memories_that_differ():
    different = set()
    for experiment, reading in product(LEARNED_TEXTS, READINGS):
        for arm, rival in combinations(("selective", "compressive", "xl"), 2):
            losses = learned_losses(experiment, arm, reading)
            if paired(losses, learned_losses(experiment, rival, reading)).leaves_out_zero:
                different.add((experiment, reading, arm, rival))
    assert different == {("learning_worth_python", "learning", "compressive", "xl")}
    compressive = learned_losses("learning_worth_python", "compressive", "learning")
    difference = paired(compressive, learned_losses("learning_worth_python", "xl", "learning"))
    assert f"by +{as_written(difference)}." in prose(GUIDE_TO_EVALUATION)


# How far back a word occurred last.
DISTANCES = ("1 – 63", "64 – 127", "128 – 255", "256 – 511", "512 – 1,023", "1,024 – 2,047", "2,048 or more")


def learning_saves(experiment, words):
    """What learning saves of the loss of words at a distance, or of words that occur for the first time."""
    static, learning = (seeds(experiment, "xl", f"{words}, {reading}") for reading in READINGS)
    return paired(static, learning)


def test_the_guide_to_evaluation_says_which_words_learning_helps():
    gains = {}
    for distance in DISTANCES:
        gains[distance] = learning_saves("learning_worth", distance)
        assert gains[distance].leaves_out_zero
    *_, third, second, best = sorted(DISTANCES, key=lambda distance: gains[distance].mean)
    assert {third, second, best} == {"64 – 127", "128 – 255", "256 – 511"}
    low = gains[third].mean
    high = gains[best].mean
    guide = prose(GUIDE_TO_EVALUATION)
    assert f"64 to 511 characters ago, {low:.2f} to {high:.2f} nats per character" in guide
    # Words that were not read yet get harder.
    new = learning_saves("learning_worth", "first")
    assert new.mean < -new.half_width
    assert f"become harder, by {-new.mean:.3f} ± {new.half_width:.3f}." in guide


def test_the_evaluation_guide_quotes_learning_by_distance_in_python():
    means = []
    for distance in DISTANCES:
        gain = learning_saves("learning_worth_python", distance)
        assert gain.leaves_out_zero
        means.append(gain.mean)
    new = learning_saves("learning_worth_python", "first")
    assert not new.leaves_out_zero
    sentence = (
        f"On Python, it saves {min(means):.2f} to {max(means):.2f} at all distances, and new words don't "
        f"become harder ({as_written(new)})."
    )
    assert sentence in prose(GUIDE_TO_EVALUATION)


# What a memory keeps.


@pytest.mark.parametrize("model", MODELS)
def test_the_state_of_a_stream_is_what_a_model_keeps(model):
    lm = small_lm(model, mem_len=4, c_mem_len=4, segment_len=4, compression_rate=2, n_layers=3).eval()
    *_, memory = read(lm, torch.randint(9, (40, 1)))
    n_bytes = 0
    for layer in memory.layers:
        n_bytes += layer.mem.nbytes + layer.slots.nbytes
    # M positions, and C slots of the Compressive Transformer.
    keys = 8 if model == "compressive" else 4
    assert cost_of_keys({KEYS: keys}, 3, lm.config.d_model) == f"{keys} · {kib(n_bytes)}"


def count_keys(S, M, C, c):
    """The mean and the largest number of keys of slots of c positions, from the lengths alone."""
    keys = []
    exact = 0
    for _ in range(1000):
        exact += S
        # c positions at a time become a slot, until M are left.
        while exact > M and exact >= c:
            exact -= c
        keys.append(exact + C)
    # From a full memory on, over a whole period.
    return sum(keys[100 : 100 + c]) / c, max(keys)


def test_slots_of_nine_have_the_keys_that_pages_say():
    settings = about("recall_far")["settings"]
    slots = settings["Compressive, M = 32, C = 224, c = 9"]
    shared = settings["all"]
    C = slots["model.c_mem_len"]
    c = slots["model.compression_rate"]
    n_mean, n_max = count_keys(shared["model.segment_len"], slots["model.mem_len"], C, c)
    # Each layer keeps keys of D numbers.
    n_bytes = n_max * shared["model.n_layers"] * shared["model.d_model"] * FLOAT32_BYTES
    cost = f"{n_mean:g}, at most {n_max} · {kib(n_bytes)}"
    costs = {row["arm"]: row["cost"] for row in table_of("arms") if row["table"] == "recall_shift"}
    assert costs["compressive"] == costs["compressive-shift"] == cost
    reach = prose("docs/results/reach.md")
    assert f"| 256 · 128 KiB · 0.44 M | {cost} · 0.44 M |" in reach
    assert f"It holds {n_mean:g} keys on average, and at most {n_max}" in reach
    sentence = f"with at most {n_max} keys ({n_mean:g} on average), {C} of them slots of {c} tokens each"
    assert sentence in prose("docs/how-to/recall.md")


# Figures.


def test_no_label_of_the_verdicts_lies_on_an_interval():
    with matplotlib.rc_context(fname=STYLE):
        figure = forest()
        FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        intervals = []
        for line in axes.get_lines():
            is_level = len({*line.get_ydata()}) == 1
            if is_level:
                intervals.append(line.get_window_extent())
        for label in axes.texts:
            box = label.get_window_extent()
            for interval in intervals:
                # A line is some pixels thick.
                is_below = interval.y0 + 2 <= box.y0
                is_above = interval.y0 - 2 >= box.y1
                assert is_below or is_above, label


# The comparison of all memories.


def worse_at_equal_bytes(experiment):
    """The differences, as pages show them, of the memories that are significantly worse than positions."""
    positions = seeds(experiment, "transformer-xl", "bits per character")
    worse = {}
    for memory in ALL_MEMORIES:
        bits = seeds(experiment, memory.arm, "bits per character")
        if not bits or memory.name == "Transformer-XL":
            continue
        difference = paired(bits, positions)
        assert difference.mean > -difference.half_width, "no memory is significantly better"
        if difference.leaves_out_zero:
            worse[memory.name] = as_written(difference)
    return worse


def test_the_page_of_memories_names_those_that_are_worse():
    shakespeare = worse_at_equal_bytes("equal_bytes")
    python = worse_at_equal_bytes("equal_bytes_python")
    assert shakespeare.keys() == {
        "no memory", "Compressive Transformer", "pooled slots", "KeyDiff", "Infini-attention"
    }  # fmt: skip
    assert python.keys() == {"no memory", "random positions", "TOVA", "Infini-attention"}
    sentences = (
        f"These save {shakespeare['no memory']} and {python['no memory']} bits per character compared with "
        f"no memory. On Tiny Shakespeare, slots of the Compressive Transformer are worse than positions by "
        f"{shakespeare['Compressive Transformer']}, pooled slots by {shakespeare['pooled slots']}, "
        f"KeyDiff by {shakespeare['KeyDiff']} and Infini-attention by {shakespeare['Infini-attention']}; "
        f"on Python, random positions by {python['random positions']}, TOVA by {python['TOVA']} and "
        f"Infini-attention by {python['Infini-attention']}. For all others, the interval contains zero."
    )
    assert sentences in prose("docs/results/memories.md")


def test_results_of_memories_have_three_seeds_of_both_arms():
    names = {memory.name for memory in ALL_MEMORIES}
    for (name, _), claim in claims().items():
        assert name in names
        ours = seeds(claim.experiment, claim.arm, claim.measure)
        theirs = seeds(claim.experiment, claim.rival, claim.measure)
        assert len(ours) >= 3
        assert ours.keys() == theirs.keys()


# Memories of other papers in associative recall.
KEPT = ("r-kv-128-shift-slow", "keydiff-128-shift", "tova-128-shift-slow", "selective-128-shift")
REACH = "docs/results/reach.md"


def answers(arm):
    return seeds("mqar_memories", arm, "correct")


def points(difference):
    """A difference of shares in points, as pages show it."""
    return f"{100 * difference.mean:.1f} ± {100 * difference.half_width:.1f}"


def test_the_shares_in_associative_recall_are_those_of_the_experiment():
    page = prose(REACH)
    shown = [share(mean(answers(arm))) for arm in (*KEPT, "random-positions-128-shift", "xl-128-shift-slow")]
    r_kv, keydiff, tova, selective, at_random, newest = shown
    assert f"R-KV answers {r_kv} correctly, KeyDiff {keydiff}, TOVA {tova}, the selective memory " in page
    assert f"{selective}, and {at_random} are right if the positions are kept at random." in page
    assert f"with the bytes of 128 positions too, answers {newest}." in page
    assert f"an example in a file, {r_kv} |" in prose("docs/which-memory.md")


def test_kept_positions_win_in_associative_recall():
    newest = answers("xl-128-shift-slow")
    for arm in (*KEPT, "random-positions-128-shift"):
        gain = paired(answers(arm), newest)
        assert gain.n == 3
        assert gain.leaves_out_zero
        assert gain.mean > 0
    assert f"beats the newest positions, by {points(gain)} points" in prose(REACH)
    for arm in ("exponential-average-128-shift", "pooled-slots-128-shift"):
        assert not paired(answers(arm), newest).leaves_out_zero


def test_r_kv_and_tova_beat_the_selective_memory():
    *others, selective = map(answers, KEPT)
    r_kv, keydiff, tova = (paired(other, selective) for other in others)
    sentence = (
        f"R-KV and TOVA are better than the selective memory by {points(r_kv)} and {points(tova)} points; "
        f"KeyDiff's {points(keydiff)} are not significant."
    )
    assert sentence in prose(REACH)
    assert (r_kv.leaves_out_zero, keydiff.leaves_out_zero, tova.leaves_out_zero) == (True, False, True)


def test_memories_that_cannot_have_a_shift_learn_no_more_without_one():
    newest = seeds("mqar_memories_without_shift", "xl-128-slow", "correct")
    for arm in ("dms-128-slow", "gated-deltanet-128-slow"):
        other = seeds("mqar_memories_without_shift", arm, "correct")
        assert not paired(other, newest).leaves_out_zero
    infini = seeds("mqar_memories_without_shift", "infini-attention-128", "correct")
    loss = paired(newest, infini)
    assert loss.mean - loss.half_width > 0
    assert f"Infini-attention is worse by {points(loss)} points, and the others show no" in prose(REACH)
