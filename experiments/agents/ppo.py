"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) of an agent that remembers, in one
file: acting, advantages, learning, the training of a run, and its evaluation.

All B environments act for a window of S steps, which is a segment: the memory from before the window, a
value, is what learning starts from too, so the probabilities of the actions are the same in both until the
weights change. Episodes begin and end anywhere in a window (``doc_starts``). The observation after an
episode's last step is read as one more step, whose value is what a time limit has cut off; what is done there
has no effect and is not learned from.

``python -m experiments.agents.ppo FOLDER`` trains the run that ``FOLDER/config.json`` describes.
"""

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributions import Categorical

from experiments.agents.environments import Environments
from memformers import CoreConfig, Memory, MemoryCore
from memformers.common.atomic_dir import (
    atomic_dir,
    check_manifest,
    newest_that_loads,
    numbered,
    remove,
    remove_leftovers,
)
from memformers.common.command_line import plain_errors
from memformers.common.errors import UserError
from memformers.common.fields import Count, Positive, Share, check_fields
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.common.machine import describe_environment, git_commit, peak_memory
from memformers.evaluation.memory_ablation import UNTOUCHED, controls_of
from memformers.models.config import memory_facts
from memformers.models.core import CoreOutput
from memformers.models.memory import with_streams
from memformers.runs.folder import CHECKPOINTS, CONFIG, FACTS, METRICS, RESULT
from memformers.tracking.recorder import Tracking
from memformers.training.checkpoints import Checkpoint, load_tensors, optimizer_tensors
from memformers.training.config import TrainConfig
from memformers.training.resume import alone_in, cut_metrics
from memformers.training.state import TrainingState, random_states

MOST_APART = 1e-5
"""How far log-probabilities when learning may be from those when acting, with the same weights; of those
below -1, as a fraction of them, since float32 rounds in proportion."""
WEIGHTS, MOMENTS, STATE = "model.safetensors", "optimizer.safetensors", "state.json"
EVALUATED_SEED = 2**31
"""Where the seeds of evaluated episodes begin; those of trainings are below."""


@dataclass(frozen=True)
class AgentSettings:
    """The settings of a run that are not in its TrainConfig, in which tokens are steps of environments,
    ``batch_size`` is how many there are, and ``model.segment_len`` is the window."""

    task: str = "t-maze-20"
    """What the environments are ([`experiments.agents.environments.Environments`][])."""
    core: Literal["memory", "gru"] = "memory"
    """What remembers: the memory transformer of ``model``, or an nn.GRU as wide."""
    discount: Share = 0.99
    """γ: the worth of a reward that comes a step later."""
    trace: Share = 0.95
    """λ of the advantages' estimate (GAE)."""
    clip: Positive = 0.2
    """How far the ratio of a probability to that when acting may move."""
    epochs: Count = 4
    """How many times each window is learned from."""
    minibatches: Count = 4
    """In how many parts of the environments."""
    entropy: Share = 0.05
    """The weight of the policy's entropy."""
    value: Share = 0.5
    """The weight of the error of the values."""
    evaluated: Count = 256
    """Episodes of the evaluation."""

    def __post_init__(self) -> None:
        """Raise UserError for settings that are out of range."""
        check_fields(self)


@dataclass(frozen=True)
class AgentRun:
    """One arm's training from one seed."""

    train: TrainConfig
    agent: AgentSettings

    @classmethod
    def of(cls, settings: Mapping[str, Any], source: str) -> "AgentRun":
        """The run of these ``settings``; UserError, with their ``source``, if there is no such run."""
        train = dict(settings)
        agent = config_from_dict(AgentSettings, train.pop("agent", {}), source)
        return cls(config_from_dict(TrainConfig, train, source), agent)


class GRUCore(nn.Module):
    """An ``nn.GRU`` from features F to D that is called as a [`MemoryCore`][]; its state is the memory."""

    def __init__(self, F: int, D: int):
        super().__init__()
        self.gru = nn.GRU(F, D)

    def initial(self, batch: int) -> Memory:
        """The state of ``batch`` streams at the beginning."""
        return Memory((torch.zeros(1, batch, self.gru.hidden_size),))

    def forward(self, x: Tensor, memory: Memory, doc_starts: Tensor) -> CoreOutput:
        """Features ``x [S, B, F]`` to outputs ``[S, B, D]``, with the state reset where an episode begins."""
        (state,), outputs = memory.mem, []
        for features, begins in zip(x.split(1), doc_starts, strict=True):
            output, state = self.gru(features, state * ~begins[:, None])
            outputs.append(output)
        return CoreOutput(torch.cat(outputs), Memory((state.detach(),)), x.new_zeros(()))

    def stepper(self, batch: int, memory: Memory) -> "GRUStepper":
        """What reads step by step, from ``memory`` on."""
        return GRUStepper(self, memory)


class GRUStepper:
    """Reads step by step, as a core's stepper."""

    def __init__(self, core: GRUCore, memory: Memory):
        self.core, self.state = core, memory

    def step(self, x: Tensor, doc_starts: Tensor) -> Tensor:
        """One step ``[B, F]`` to its output ``[B, D]``."""
        output, self.state, _ = self.core(x[None], self.state, doc_starts[None])
        return output[0]

    def memory(self) -> Memory:
        """The state after the last step."""
        return self.state


class Agent(nn.Module):
    """A core, a policy over A actions, and a value."""

    def __init__(self, run: AgentRun, F: int, A: int):
        super().__init__()
        torch.manual_seed(run.train.seed)
        model = asdict(run.train.model)
        shared = {each.name: model[each.name] for each in fields(CoreConfig) if each.name in model}
        config = CoreConfig(**shared, d_input=F)
        D = config.d_model
        self.core: MemoryCore | GRUCore = GRUCore(F, D) if run.agent.core == "gru" else MemoryCore(config)
        self.policy, self.value = nn.Linear(D, A), nn.Linear(D, 1)
        for head, gain in ((self.policy, 0.01), (self.value, 1.0)):
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)

    def heads(self, output: Tensor) -> tuple[Categorical, Tensor]:
        """The policy and the values ``[…]`` for the core's outputs ``[…, D]``."""
        return Categorical(logits=self.policy(output), validate_args=False), self.value(output)[..., 0]


class Place(NamedTuple):
    """Where B streams are between two windows."""

    seen: Tensor
    """What the next step reads, ``[B, F]``."""
    begins: Tensor
    """Whether an episode begins with it, boolean ``[B]``."""
    ended: Tensor
    """Whether it is what was seen after an episode's last step, boolean ``[B]``."""
    memory: Memory


class Window(NamedTuple):
    """A window of S steps of B streams: each ``[S, B]`` if not said otherwise."""

    memory: Memory
    """From before it."""
    seen: Tensor
    """``[S, B, F]``."""
    doc_starts: Tensor
    counts: Tensor
    """Whether the action had an effect."""
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    last_value: Tensor
    """Of what is seen after it, ``[B]``."""


@torch.no_grad()
def act(agent: Agent, environments: Environments, place: Place, steps: int) -> tuple[Window, Place]:
    """A window of so many ``steps`` from ``place`` on, and the place after it."""
    seen, begins, ended, memory = place
    stepper, read = agent.core.stepper(environments.number, memory), []
    for _ in range(steps):
        policy, value = agent.heads(stepper.step(seen, begins))
        action = policy.sample()
        step = environments.step(action)
        read.append((seen, begins, ~ended, action, policy.log_prob(action), value, *step[1:]))
        seen, begins, ended = step.seen, ended, step.terminated | step.truncated
    after = stepper.memory()
    _, last_value = agent.heads(stepper.step(seen, begins))
    columns = [torch.stack(column) for column in zip(*read, strict=True)]
    return Window._make((memory, *columns, last_value)), Place(seen, begins, ended, after)


def advantages(window: Window, discount: float, trace: float) -> Tensor:
    """Generalized advantage estimates ``[S, B]`` (Schulman et al. 2016, arXiv 1506.02438). An end has no
    value after it; a time limit has the value of what was seen then."""
    found, advantage, next_value = [], torch.zeros_like(window.last_value), window.last_value
    for t in reversed(range(len(window.values))):
        goes_on = ~(window.terminated[t] | window.truncated[t])
        error = window.rewards[t] + discount * next_value * ~window.terminated[t] - window.values[t]
        advantage = error + discount * trace * goes_on * advantage
        next_value = window.values[t]
        found.append(advantage)
    return torch.stack(found[::-1])


def learn(agent: Agent, optimizer: torch.optim.Optimizer, window: Window, run: AgentRun) -> dict[str, float]:
    """Improve ``agent`` by what a window has shown; returns the means of its losses.

    Raises UserError for a loss that is not finite, before it reaches the weights.
    """
    how, losses = run.agent, []
    advantage = advantages(window, how.discount, how.trace)
    returns, apart = advantage + window.values, 0.0
    for epoch in range(how.epochs):
        for number, streams in enumerate(torch.randperm(run.train.batch_size).chunk(how.minibatches)):
            memory = with_streams(window.memory, lambda x, chosen=streams: x[:, chosen])  # type: ignore[misc]
            parts = (x[:, streams] for x in window[1:-1])
            own = Window._make((memory, *parts, window.last_value[streams]))
            output, _, reconstruction = agent.core(own.seen, memory, own.doc_starts)
            policy, values = agent.heads(output)
            before = own.log_probs[own.counts]
            change = policy.log_prob(own.actions)[own.counts] - before
            if epoch == number == 0:  # the weights are those that acted
                apart = (change.detach() / before.abs().clamp(min=1)).abs().max().item()
                assert apart <= MOST_APART, f"acting and learning differ by {apart} in log-probability"
            ratio, gain = change.exp(), advantage[:, streams][own.counts]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy_loss = -torch.min(ratio * gain, ratio.clamp(1 - how.clip, 1 + how.clip) * gain).mean()
            value_loss = (values - returns[:, streams])[own.counts].square().mean() / 2
            entropy = policy.entropy()[own.counts].mean()
            loss = policy_loss - how.entropy * entropy + how.value * value_loss + reconstruction
            if not loss.isfinite():
                raise UserError(f"the loss became {loss.item()}; use a lower learning rate.")
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(agent.parameters(), run.train.max_grad_norm)
            optimizer.step()
            losses.append(torch.stack((policy_loss, value_loss, entropy, reconstruction, norm)).detach())
    names = ("loss.policy", "loss.value", "entropy", "reconstruction_loss.train", "gradient_norm")
    means = torch.stack(losses).mean(0).tolist()
    return {**dict(zip(names, means, strict=True)), "log_probability.apart": apart}


class Episodes:
    """The returns and lengths of the episodes of B streams, as they end."""

    def __init__(self, batch: int):
        self.running = torch.zeros(2, batch)
        self.ended: list[tuple[int, float, float, float]] = []
        """Stream, return, length, and 1 for a success, else 0: it terminated with a reward."""

    def add(self, rewards: Tensor, terminated: Tensor, truncated: Tensor, counts: Tensor) -> None:
        """Note a step of each stream, all ``[B]``."""
        self.running += torch.stack((rewards, torch.ones_like(rewards))) * counts
        for b in (terminated | truncated).nonzero()[:, 0].tolist():
            self.ended.append((b, *self.running[:, b].tolist(), float(terminated[b] & (rewards[b] > 0))))
            self.running[:, b] = 0

    def means(self) -> dict[str, float]:
        """Over the episodes that ended, which are then forgotten."""
        columns, self.ended = [*zip(*self.ended, strict=True)], []
        return {
            name: sum(x) / len(x)
            for name, x in zip(("return", "length", "success"), columns[1:], strict=False)
        }


@torch.no_grad()
def evaluate(agent: Agent, run: AgentRun, control: Any = None) -> dict[str, float]:
    """The mean return, length and share of successes of as many episodes of each stream, with the likeliest
    actions; ``control`` changes the memory before each window."""
    B = run.train.batch_size
    environments, episodes = Environments(run.agent.task, B), Episodes(B)
    seen, memory = environments.reset(EVALUATED_SEED + run.train.seed), agent.core.initial(B)
    ended, done = torch.zeros(B, dtype=torch.bool), torch.zeros(B, dtype=torch.int64)
    begins, wanted = ~ended, -(-run.agent.evaluated // B)
    while (done < wanted).any():
        stepper = agent.core.stepper(B, control(memory) if control else memory)
        for _ in range(run.train.model.segment_len):
            policy, _ = agent.heads(stepper.step(seen, begins))
            step = environments.step(policy.logits.argmax(-1))
            # Those that have ended all of theirs no longer count: quick ones would otherwise count more.
            due = done < wanted
            episodes.add(step.reward, step.terminated & due, step.truncated & due, ~ended & due)
            seen, begins, ended = step.seen, ended, step.terminated | step.truncated
            done += ended
        memory = stepper.memory()
    environments.close()
    return episodes.means()


def train_agent(folder: Path) -> None:
    """Train the run that ``config.json`` in ``folder`` describes, from its newest checkpoint if it has one;
    the environments then start over. Evaluate it, and write ``result.json``.

    Raises UserError for another run's config, and for environments that fail, after a checkpoint.
    """
    settings = read_json(folder / CONFIG)
    run = AgentRun.of(settings, str(folder / CONFIG))
    train, B, S = run.train, run.train.batch_size, run.train.model.segment_len
    environments = Environments(run.agent.task, B)
    agent = Agent(run, environments.features, environments.actions)
    optimizer = torch.optim.AdamW(agent.parameters(), train.learning_rate, eps=1e-5, weight_decay=0.0)
    state = restore(folder, agent, TrainingState((optimizer,)))
    is_gru = run.agent.core == "gru"
    nothing = {"memory": {"one_layer": 0, "all_layers": 0}, "keys": 0, "attention_operations": 0}
    device = torch.device("cpu")
    facts = {
        "corpus": {"name": run.agent.task, "source": "acted in"},
        "parameters": sum(p.numel() for p in agent.parameters()),
        **(nothing if is_gru else memory_facts(train.model)),
        "environment": describe_environment(device),
        "commit": git_commit(),
    }
    write_json(folder / FACTS, facts)
    episodes = Episodes(B)
    with Tracking(folder, folder.resolve().name, {**settings, **facts}) as track:
        seen = environments.reset(train.seed + state.tokens)
        nowhere = torch.zeros(B, dtype=torch.bool)
        place = Place(seen, ~nowhere, nowhere, agent.core.initial(B))
        saved = time.monotonic()
        while state.tokens < train.tokens:
            optimizer.param_groups[0]["lr"] = train.learning_rate * (1 - state.tokens / train.tokens)
            begun = time.perf_counter()
            try:
                window, place = act(agent, environments, place, S)
                acted = time.perf_counter()
                losses = learn(agent, optimizer, window, run)
            except UserError:
                save(folder, agent, state)
                raise
            ended = time.perf_counter()
            for step in zip(window.rewards, window.terminated, window.truncated, window.counts, strict=True):
                episodes.add(*step)
            state.step += 1
            state.tokens += B * S
            state.seconds += ended - begun
            if state.step % train.log_every == 0:
                record = {f"{name}.train": value for name, value in episodes.means().items()}
                speeds = {"acting": acted - begun, "learning": ended - acted, "tokens": ended - begun}
                record |= losses | {f"{name}_per_second": B * S / seconds for name, seconds in speeds.items()}
                track.record({"tokens": state.tokens, "seconds": state.seconds, **record})
            if time.monotonic() - saved > 60 * train.checkpoint_minutes:
                save(folder, agent, state)
                saved = time.monotonic()
        save(folder, agent, state)
        begun = time.perf_counter()
        found = {UNTOUCHED: evaluate(agent, run)}
        if not is_gru:
            controls = controls_of(train.model.layer_lengths)
            found |= {name: evaluate(agent, run, control) for name, control in controls.items()}
        state.evaluation_seconds += time.perf_counter() - begun
        success = {"success.valid": found[UNTOUCHED]["success"]}
        track.record({"tokens": state.tokens, "seconds": state.seconds, **success})
    untouched = found.pop(UNTOUCHED)
    memory = {"peak_memory_bytes": peak_memory(device)}
    result = {**state.progress, **memory, **untouched, "controls": found}
    print(f"{folder.name}: {result['success']:.1%} of {run.agent.task} in {state.seconds:.0f} s", flush=True)
    write_json(folder / RESULT, result)


def save(folder: Path, agent: Agent, state: TrainingState) -> None:
    """Write a checkpoint, and delete those before it."""
    path = folder / CHECKPOINTS / f"{state.tokens:012}"
    records = len((folder / METRICS).read_bytes().splitlines()) if (folder / METRICS).exists() else 0
    with atomic_dir(path) as temporary:
        save_file(agent.state_dict(), temporary / WEIGHTS)
        save_file(optimizer_tensors(agent, state.optimizers), temporary / MOMENTS)
        write_json(temporary / STATE, {**state.progress, "records": records, "random": random_states()})
    for old in numbered(path.parent)[1:]:
        remove(old)


def restore(folder: Path, agent: Agent, state: TrainingState) -> TrainingState:
    """The newest checkpoint of ``folder``, put into ``agent`` and the optimizers of ``state``; ``state`` if
    there is none."""

    def read(path: Path) -> tuple[Checkpoint, int]:
        check_manifest(path)
        numbers = read_json(path / STATE, {"records": int, "random": dict[str, Any]})
        records, random = numbers.pop("records"), numbers.pop("random")
        found = config_from_dict(TrainingState, numbers | {"optimizers": state.optimizers}, str(path / STATE))
        return Checkpoint(load_tensors(path / WEIGHTS), load_tensors(path / MOMENTS), random, found), records

    remove_leftovers(folder / CHECKPOINTS)
    if not (folders := numbered(folder / CHECKPOINTS)):
        cut_metrics(folder, 0)
        return state
    path, (checkpoint, records) = newest_that_loads(folders, read)
    cut_metrics(folder, records)
    print(
        f"continues at step {checkpoint.state.tokens:,}, from {path}; the environments start over", flush=True
    )
    return checkpoint.restore(agent, state.optimizers)


if __name__ == "__main__":
    with plain_errors(), alone_in(folder := Path(sys.argv[1])):
        train_agent(folder)
