"""The pages of results say what the files of results have."""

import re
import shlex
from importlib import import_module

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from docs.building.__main__ import written
from docs.building.figures import FIGURES, forest
from docs.building.markdown import BLOCK
from docs.building.results import DATA, ROOT, experiments, mean, rows, seeds, verdicts
from docs.building.svg import STYLE
from docs.building.tables.cells import share
from docs.building.tables.memories import OF_MQAR_MEMORIES
from docs.building.tables.recall import MODELS
from experiments.mqar import SHORTEST, level_without_association
from memformers.cli import command_class
from memformers.common.command_line import parse_arguments
from memformers.common.intervals import paired
from memformers.report.numbers import number
from tests.docs.pages import in_one_line, page_id, points, prose, read_file

PAGES = sorted((ROOT / "docs/results").glob("*.md"))
# The pages whose numbers are looked up.
TRACED = [*PAGES, ROOT / "docs/which-memory.md"]
# Files with numbers of which no page has the table.
FILES = [DATA / "tiny_shakespeare/results.json", *(ROOT / "experiments/benchmarks").glob("*.md")]
# Versions, and sizes that are settings or stand in the recipes' page.
GIVEN = {"0.5.1", "2.31.10", "2.13", "0.03", "2.7", "0.02"}


def stem(page):
    return page.stem


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


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_shows_all_of_its_points(name):
    for axes in FIGURES[name]().axes:
        left, right = sorted(axes.get_xlim())
        bottom, top = sorted(axes.get_ylim())
        for line in axes.lines:
            if line.get_transform() == axes.transData:  # else it runs through the whole panel
                assert left <= np.nanmin(line.get_xdata()) <= np.nanmax(line.get_xdata()) <= right
                assert bottom <= np.nanmin(line.get_ydata()) <= np.nanmax(line.get_ydata()) <= top


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
    selective = seeds("mqar_memories", "selective-128-shift", "correct")
    for arm in OF_MQAR_MEMORIES.values():
        difference = paired(seeds("mqar_memories", arm, "correct"), selective)
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
