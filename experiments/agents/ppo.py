"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) of an agent that remembers.

``python -m experiments.agents.ppo FOLDER`` trains the run that ``FOLDER/config.json`` describes.

All B environments act for a window of S steps, which is a segment. Learning starts from the memory from
before it, so the probabilities of actions are the same until the weights change. Episodes begin and end
anywhere in a window (``doc_starts``). The observation after an episode's last step is read as one more step,
whose value is what a time limit has cut off; what is done there has no effect and is not learned from.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from experiments.agents.agent import Agent, AgentRun
from experiments.agents.environments import Environments
from memformers import Memory, MemoryCore, Stepper
from memformers.common.errors import UserError
from memformers.common.files import read_json, write_json
from memformers.common.machine import describe_environment, git_commit, peak_memory
from memformers.comparison.task import Task, train_alone
from memformers.evaluation.controls import controls_of
from memformers.models.config import NetworkConfig
from memformers.models.facts import memory_facts
from memformers.models.io import save_tensors
from memformers.runs.folder import CONFIG, FACTS, RESULT, alone_in
from memformers.runs.plan import TaskInfo
from memformers.tracking.recorder import Tracking
from memformers.training.state import TrainingState

# The settings of PPO, as in the paper's code, but for the weight of the entropy and the learning rate.
DISCOUNT = 0.99
"""γ of the advantages."""
TRACE = 0.95
"""λ of the advantages."""
CLIP = 0.2
"""How far the ratio of an action's probability to that when acting may move from 1."""
EPOCHS = 4
"""How many times each window is learned from."""
MINIBATCHES = 4
"""Parts of a window's streams, one for each step of the optimizer."""
VALUE_WEIGHT = 0.5
"""The weight of the error of the values."""

# Evaluation.
EVALUATED_SEED = 2**31
"""The first seed of evaluated episodes."""
MAX_STEPS = 10_000
"""Steps for each episode; those that have not ended then are failures."""


@dataclass(frozen=True)
class AgentTask(Task[AgentRun]):
    """Training runs that act in environments, which measure the share of episodes that end in success."""

    name = "agent"
    config = AgentRun
    resumes = False
    module = "experiments.agents.ppo"
    reporter = "experiments.agents.__main__"
    info = TaskInfo(
        results=("success", "controls"),
        memory_settings=("agent.core",),
        measure={
            "label": "episodes that succeed",
            "of": "success",
            "form": ".1f",
            "unit": " %",
            "unit_of_differences": " points",
            "scale": 100.0,
            "better": 1,
        },
        curves={
            "success.train": "episodes that succeed (share)",
            "success.valid": "episodes that succeed, likeliest actions (share)",
            "return.train": "rewards of an episode",
            "length.train": "steps of an episode",
        },
    )

    def network(self, config: AgentRun) -> NetworkConfig | None:
        return None if config.is_gru else config.model

    def find_data(self, runs: Mapping[str, AgentRun], folder: Path) -> dict[str, Any]:
        """Nothing but whether there are such environments."""
        for task in {run.agent.task for run in runs.values()}:
            Environments(task, 1).envs.close()
        return {}

    def train(self, folder: Path) -> None:
        with alone_in(folder):
            train_agent(folder)


class Window(NamedTuple):
    """A window of S steps of B streams, ``[S, B]`` each, but ``observations [S, B, F]``; ``memory`` is from
    before it, ``last_value [B]`` of what is observed after it. ``counts``: whether an action had an
    effect."""

    memory: Memory
    observations: Tensor
    doc_starts: Tensor
    counts: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    last_value: Tensor

    def streams(self, numbers: Tensor) -> "Window":
        """The window of the streams with these ``numbers`` alone."""
        memory, *columns, last_value = self
        parts = [column[:, numbers] for column in columns]
        return Window._make((memory.streams(numbers), *parts, last_value[numbers]))


class Actor:
    """An agent in its environments, from the beginning of episodes on."""

    def __init__(self, agent: Agent, environments: Environments, seed: int):
        B = environments.number
        self.agent = agent
        self.environments = environments
        self.memory = agent.core.initial(B)
        self.observation = environments.reset(seed)  # [B, F]
        # Of the observation, [B]: whether it follows an episode's last step, and whether it begins one.
        self.has_ended = torch.zeros(B, dtype=torch.bool)
        self.begins = ~self.has_ended

    @torch.no_grad()
    def act(self, n_steps: int, *, likeliest: bool = False) -> Window:
        agent = self.agent
        agent.eval()  # once, and not by the stepper at every step
        memory = self.memory
        core = agent.core
        stepper = None
        if isinstance(core, MemoryCore):
            stepper = Stepper(core, len(self.observation), memory)

        def read_observation() -> Tensor:
            if stepper:
                return stepper.step(self.observation, self.begins)
            output, self.memory, _ = core(self.observation[None], self.memory, self.begins[None])
            return output[0]

        steps = []
        for _ in range(n_steps):
            policy, value = agent.heads(read_observation())
            action = policy.logits.argmax(-1) if likeliest else policy.sample()
            observation, reward, terminated, truncated = self.environments.step(action)
            read = (self.observation, self.begins, ~self.has_ended)
            decided = (action, policy.log_prob(action), value)
            steps.append((*read, *decided, reward, terminated, truncated))
            # The step after an end begins a new episode.
            self.observation = observation
            self.begins = self.has_ended
            self.has_ended = terminated | truncated

        # The observation after the window is read for its value; the next window reads it again.
        next_memory = stepper.memory() if stepper else self.memory
        _, last_value = agent.heads(read_observation())
        self.memory = next_memory
        columns = [torch.stack(column) for column in zip(*steps, strict=True)]
        return Window._make((memory, *columns, last_value))


def advantages(window: Window, discount: float = DISCOUNT, trace: float = TRACE) -> Tensor:
    """Generalized advantage estimates ``[S, B]`` (Schulman et al. 2016, arXiv 1506.02438)."""
    by_step = []
    advantage = torch.zeros_like(window.last_value)
    next_value = window.last_value
    for t in reversed(range(len(window.values))):
        terminated = window.terminated[t]
        continues = ~(terminated | window.truncated[t])
        # A time limit isn't an end: the value of what was observed then stands for the rewards cut off.
        error = window.rewards[t] + discount * next_value * ~terminated - window.values[t]
        advantage = error + discount * trace * continues * advantage
        next_value = window.values[t]
        by_step.append(advantage)
    return torch.stack(by_step[::-1])


def learn(agent: Agent, optimizer: torch.optim.Optimizer, window: Window, run: AgentRun) -> dict[str, float]:
    """Improve ``agent`` by what a window has shown; returns the means of its losses."""
    agent.train()
    advantage = advantages(window)
    returns = advantage + window.values
    losses = []
    for _ in range(EPOCHS):
        for streams in torch.randperm(run.batch_size).chunk(MINIBATCHES):
            batch = window.streams(streams)
            loss, parts = ppo_loss(agent, batch, advantage[:, streams], returns[:, streams], run)
            if not loss.isfinite():
                raise UserError(f"the loss became {loss.item()}; use a lower learning rate.")
            optimizer.zero_grad()
            loss.backward()
            parts["gradient_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), run.optim.max_grad_norm)
            optimizer.step()
            losses.append(torch.stack([*parts.values()]).detach())
    means = torch.stack(losses).mean(0).tolist()
    return dict(zip(parts, means, strict=True))


def ppo_loss(
    agent: Agent, batch: Window, advantage: Tensor, returns: Tensor, run: AgentRun
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a ``batch`` with its ``advantage`` and ``returns``, ``[S, B]`` each, and its parts by the
    names of their metrics. Only steps that count are learned from."""
    counts = batch.counts
    output, _, reconstruction = agent.core(batch.observations, batch.memory, batch.doc_starts)
    policy, values = agent.heads(output)

    # The clipped objective (equation 7), with advantages normalized over the batch.
    ratio = (policy.log_prob(batch.actions) - batch.log_probs)[counts].exp()
    gain = advantage[counts]
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
    policy_loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()

    value_loss = (values - returns)[counts].square().mean() / 2
    entropy = policy.entropy()[counts].mean()
    loss = policy_loss - run.agent.entropy * entropy + VALUE_WEIGHT * value_loss + reconstruction
    parts = {
        "loss.policy": policy_loss,
        "loss.value": value_loss,
        "entropy": entropy,
        "reconstruction_loss.train": reconstruction,
    }
    return loss, parts


def count_steps(window: Window) -> Tensor:
    """Of each step: its reward, whether it counts, whether it is a success, an end with a reward, and whether
    it is an end: ``[4, S, B]``."""
    success = window.terminated & (window.rewards > 0)
    ends = window.terminated | window.truncated
    return torch.stack((window.rewards * window.counts, window.counts, success, ends))


def keep_memory(memory: Memory) -> Memory:
    return memory


def evaluate(
    agent: Agent,
    run: AgentRun,
    control: Callable[[Memory], Memory] = keep_memory,
    max_steps: int = MAX_STEPS,
) -> dict[str, float]:
    """The mean return, length and share of successes of equally many episodes of each stream, with the
    likeliest actions; ``control`` changes the memory before each window. Episodes of a stream that take more
    than ``max_steps`` each are failures."""
    B = run.batch_size
    n_episodes = -(-run.agent.evaluated // B)  # of each stream
    environments = Environments(run.agent.task, B)
    actor = Actor(agent, environments, EVALUATED_SEED + run.seed)
    n_ended = torch.zeros(B)
    totals = torch.zeros(3)  # of rewards, steps and successes
    while (n_ended < n_episodes).any() and environments.n_steps < max_steps * n_episodes:
        actor.memory = control(actor.memory)
        window = actor.act(run.model.segment_len, likeliest=True)
        for step in count_steps(window).unbind(1):
            # Quick streams would otherwise count more.
            is_due = n_ended < n_episodes
            totals += (step[:3] * is_due).sum(-1)
            n_ended += step[3] * is_due
    environments.envs.close()
    means = (totals / (B * n_episodes)).tolist()
    return dict(zip(("return", "length", "success"), means, strict=True))


def train_agent(folder: Path) -> None:
    """Train the run in ``folder``, evaluate it, and write ``result.json``. Weights are always kept."""
    run = AgentTask().read_config(read_json(folder / CONFIG), str(folder / CONFIG))
    environments = Environments(run.agent.task, run.batch_size)
    agent = Agent(run, environments.n_features, environments.n_actions)
    optimizer = torch.optim.AdamW(agent.parameters(), run.optim.learning_rate, eps=1e-5, weight_decay=0.0)
    state = TrainingState((optimizer,))
    facts = facts_of(run, agent)
    write_json(folder / FACTS, facts)
    with Tracking(folder, folder.resolve().name, {**asdict(run), **facts}) as track:
        actor = Actor(agent, environments, run.seed)
        try:
            train_steps(actor, run, state, track.record)
        finally:
            save_tensors(agent.state_dict(), folder / "model.safetensors")

        # The evaluation, with the memory as it is and under each control.
        start = time.perf_counter()
        scores = evaluate(agent, run)
        under_controls = {}
        if not run.is_gru:
            for name, control in controls_of(run.model.memory_sizes).items():
                under_controls[name] = evaluate(agent, run, control)
        state.evaluation_seconds += time.perf_counter() - start
        track.record({"tokens": state.tokens, "seconds": state.seconds, "success.valid": scores["success"]})
    result = {
        **state.progress,
        "peak_memory_bytes": peak_memory(torch.device("cpu")),
        **scores,
        "controls": under_controls,
    }
    print(f"{folder.name}: {scores['success']:.1%} of {run.agent.task} in {state.seconds:.0f} s", flush=True)
    write_json(folder / RESULT, result)


def facts_of(run: AgentRun, agent: Agent) -> dict[str, Any]:
    """What is known of a run before its training."""
    memory: dict[str, Any] = {
        "memory": {"one_layer": 0, "all_layers": 0},
        "keys": 0,
        "attention_operations": 0,
    }
    if not run.is_gru:
        memory = memory_facts(run.model)
    return {
        "corpus": {"name": run.agent.task, "source": "acted in"},
        "parameters": sum(parameter.numel() for parameter in agent.parameters()),
        **memory,
        "environment": describe_environment(torch.device("cpu")),
        "commit": git_commit(),
    }


def train_steps(
    actor: Actor, run: AgentRun, state: TrainingState, record: Callable[[dict[str, Any]], None]
) -> None:
    """Act and learn in turn until all steps are taken."""
    agent = actor.agent
    [optimizer] = state.optimizers
    tokens_per_window = run.batch_size * run.model.segment_len
    since_record = torch.zeros(4)  # rewards, steps, successes and ends
    while state.tokens < run.max_tokens:
        share_left = 1 - state.tokens / run.max_tokens
        optimizer.param_groups[0]["lr"] = run.optim.learning_rate * share_left
        start = time.perf_counter()
        window = actor.act(run.model.segment_len)
        losses = learn(agent, optimizer, window, run)
        seconds = time.perf_counter() - start
        since_record += count_steps(window).sum((1, 2))
        state.step += 1
        state.tokens += tokens_per_window
        state.seconds += seconds
        if state.step % run.evaluation.log_every == 0:
            n_ended = since_record[3].clamp(min=1)
            mean_return, mean_length, success = (since_record[:3] / n_ended).tolist()
            record(
                {
                    "tokens": state.tokens,
                    "seconds": state.seconds,
                    "return.train": mean_return,
                    "length.train": mean_length,
                    "success.train": success,
                    **losses,
                    "tokens_per_second": tokens_per_window / seconds,
                }
            )
            since_record.zero_()


if __name__ == "__main__":
    train_alone(AgentTask())
