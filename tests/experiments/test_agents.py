"""PPO on a core with memory: its mazes, its arithmetic, what it refuses, and what it keeps."""

import sys
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("gymnasium", reason="pip install '.[agents]'")

from experiments.agents import ppo
from experiments.agents.__main__ import BASE, Agents
from experiments.agents.ppo import Actor, Agent, AgentSettings, AgentTask, Environments, learn, train_agent
from experiments.agents.t_maze import FORWARD, TMaze
from memformers.common.fields import replace_nested
from memformers.common.files import read_json, write_json
from memformers.comparison import experiment
from memformers.runs.metrics import read_metrics
from tests import processes
from tests.processes import run_module

MODEL = replace(BASE.model, d_model=8, n_layers=1, d_ff=8, segment_len=5, mem_len=4, c_mem_len=4)
TINY = replace_nested(BASE, model=MODEL, batch_size=6, max_tokens=120, log_every=1)
ARMS = {arm.name: arm for arm in Agents.listed()}


def settings(name="transformer-xl", task="t-maze-3"):
    base = replace(TINY, agent=AgentSettings(task, evaluated=12))
    return asdict(ARMS[name].arm(base).config)


def walk(turn, steps):
    """The signs of mazes, and what a walker saw, earned and ended, who turns as ``turn`` says of the sign."""
    maze = TMaze(32, 4)
    seen, _ = maze.reset(seed=0)
    signs, walked = seen.copy(), []
    for _ in range(steps):
        at_junction, actions = seen[:, 2] > 0, seen[:, 2].astype(int) * FORWARD
        actions[at_junction] = turn(signs[at_junction])
        seen, *rest = maze.step(actions)
        walked.append((seen, *rest[:3]))
    return signs, walked


def test_a_t_maze_pays_for_the_turn_that_the_sign_said_and_shows_it_once():
    signs, steps = walk(lambda sign: 1 + sign[:, 1], 5)
    assert (set(signs[:, :2].sum(1)), set(signs[:, 1])) == ({1}, {0, 1})
    assert not any(seen[:, :2].any() for seen, *_ in steps)
    *before, (_, reward, terminated, _) = steps
    assert not any(x.any() for step in before for x in step[1:])
    assert (reward * terminated == 1).all()
    _, steps = walk(lambda sign: 2 - sign[:, 1], 6)
    assert (steps[4][2] & (steps[4][1] == 0)).all()
    assert (steps[5][0][:, :2].sum(1) == 1).all(), "the step after an end begins anew, whatever the action"


def test_a_walker_who_stands_still_pays_and_is_cut_off():
    maze = TMaze(3, 4)
    maze.reset(seed=0)
    steps = [maze.step(torch.tensor([1, 2, 1]).numpy()) for _ in range(16)]
    assert all((step[1] == -1 / 4).all() for step in steps)
    assert [step[3].all() for step in steps] == [False] * 15 + [True]
    assert not any(step[2].any() for step in steps)


def test_advantages_have_no_value_after_an_end_and_that_of_what_was_seen_at_a_time_limit(monkeypatch):
    values = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    no, yes = torch.zeros(4, 1, dtype=torch.bool), torch.tensor([[False], [True], [False], [False]])
    window = ppo.Window(*[None] * 6, values, torch.ones(4, 1), no, no, torch.tensor([16.0]))
    g = t = 0.5
    monkeypatch.setattr(ppo, "DISCOUNT", g)
    monkeypatch.setattr(ppo, "TRACE", t)
    last = [1 + g * 8 - 4 + g * t * (1 + g * 16 - 8), 1 + g * 16 - 8]
    second = 1 + g * 4 - 2
    for changed, expected in (
        ({}, [1 + g * 2 - 1 + g * t * (second + g * t * last[0]), second + g * t * last[0]]),
        ({"truncated": yes}, [1 + g * 2 - 1 + g * t * second, second]),
        ({"terminated": yes}, [1 + g * 2 - 1 + g * t * (1 - 2), 1 - 2]),
    ):
        assert ppo.advantages(window._replace(**changed))[:, 0].tolist() == expected + last


def beginning(name="compressive", task="t-maze-3"):
    """An untrained agent in its environments, and its run."""
    run = AgentTask().read_config(settings(name, task), "here")
    mazes = Environments(task, 6)
    agent = Agent(run, mazes.features, mazes.actions)
    return agent, run, Actor(agent, mazes, 0)


@pytest.mark.parametrize("name", ["none", "gru", "transformer-xl", "compressive-gated"])
def test_probabilities_when_learning_are_those_when_acting_wherever_episodes_begin(name):
    agent, run, actor = beginning(name)
    optimizer, starts = torch.optim.AdamW(agent.parameters(), 1e-2), []
    for _ in range(8):
        before = [p.clone() for p in agent.parameters()]
        window = actor.act(5)
        policy, _ = agent.heads(agent.core(window.seen, window.memory, window.doc_starts).output)
        torch.testing.assert_close(policy.log_prob(window.actions), window.log_probs, rtol=0, atol=1e-5)
        learn(agent, optimizer, window, run)
        assert any(not torch.equal(p, q) for p, q in zip(before, agent.parameters(), strict=True))
        starts.append(window.doc_starts)
        ended = window.terminated | window.truncated
        assert torch.equal(window.counts[1:], ~ended[:-1])
        assert torch.equal(window.doc_starts[2:], ended[:-2])
    assert torch.stack(starts).any(dim=(0, 2)).all(), "episodes begin at every step of a window"


class Countdown(TMaze):
    """Episodes of ``lengths`` steps, each of which earns 1, and 5 more after its end."""

    lengths = torch.tensor([2, 2, 2, 3, 3, 10**9])

    def reset(self, **options):
        self.n_steps = torch.zeros(6, dtype=torch.int64)
        return super().reset(**options)

    def step(self, actions):
        begins = self.n_steps == self.lengths
        self.n_steps = torch.where(begins, 0, self.n_steps + 1)
        ended = self.n_steps == self.lengths
        return super().step(actions)[0], (1 + 4 * begins).numpy(), ended.numpy(), (ended & False).numpy(), {}


def test_each_stream_counts_the_same_number_of_episodes_and_those_that_never_end_are_failures(monkeypatch):
    monkeypatch.setattr(ppo, "make", lambda task, number: Countdown(number, 3))
    monkeypatch.setattr(ppo, "MAX_STEPS", 20)
    agent, run, _ = beginning()
    measured = ppo.evaluate(agent, run)
    episodes, steps = 12, 2 * (3 * 2 + 2 * 3)
    assert measured["success"] == pytest.approx(10 / episodes)
    assert measured["length"] == measured["return"] == pytest.approx((steps + 40) / episodes)


class Broken(TMaze):
    """A maze that fails at its ninth step."""

    how, n_steps = "", 0

    def step(self, actions):
        seen, *others = super().step(actions)
        self.n_steps += 1
        if self.n_steps == 9 and self.how == "raises":
            raise ZeroDivisionError("no\nmore")
        seen[2, 1] = float("nan") if self.n_steps == 9 and self.how == "nan" else seen[2, 1]
        return seen, *others


@pytest.mark.parametrize(
    ("how", "message"), [("raises", "t-maze-3 raised an error at step 9: ZeroDivisionError: no more; fix"),
                         ("nan", "t-maze-3 returned numbers that are not finite at step 9; fix it.")],
)  # fmt: skip
def test_environments_that_fail_get_one_line_and_what_was_learned_is_kept(
    how, message, tmp_path, monkeypatch
):
    write_json(tmp_path / "config.json", settings())
    monkeypatch.setattr(Broken, "how", how)
    monkeypatch.setattr(ppo, "make", lambda task, number: Broken(number, 3))
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


def test_whatever_is_observed_becomes_numbers_and_a_missing_package_is_named(monkeypatch):
    lake = Environments("FrozenLake-v1", 3)
    assert lake.reset(0).tolist() == [[1.0] + [0.0] * 15] * 3
    assert lake.step(torch.tensor([0, 1, 2]))[0].shape == (3, lake.features)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ValueError, match=r"gymnasium.* pip install '\.\[agents\]'"):
        Environments("t-maze-3", 1)


def test_the_experiment_trains_each_arm_on_each_task_and_reports_them(tmp_path, monkeypatch):
    task = SimpleNamespace(module=AgentTask.module, train=train_agent)
    monkeypatch.setattr(processes, "OTHER_TASKS", [task])
    monkeypatch.setattr(experiment, "run_modules", processes.train_here)
    monkeypatch.setattr("experiments.agents.__main__.BASE", TINY)
    monkeypatch.setattr("experiments.agents.__main__.AgentSettings", partial(AgentSettings, evaluated=6))
    chosen = ("gru", "transformer-xl", "compressive")
    Agents(out=tmp_path, tasks=("t-maze-2", "t-maze-3"), arms=chosen, steps=60, entropy=0.01, seeds=1).run()
    run = tmp_path / "t-maze-2" / "compressive"
    assert read_json(run / "config.json")["agent"]["entropy"] == 0.01
    assert [r["tokens"] for r in read_metrics(run)] == [30, 60, 60]
    assert 0 <= read_json(run / "result.json")["success"] <= 1
    rows = read_json(tmp_path / "results.json")["results"]
    assert tuple(row["arm"] for row in rows if "label" in row) == chosen
    assert all(row["t-maze-3"]["n"] == 1 for row in rows)
    swapped = {row["arm"] for row in rows if "t-maze-2, successes with slots swapped" in row}
    assert swapped == {"compressive"}
    assert "## Returns" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "figures" / "agents.svg").is_file()
    assert (tmp_path / "t-maze-2" / "report.html").is_file()


@pytest.mark.long
def test_quick_solves_a_t_maze_with_memory_that_is_guessed_without(tmp_path):
    ended = run_module("experiments.agents", "--quick", "--out", tmp_path / "run")
    assert ended.code == 0, ended.err
    results = read_json(tmp_path / "run" / "results.json")["results"]
    success = {row["arm"]: row["t-maze-16"]["mean"] for row in results if "label" in row}
    assert min(success["transformer-xl"], success["compressive"]) >= 0.95
    assert 0.3 < success["none"] < 0.7
