"""The pages of results say what the files of results have."""

import json
import re
import shlex
from dataclasses import asdict
from functools import partial
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
from tests.texts import read

PAGES = sorted((ROOT / "docs/results").glob("*.md"))
FILES = [DATA / "tiny_shakespeare/results.json", *(ROOT / "experiments/benchmarks").glob("*.md")]
"""What has numbers of which no page has the table."""
TRACED = [*PAGES, ROOT / "docs/which-memory.md"]
GIVEN = {"0.5.1", "2.31.10", "2.13", "0.03", "2.7", "0.02"}
"""Versions, and sizes that are settings or stand in the recipes' page."""


@pytest.fixture(scope="module")
def wanted():
    return written()


def test_pages_and_figures_are_as_their_data_and_the_source_say(wanted):
    old = [path for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    assert [path.relative_to(ROOT).as_posix() for path in old] == [], "run: make docs-tables"
    assert {*wanted} >= {*(ROOT / "docs/results/figures").iterdir()}


def test_verdicts_need_three_seeds_and_the_right_sign():
    for verdict in verdicts():
        assert verdict.gain.n > 2
        low, high = (verdict.gain.mean + sign * verdict.gain.half_width for sign in (-1, 1))
        assert verdict.winner == ("compressive" if low > 0 else "transformer-xl" if high < 0 else "")


@pytest.mark.parametrize("page", TRACED, ids=lambda page: page.stem)
def test_numbers_in_sentences_come_from_tables(page, wanted):
    tables = [block[0] for text in wanted.values() for block in BLOCK.finditer(text)]
    chosen = [share(mean(seeds("recall_chosen", arm, "correct, 192 – 384"))) for arm in MODELS]
    files = [path.read_text(encoding="utf-8") for path in FILES]
    known = {*re.findall(r"\d+\.\d+(?: ± \d+\.\d+)?", "\n".join([*tables, *chosen, *files])), *GIVEN}
    known |= {number for pair in known for number in pair.split(" ± ")}
    known.add(f"{100 * level_without_association(SHORTEST):.1f}")
    prose = re.sub(r"\]\([^)]*\)|`[^`]*`|arXiv [\d.]+", "", BLOCK.sub("", page.read_text(encoding="utf-8")))
    numbers = re.findall(r"(?<![\d.])\d+\.\d+(?:\.\d+)?(?: ± \d+\.\d+)?", " ".join(prose.split()))
    assert [number for number in numbers if number not in known] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_answer_first(page):
    text = page.read_text(encoding="utf-8")
    assert re.match(r"# .+\n\n\*\*[A-Z]", text)
    if page.stem != "commands":
        assert text.count("](figures/") == len(re.findall(r"^##? .+\n\n\*\*[A-Z]", text, re.MULTILINE))
    if page.stem not in ("index", "commands"):
        assert "<summary>How measured</summary>" in text
        assert "```sh" in text
        assert "KiB" in text or page.stem == "speed"  # the state of a stream


@pytest.mark.parametrize("name", experiments())
def test_an_experiment_has_its_numbers_and_a_command_that_is_read(name):
    assert len(rows(name)) >= 2
    program, *arguments = shlex.split(experiments()[name]["command"]) or ["make"]
    if program == "memformers":
        asked = parse_arguments(command_class(arguments[0]), arguments[1:])
        assert f"seeds={experiments()[name]['seeds']}" in repr(asked)
    elif program == "python":
        module = import_module(arguments[1])
        module = import_module(f"{arguments[1]}.__main__") if hasattr(module, "__path__") else module
        [command] = [
            value for value in vars(module).values()
            if isinstance(value, type) and hasattr(value, "run") and value.__module__ == module.__name__
        ]  # fmt: skip
        parse_arguments(command, arguments[2:])
    else:
        assert program == "make"


def test_no_numbers_are_left_that_no_experiment_has():
    assert {path.name for path in DATA.iterdir() if path.is_dir()} == {*experiments()}


@pytest.mark.parametrize("step", ["sgd", "rms"])
def test_the_guide_to_evaluation_says_what_learning_saved_and_took(step):
    def of(model, measure):
        return seeds("learning", f"{model}-shakespeare", measure)[0]

    sentences = []
    for model in MODELS:
        saved, half_width = of(model, f"{step}: saved (nats)"), of(model, f"{step}: saved, half width (nats)")
        assert saved > half_width
        losses = of(model, "loss (nats)"), of(model, f"{step}: loss (nats)")
        sentences.append(f"`{model}-shakespeare` from {losses[0]:.4f} to {losses[1]:.4f}")
        sentences.append(f"(−{saved:.3f} ± {half_width:.3f})")
    measures = {".1f": "CPU time, ratio", ".3f": "saved in the second half (nats)"}
    for form, measure in measures.items():
        sentences.append(" and ".join(f"{of(model, f'{step}: {measure}'):{form}}" for model in MODELS))
    guide = " ".join((ROOT / "docs/how-to/evaluate.md").read_text(encoding="utf-8").split())
    assert [text for text in sentences if text not in guide] == []
    settings = about("learning")["learn"][step]
    assert settings == json.loads(json.dumps(asdict(LearnConfig(learn_step=step))))


def test_the_recipes_page_quotes_few_position_features():
    measure = "held-out loss, characters (nats)"
    losses = {}
    for arm in ("all", "p16-1k"):
        first = seeds("position_features", arm, measure)
        losses[arm] = first | seeds("position_features_seeds", arm, measure)
    difference = paired(losses["p16-1k"], losses["all"])
    page = " ".join((ROOT / "docs/recipes.md").read_text(encoding="utf-8").split())
    assert f"**{number(difference, '.3f', signed=True)} nats over {difference.n} seeds**" in page


@pytest.mark.parametrize("model", MODELS)
def test_the_state_of_a_stream_is_what_a_model_keeps(model):
    lm = small_lm(model, mem_len=4, c_mem_len=4, segment_len=4, compression_rate=2, n_layers=3).eval()
    *_, memory = read(lm, torch.randint(9, (40, 1)))
    keys = 4 + 4 * (model == "compressive")
    size = sum(layer.mem.nbytes + layer.slots.nbytes for layer in memory.layers)
    assert cost_of_keys({KEYS: keys}, 3, lm.config.d_model) == f"{keys} · {kib(size)}"


def test_slots_of_nine_have_the_keys_that_pages_say():
    settings = about("recall_far")["settings"]
    slots, shared = settings["Compressive, M = 32, C = 224, c = 9"], settings["all"]
    M, C, c = (slots[f"model.{name}"] for name in ("mem_len", "c_mem_len", "compression_rate"))
    S, D, n_layers = (shared[f"model.{name}"] for name in ("segment_len", "d_model", "n_layers"))
    held, length = [], 0
    for _ in range(1000):  # the lengths alone: c positions at a time become a slot, until M are left
        length += S
        while length > M and length >= c:
            length -= c
        held.append(length + C)
    mean, most = sum(held[100 : 100 + c]) / c, max(held)
    shown = f"{mean:g}, at most {most} · {kib(most * n_layers * D * 4)}"
    costs = {row["arm"]: row["cost"] for row in table_of("arms") if row["table"] == "recall_shift"}
    assert costs["compressive"] == costs["compressive-shift"] == shown
    pages = {page.stem: " ".join(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert f"| 256 · 128 KiB · 0.44 M | {shown} · 0.44 M |" in pages["reach"]
    assert f"It holds {mean:g} keys on average, and at most {most}" in pages["reach"]
    guide = " ".join((ROOT / "docs/how-to/recall.md").read_text(encoding="utf-8").split())
    assert f"with at most {most} keys ({mean:g} on average), {C} of them slots of {c} tokens each" in guide


def test_no_label_of_the_verdicts_lies_on_an_interval():
    with matplotlib.rc_context(fname=STYLE):
        figure = forest()
        FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        lines = [line.get_window_extent() for line in axes.get_lines() if len({*line.get_ydata()}) == 1]
        for label in axes.texts:
            box = label.get_window_extent()
            assert not [line for line in lines if box.y0 < line.y0 + 2 and line.y0 - 2 < box.y1], label


def prose_of(page, folder="how-to"):
    return " ".join((ROOT / "docs" / folder / page).read_text(encoding="utf-8").split())


def shown(value):
    return f"{value.mean:.3f} ± {value.half_width:.3f}"


def test_the_generation_guide_quotes_prompt_learning():
    saved = {}
    for n_prompt in PROMPT_LENGTHS:
        static, learning = (seeds("prompt_learning", f"prompt-{n_prompt}", x) for x in READINGS)
        saved[n_prompt] = paired(static, learning)
        assert saved[n_prompt].leaves_out_zero
    short, long = saved.values()
    sentence = (
        f"The loss of the next 256 characters falls by {shown(short)} nats per character after a prompt of "
        f"256, and by {shown(long)} after one of 1,024 ({short.n} prompts"
    )
    assert sentence in prose_of("generate.md")
    assert about("prompt_learning")["learn"] == json.loads(json.dumps(asdict(LearnConfig())))
    assert about("prompt_learning")["predicted tokens"] == N_PREDICTED == 256


LEARNED_TEXTS = {"learning_worth": "On Tiny Shakespeare", "learning_worth_python": "On Python"}


def learned_losses(experiment, arm, measure):
    return seeds(experiment, arm, f"{measure} (nats)")


@pytest.mark.parametrize(("experiment", "text"), [*LEARNED_TEXTS.items()])
def test_the_evaluation_guide_quotes_learning(experiment, text):
    of = partial(learned_losses, experiment)
    saved = [
        paired(of("none", "static"), of("xl", "static")),
        paired(of("none", "learning"), of("xl", "learning")),
        mean(of("none", "learning saves")),
        mean(of("xl", "learning saves")),
        paired(of("xl", "static"), of("none", "learning")),
        paired(of("xl", "training text, after learning"), of("xl", "training text, static")),
    ]
    assert all(value.leaves_out_zero and value.mean > 0 for value in saved)
    static, learning, none, xl, better, forgotten = map(shown, saved)
    guide = prose_of("evaluate.md")
    of_text = guide[guide.index(text) :]
    assert f"saves {static} nats per character without learning and {learning} with it" in of_text
    assert f"learning saves {none} without memory and {xl} with it" in of_text
    assert better in guide[guide.index("better than memory without learning, by") :]
    assert forgotten in guide[guide.index("the loss of the training text rises by") :]


def test_the_evaluation_guide_names_memories_that_differ():
    different = set()
    for experiment, reading in product(LEARNED_TEXTS, READINGS):
        for arm, rival in combinations(("selective", "compressive", "xl"), 2):
            losses = [learned_losses(experiment, name, reading) for name in (arm, rival)]
            if paired(*losses).leaves_out_zero:
                different.add((experiment, reading, arm, rival))
    assert different == {("learning_worth_python", "learning", "compressive", "xl")}
    losses = [learned_losses("learning_worth_python", name, "learning") for name in ("compressive", "xl")]
    assert f"by +{shown(paired(*losses))}." in prose_of("evaluate.md")


DISTANCES = ("1 – 63", "64 – 127", "128 – 255", "256 – 511", "512 – 1,023", "1,024 – 2,047", "2,048 or more")


def test_the_guide_to_evaluation_says_which_words_learning_helps():
    def saved(group):
        losses = [seeds("learning_worth", "xl", f"{group}, {reading}") for reading in READINGS]
        return paired(*losses)

    gains = {group: saved(group) for group in DISTANCES}
    assert all(gain.leaves_out_zero for gain in gains.values())
    best = sorted(DISTANCES, key=lambda group: -gains[group].mean)[:3]
    assert {*best} == {"64 – 127", "128 – 255", "256 – 511"}
    means = [gains[group].mean for group in best]
    new = saved("first")
    assert new.mean < -new.half_width
    guide = prose_of("evaluate.md")
    assert f"64 to 511 characters ago, {min(means):.2f} to {max(means):.2f} nats per character" in guide
    assert f"become harder, by {-new.mean:.3f} ± {new.half_width:.3f}." in guide


def test_the_evaluation_guide_quotes_learning_by_distance_in_python():
    means = {}
    for group in (*DISTANCES, "first"):
        losses = [seeds("learning_worth_python", "xl", f"{group}, {reading}") for reading in READINGS]
        means[group] = paired(*losses)
    new = means.pop("first")
    assert not new.leaves_out_zero
    assert all(gain.leaves_out_zero for gain in means.values())
    sizes = [gain.mean for gain in means.values()]
    assert (
        f"On Python, it saves {min(sizes):.2f} to {max(sizes):.2f} at all distances, and new words don't "
        f"become harder ({shown(new)})."
    ) in prose_of("evaluate.md")


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
            worse[memory.name] = shown(difference)
    return worse


def test_the_page_of_memories_names_those_that_are_worse():
    shakespeare = worse_at_equal_bytes("equal_bytes")
    python = worse_at_equal_bytes("equal_bytes_python")
    assert shakespeare.keys() == {
        "no memory", "Compressive Transformer", "pooled slots", "KeyDiff", "Infini-attention"
    }  # fmt: skip
    assert python.keys() == {"no memory", "random positions", "TOVA", "Infini-attention"}
    page = prose_of("memories.md", "results")
    sentences = (
        f"These save {shakespeare['no memory']} and {python['no memory']} bits per character compared with "
        f"no memory. On Tiny Shakespeare, slots of the Compressive Transformer are worse than positions by "
        f"{shakespeare['Compressive Transformer']}, pooled slots by {shakespeare['pooled slots']}, "
        f"KeyDiff by {shakespeare['KeyDiff']} and Infini-attention by {shakespeare['Infini-attention']}; "
        f"on Python, random positions by {python['random positions']}, TOVA by {python['TOVA']} and "
        f"Infini-attention by {python['Infini-attention']}. For all others, the interval contains zero."
    )
    assert sentences in page


def test_results_of_memories_have_three_seeds_of_both_arms():
    names = {memory.name for memory in ALL_MEMORIES}
    for (name, _), claim in claims().items():
        assert name in names
        ours = seeds(claim.experiment, claim.arm, claim.measure)
        theirs = seeds(claim.experiment, claim.rival, claim.measure)
        assert len(ours) >= 3
        assert ours.keys() == theirs.keys()
