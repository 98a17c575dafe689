"""PPO on a core with memory: its mazes, its arithmetic, what it refuses, and what it keeps."""

import sys
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("gymnasium", reason="pip install '.[agents]'")

from experiments.agents import environments as environments_module
from experiments.agents import ppo
from experiments.agents.__main__ import BASE, Agents
from experiments.agents.agent import Agent, AgentSettings
from experiments.agents.environments import Environments
from experiments.agents.ppo import Actor, AgentTask, learn, train_agent
from experiments.agents.t_maze import FORWARD, TMaze
from memformers.common.fields import replace_nested
from memformers.common.files import read_json, write_json
from memformers.comparison import experiment
from memformers.runs.metrics import read_metrics
from tests import processes
from tests.processes import run_module

MODEL = replace(BASE.model, d_model=8, n_layers=1, d_ff=8, segment_len=5, mem_len=4, c_mem_len=4)
TINY = replace_nested(BASE, model=MODEL, batch_size=6, max_tokens=120, log_every=1)
VARIANTS = {variant.name: variant for variant in Agents.list_variants()}


def settings(name="transformer-xl", task="t-maze-3"):
    base = replace(TINY, agent=AgentSettings(task, evaluated=12))
    return asdict(VARIANTS[name].arm(base).config)


def untrained_actor(name="compressive", task="t-maze-3"):
    """An untrained agent in six environments, and its run."""
    run = AgentTask().read_config(settings(name, task), "here")
    mazes = Environments(task, 6)
    agent = Agent(run, mazes.n_features, mazes.n_actions)
    return Actor(agent, mazes, 0), run


# The T-maze.


def walk(turn, n_steps):
    """Walk to the junctions of 32 mazes, and ``turn`` there by what was seen first, ``[B, 4]``. Returns what
    was seen first, and for each step what was seen, earned, ended and cut off."""
    maze = TMaze(32, 4)
    seen, _ = maze.reset(seed=0)
    first_seen = seen.copy()
    steps = []
    for _ in range(n_steps):
        at_junction = seen[:, 2] > 0
        actions = seen[:, 2].astype(int) * FORWARD
        actions[at_junction] = turn(first_seen[at_junction])
        seen, reward, terminated, truncated, _ = maze.step(actions)
        steps.append((seen, reward, terminated, truncated))
    return first_seen, steps


def right_turn(first_seen):
    return 1 + first_seen[:, 1]


def wrong_turn(first_seen):
    return 2 - first_seen[:, 1]


def test_the_sign_of_a_t_maze_is_shown_once():
    first_seen, steps = walk(right_turn, 5)
    assert set(first_seen[:, :2].sum(1)) == {1}
    assert set(first_seen[:, 1]) == {0, 1}
    for seen, *_ in steps:
        assert not seen[:, :2].any()


def test_a_t_maze_pays_for_the_turn_of_the_sign():
    _, [*corridor, (_, reward, terminated, _)] = walk(right_turn, 5)
    assert (reward * terminated == 1).all()
    for _, *earned_and_ended in corridor:
        assert not any(values.any() for values in earned_and_ended)


def test_after_a_wrong_turn_a_new_episode_begins():
    _, steps = walk(wrong_turn, 6)
    _, reward, terminated, _ = steps[4]
    assert (terminated & (reward == 0)).all()
    next_seen, *_ = steps[5]
    assert (next_seen[:, :2].sum(1) == 1).all(), "a sign is shown, whatever the action was"


def test_a_walker_who_stands_still_pays_and_is_cut_off():
    maze = TMaze(3, 4)
    maze.reset(seed=0)
    turns = torch.tensor([1, 2, 1]).numpy()
    for number in range(1, 17):
        _, reward, terminated, truncated, _ = maze.step(turns)
        assert (reward == -1 / 4).all()
        assert not terminated.any()
        assert truncated.all() == (number == 16)


# Learning.


def test_advantages_end_with_an_episode_but_not_at_a_time_limit():
    """The second of four steps ends with the value of nothing, or of what was seen at a time limit."""
    no = torch.zeros(4, 1, dtype=torch.bool)
    at_second = torch.tensor([[False], [True], [False], [False]])
    values = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    rewards = torch.ones(4, 1)
    unused = [None] * 6
    window = ppo.Window(*unused, values, rewards, no, no, last_value=torch.tensor([16.0]))
    g = t = 0.5
    fourth = 1 + g * 16 - 8
    third = 1 + g * 8 - 4 + g * t * fourth
    second_error = 1 + g * 4 - 2
    first_error = 1 + g * 2 - 1
    for changes, second in (
        ({}, second_error + g * t * third),
        ({"truncated": at_second}, second_error),
        ({"terminated": at_second}, 1 - 2),
    ):
        advantages = ppo.advantages(window._replace(**changes), discount=g, trace=t)
        assert advantages[:, 0].tolist() == [first_error + g * t * second, second, third, fourth]


@pytest.mark.parametrize("name", ["none", "gru", "transformer-xl", "compressive-gated"])
def test_probabilities_when_learning_are_those_when_acting(name):
    """Wherever episodes begin, which is at every step of a window."""
    actor, run = untrained_actor(name)
    agent = actor.agent
    optimizer = torch.optim.AdamW(agent.parameters(), 1e-2)
    starts = []
    for _ in range(8):
        window = actor.act(5)
        policy, _ = agent.heads(agent.core(window.observations, window.memory, window.doc_starts).output)
        torch.testing.assert_close(policy.log_prob(window.actions), window.log_probs, rtol=0, atol=1e-5)

        old_weights = [parameter.clone() for parameter in agent.parameters()]
        learn(agent, optimizer, window, run)
        assert any(not torch.equal(p, q) for p, q in zip(old_weights, agent.parameters(), strict=True))

        ended = window.terminated | window.truncated
        assert torch.equal(window.counts[1:], ~ended[:-1])
        assert torch.equal(window.doc_starts[2:], ended[:-2])
        starts.append(window.doc_starts)
    assert torch.stack(starts).any(dim=(0, 2)).all()


# Evaluation.


class Countdown(TMaze):
    """Episodes of ``lengths`` steps, each of which earns 1, and 5 more after its end."""

    lengths = torch.tensor([2, 2, 2, 3, 3, 10**9])

    def reset(self, **options):
        self.ages = torch.zeros(6, dtype=torch.int64)
        return super().reset(**options)

    def step(self, actions):
        begins = self.ages == self.lengths
        self.ages = torch.where(begins, 0, self.ages + 1)
        ended = self.ages == self.lengths
        seen, *_ = super().step(actions)
        never = torch.zeros_like(ended)
        return seen, (1 + 4 * begins).numpy(), ended.numpy(), never.numpy(), {}


def test_each_stream_counts_equally_many_episodes(monkeypatch):
    """Those that never end are failures."""
    monkeypatch.setattr(environments_module, "make", lambda task, number: Countdown(number, 3))
    actor, run = untrained_actor()
    scores = ppo.evaluate(actor.agent, run, max_steps=20)
    n_episodes = 12
    n_steps = 2 * (3 * 2 + 2 * 3)
    assert scores["success"] == pytest.approx(10 / n_episodes)
    assert scores["length"] == scores["return"] == pytest.approx((n_steps + 40) / n_episodes)


# Failures.


class Broken(TMaze):
    """A maze that fails at its ninth step."""

    failure = ""
    n_calls = 0

    def step(self, actions):
        seen, *answer = super().step(actions)
        self.n_calls += 1
        if self.n_calls == 9:
            if self.failure == "raises":
                raise ZeroDivisionError("no\nmore")
            seen[2, 1] = float("nan")
        return seen, *answer


@pytest.mark.parametrize(
    ("failure", "message"),
    [("raises", "t-maze-3 raised an error at step 9: ZeroDivisionError: no more; fix"),
     ("nan", "t-maze-3 returned numbers that are not finite at step 9; fix it.")],
)  # fmt: skip
def test_an_environment_that_fails_gets_one_line(failure, message, tmp_path, monkeypatch):
    """What was learned before is kept."""
    write_json(tmp_path / "config.json", settings())
    monkeypatch.setattr(Broken, "failure", failure)
    monkeypatch.setattr(environments_module, "make", lambda task, number: Broken(number, 3))
    with pytest.raises(ValueError, match=message) as error:
        train_agent(tmp_path)
    assert "\n" not in str(error.value)
    assert (tmp_path / "model.safetensors").stat().st_size > 1_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--tasks", "t-maze-long"], "expected a T-maze as t-maze-LENGTH"),
     (["--tasks", "NoSuchMaze-v0"], "the environment 'NoSuchMaze-v0' can't be made"),
     (["--tasks", "nowhere:Maze-v0"], "can't be made: No module named 'nowhere'"),
     (["--tasks", "Pendulum-v1"], "with Discrete actions, got"),
     (["--arms", "lstm"], "arm 'lstm' is unknown; there are none, gru, transformer-xl")],
)  # fmt: skip
def test_what_cant_be_trained_is_refused(arguments, message, tmp_path):
    assert run_module("experiments.agents", "--out", tmp_path / "run", *arguments).says(message)


def test_whatever_is_observed_becomes_numbers():
    lake = Environments("FrozenLake-v1", 3)
    assert lake.reset(0).tolist() == [[1.0] + [0.0] * 15] * 3
    observations, *_ = lake.step(torch.tensor([0, 1, 2]))
    assert observations.shape == (3, lake.n_features)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r"gymnasium.* pip install '\.\[agents\]'"):
        Environments("t-maze-3", 1)


# The experiment.


def test_the_experiment_reports_each_arm_on_each_task(tmp_path, monkeypatch):
    task = SimpleNamespace(module=AgentTask.module, train=train_agent)
    monkeypatch.setattr(processes, "OTHER_TASKS", [task])
    monkeypatch.setattr(experiment, "run_modules", processes.train_here)
    monkeypatch.setattr("experiments.agents.__main__.BASE", TINY)
    monkeypatch.setattr("experiments.agents.__main__.AgentSettings", partial(AgentSettings, evaluated=6))
    arms = ("gru", "transformer-xl", "compressive")
    Agents(out=tmp_path, tasks=("t-maze-2", "t-maze-3"), arms=arms, steps=60, entropy=0.01, seeds=1).run()

    run = tmp_path / "t-maze-2" / "compressive"
    assert read_json(run / "config.json")["agent"]["entropy"] == 0.01
    assert [record["tokens"] for record in read_metrics(run)] == [30, 60, 60]
    assert 0 <= read_json(run / "result.json")["success"] <= 1

    rows = read_json(tmp_path / "results.json")["results"]
    assert tuple(row["arm"] for row in rows if "label" in row) == arms
    assert all(row["t-maze-3"]["n"] == 1 for row in rows)
    with_slots = {row["arm"] for row in rows if "t-maze-2, successes with slots swapped" in row}
    assert with_slots == {"compressive"}

    assert "## Returns" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "figures" / "agents.svg").is_file()
    assert (tmp_path / "t-maze-2" / "report.html").is_file()


@pytest.mark.long
def test_quick_solves_a_t_maze_with_memory_alone(tmp_path):
    ended = run_module("experiments.agents", "--quick", "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    results = read_json(tmp_path / "run" / "results.json")["results"]
    success = {row["arm"]: row["t-maze-16"]["mean"] for row in results if "label" in row}
    assert min(success["transformer-xl"], success["compressive"]) >= 0.95
    assert 0.3 < success["none"] < 0.7
