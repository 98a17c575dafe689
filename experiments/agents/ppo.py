"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) of an agent that remembers, in one
file: acting, advantages, learning and evaluation.

All B environments act for a window of S steps, which is a segment: the memory from before the window, a
value, is what learning starts from too, so the probabilities of the actions are the same in both until the
weights change. Episodes begin and end anywhere in a window (``doc_starts``). The observation after an
episode's last step is read as one more step, whose value is what a time limit has cut off; what is done there
has no effect and is not learned from.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from experiments.agents.environments import Environments
from memformers import CoreConfig, Memory, MemoryCore, Stepper
from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, Positive, Share
from memformers.common.files import config_from_dict
from memformers.models.core import CoreOutput
from memformers.training.config import TrainConfig, train_config_from

MOST_APART = 1e-5
"""How far log-probabilities when learning may be from those when acting, with the same weights; where an
action's is below -1, as a fraction of the lowest of its step, since float32 rounds logits in proportion."""
EVALUATED_SEED = 2**31
"""Where the seeds of evaluated episodes begin; those of training runs are below."""


@dataclass(frozen=True)
class AgentSettings(Checked):
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
        return cls(train_config_from(train, source), agent)


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


class GRUStepper:
    """Reads step by step, as a [`Stepper`][] does."""

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

    def stepper(self, batch: int, memory: Memory) -> Stepper | GRUStepper:
        """What reads ``batch`` streams step by step, from ``memory`` on."""
        if isinstance(self.core, MemoryCore):
            return Stepper(self.core, batch, memory)
        return GRUStepper(self.core, memory)


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
    """A window of this number of ``steps`` from ``place`` on, and the place after it."""
    seen, begins, ended, memory = place
    agent.eval()  # once, and not by the stepper at every step
    stepper, read = agent.stepper(environments.number, memory), []
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
    agent.train()
    advantage = advantages(window, how.discount, how.trace)
    returns, apart = advantage + window.values, 0.0
    for epoch in range(how.epochs):
        for number, streams in enumerate(torch.randperm(run.train.batch_size).chunk(how.minibatches)):
            memory = window.memory.streams(streams)
            parts = (x[:, streams] for x in window[1:-1])
            own = Window._make((memory, *parts, window.last_value[streams]))
            output, _, reconstruction = agent.core(own.seen, memory, own.doc_starts)
            policy, values = agent.heads(output)
            change = (policy.log_prob(own.actions) - own.log_probs)[own.counts]
            if epoch == number == 0:  # the weights are those that acted
                size = -policy.logits.detach().amin(-1).clamp(max=-1)[own.counts]
                apart = (change.detach().abs() / size).max().item()
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
            norm = nn.utils.clip_grad_norm_(agent.parameters(), run.train.optim.max_grad_norm)
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
    """The mean return, length and share of successes of the same number of episodes of each stream, with the
    likeliest actions; ``control`` changes the memory before each window."""
    B = run.train.batch_size
    agent.eval()
    environments, episodes = Environments(run.agent.task, B), Episodes(B)
    seen, memory = environments.reset(EVALUATED_SEED + run.train.seed), agent.core.initial(B)
    ended, done = torch.zeros(B, dtype=torch.bool), torch.zeros(B, dtype=torch.int64)
    begins, wanted = ~ended, -(-run.agent.evaluated // B)
    while (done < wanted).any():
        stepper = agent.stepper(B, control(memory) if control else memory)
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
