"""Associative recall: its episodes, and its figure."""

from collections import Counter
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from experiments.columns import Column
from experiments.memories import ALL_MEMORIES
from experiments.mqar import MQAR, MQARTask, level_without_association, plotting
from memformers.common.intervals import mean_of
from memformers.models.facts import memory_facts


class Episode(NamedTuple):
    """Arrays ``[N]``; ``asked`` has the positions of questions."""

    inputs: np.ndarray
    targets: np.ndarray
    distances: np.ndarray
    asked: np.ndarray
    n_pairs: int


def mqar_run(length):
    (experiment,) = MQAR(length=length).plan_experiments(Path()).values()
    return experiment.base


def episodes_of(length, n):
    """``n`` episodes of a training run, put together from its segments."""
    run = mqar_run(length)
    per_episode = length // run.model.segment_len
    n_segments = per_episode * n // run.batch_size
    segments = list(islice(MQARTask().segments(run, 0), n_segments))
    for number, (segment, _) in enumerate(segments):
        assert segment.starts_over == (number % per_episode == 0)

    episodes = []
    for first in range(0, n_segments, per_episode):
        parts = segments[first : first + per_episode]
        inputs = torch.cat([segment.inputs for segment, _ in parts]).numpy()  # [N, B]
        targets = torch.cat([segment.targets for segment, _ in parts]).numpy()
        distances = torch.cat([distances for _, distances in parts]).numpy()
        for stream in range(run.batch_size):
            (asked,) = np.nonzero(targets[:, stream] >= 0)
            columns = (inputs[:, stream], targets[:, stream], distances[:, stream])
            episodes.append(Episode(*columns, asked, n_pairs=length // 16))
    return episodes


def test_each_key_of_an_episode_asks_once_for_its_value():
    for episode in episodes_of(256, n=64):
        asked = episode.asked
        keys = asked - episode.distances[asked]
        assert np.array_equal(episode.inputs[keys], episode.inputs[asked])
        assert np.array_equal(episode.inputs[keys + 1], episode.targets[asked])
        assert len(set(keys.tolist())) == len(asked) == episode.n_pairs == 16


@pytest.mark.parametrize("length", [256, 512, 2048])
def test_no_value_of_an_episode_answers_two_questions(length):
    for episode in episodes_of(length, n=64):
        # The best answer without association: the most common value, whatever is asked.
        counts = Counter(episode.targets[episode.asked].tolist())
        share = max(counts.values()) / episode.n_pairs
        assert share == level_without_association(length) == 16 / length


@pytest.mark.parametrize("length", [256, 2048])
def test_keys_values_and_fillers_are_of_three_kinds(length):
    keys = set()
    values = set()
    fillers = set()
    for episode in episodes_of(length, n=320):
        end_of_pairs = 2 * episode.n_pairs
        own_keys = set(episode.inputs[:end_of_pairs:2].tolist())
        assert set(episode.inputs[episode.asked].tolist()) == own_keys
        keys |= own_keys
        values |= set(episode.inputs[1:end_of_pairs:2].tolist())
        without_questions = np.delete(episode.inputs, episode.asked)
        fillers |= set(without_questions[end_of_pairs:].tolist())
    assert (len(keys), len(values), len(fillers)) == (length // 4, length // 4, 64)
    assert keys | values | fillers == set(range(mqar_run(length).model.vocab_size))


def test_the_position_of_a_question_says_nothing_about_its_answer():
    pairs = []
    for episode in episodes_of(256, n=3200):
        first_asked = episode.asked[0]
        pairs.append((first_asked - episode.distances[first_asked]) // 2)
    # The mean of 3,200 numbers from 0 to 15 is 7.5, with a standard error of 0.08.
    assert np.mean(pairs) == pytest.approx(7.5, abs=0.32)


def test_a_figure_has_a_line_for_each_memory_and_shift(monkeypatch):
    shares = {"xl-32": (0.1, 0.3), "xl-128": (0.5, 0.5), "xl-32-shift": (0.8, 1.0)}
    arms = []
    for name, values in shares.items():
        n_keys = int(name.split("-")[1])
        first = SimpleNamespace(facts={"state_bytes": 32 * n_keys})
        arms.append(SimpleNamespace(name=name, first=first, mean=lambda _, values=values: mean_of(values)))
    lines = []
    monkeypatch.setattr(plotting, "draw_marks", lambda axes, series: lines.extend(series))
    [measure] = MQAR().measures_of("recall")
    MQAR().draw_figure([Column("correct", measure, arms)], (), {})
    drawn = [(line.label, [(kibibytes, mean.mean) for kibibytes, mean in line.points]) for line in lines]
    assert drawn == [
        ("Transformer-XL", [(1.0, 0.2), (4.0, 0.5)]),
        ("Transformer-XL, shift", [(1.0, 0.9)]),
    ]


def test_memories_of_other_papers_have_an_arm_for_each_rate():
    variants = {variant.name: variant for variant in MQAR.list_variants()}
    for memory in ALL_MEMORIES:
        if memory.is_built_in or memory.name == "memory tokens":
            continue
        arms = [variant for name, variant in variants.items() if name.startswith(f"{memory.arm}-128")]
        fast, slow = arms
        assert slow.settings["learning_rate"] == fast.settings["learning_rate"] / 3
        for arm in arms:
            # A memory that attends in its own way has no token shift, and neither has its rival.
            rival = variants[arm.rival]
            assert rival.settings["model"] == "transformer-xl"
            assert rival.settings["token_shift"] == arm.settings["token_shift"]
            assert rival.settings["mem_len"] == 128


@pytest.mark.parametrize("name", ["keydiff-128-shift", "r-kv-128-shift", "gated-deltanet-128", "dms-128"])
def test_memories_of_other_papers_have_the_bytes_of_128_keys(name):
    [variant] = [variant for variant in MQAR.list_variants() if variant.name == name]
    model = variant.arm(mqar_run(256)).config.model
    n_shifted = 1 if model.token_shift else 0
    n_positions = 128 + n_shifted  # of 64 numbers in each of two layers
    assert memory_facts(model)["state_bytes"] == n_positions * 64 * 2 * 4
