"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) of an agent that remembers.

``python -m experiments.agents.ppo FOLDER`` trains the run that ``FOLDER/config.json`` describes.

All B environments act for a window of S steps, which is a segment. Learning starts from the memory from
before it, so the probabilities of actions are the same until the weights change. Episodes begin and end
anywhere in a window (``doc_starts``). The observation after an episode's last step is read as one more step,
whose value is what a time limit has cut off; what is done there has no effect and is not learned from.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from memformers import CoreConfig, LayerMemory, Memory, MemoryCore, Stepper
from memformers.common.errors import UserError
from memformers.common.fields import Checked, Count, Share
from memformers.common.files import read_json, write_json
from memformers.common.machine import describe_environment, git_commit, peak_memory
from memformers.comparison.task import Task, train_alone
from memformers.evaluation.controls import controls_of
from memformers.models.config import NetworkConfig
from memformers.models.core import CoreOutput
from memformers.models.facts import memory_facts
from memformers.models.io import save_tensors
from memformers.runs.folder import CONFIG, FACTS, RESULT, alone_in
from memformers.runs.plan import TaskInfo
from memformers.tracking.recorder import Tracking
from memformers.training.config import TrainConfig
from memformers.training.state import TrainingState

DISCOUNT, TRACE, CLIP = 0.99, 0.95, 0.2
"""γ and λ of the advantages; how far the ratio of a probability to that when acting may move."""
EPOCHS, MINIBATCHES, VALUE = 4, 4, 0.5
"""How many times each window is learned from; in how many parts; the weight of the error of the values."""
EVALUATED_SEED, MAX_STEPS = 2**31, 10_000
"""The first seed of evaluated episodes; steps for each after which those that have not ended are failures."""
T_MAZE = "t-maze-"


@dataclass(frozen=True)
class AgentSettings(Checked):
    """What a TrainConfig doesn't have; its tokens are steps of environments, ``batch_size`` is how many there
    are, and ``model.segment_len`` is the window."""

    task: str = "t-maze-20"  # see Environments
    core: Literal["memory", "gru"] = "memory"  # what remembers: the transformer of model, or nn.GRU as wide
    entropy: Share = 0.05  # the weight of the policy's entropy
    evaluated: Count = 256  # episodes of the evaluation


@dataclass(frozen=True)
class AgentRun(TrainConfig):
    agent: AgentSettings = field(kw_only=True)


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
        return None if config.agent.core == "gru" else config.model

    def find_data(self, runs: Mapping[str, AgentRun], folder: Path) -> dict[str, Any]:
        """Nothing but whether there are such environments."""
        for task in {run.agent.task for run in runs.values()}:
            Environments(task, 1).envs.close()
        return {}

    def train(self, folder: Path) -> None:
        with alone_in(folder):
            train_agent(folder)


class Environments:
    """``number`` environments of a ``task`` side by side: ``t-maze-LENGTH``, or the id of any gymnasium
    environment that is observed as numbers and acted in by a choice of actions. After an episode's last
    observation, the next step begins another one, whatever its action is (gymnasium's ``NEXT_STEP``)."""

    def __init__(self, task: str, number: int):
        self.task, self.number, self.steps = task, number, 0
        try:
            self.envs = make(task, number)
        except Exception as error:  # whatever an environment of someone else raises
            message = f"the environment {task!r} can't be made: {' '.join(str(error).split())}"
            if isinstance(error, ImportError) and error.name in ("gymnasium", "minigrid"):
                message = f"{error.name} is not installed; use pip install '.[agents]' in a clone."
            raise UserError(message) from None
        seen, actions = self.envs.single_observation_space, self.envs.single_action_space
        if type(seen).__name__ != "Box" or type(actions).__name__ != "Discrete":
            raise UserError(
                f"expected {task} to be observed as numbers, with Discrete actions, got {seen} and {actions}."
            )
        self.features, self.actions = int(np.prod(seen.shape)), int(actions.n)
        self.first_action = int(actions.start)

    def reset(self, seed: int) -> Tensor:
        """Begin all episodes; what is seen, float32 ``[B, F]``."""
        return self.asked("reset", seed=seed)[0].view(self.number, self.features)

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Act: ``actions [B]``. What is seen then, float32 ``[B, F]``; rewards, ends and cut-offs ``[B]``."""
        self.steps += 1
        seen, rewards, ended, cut_off = self.asked("step", actions.numpy() + self.first_action)
        return seen.view(self.number, self.features), rewards, ended.bool(), cut_off.bool()

    def asked(self, method: str, *args: Any, **kwargs: Any) -> list[Tensor]:
        try:
            *answer, _ = getattr(self.envs, method)(*args, **kwargs)
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(f"{self.task} raised an error at step {self.steps}: {why}; fix it.") from error
        tensors = [torch.tensor(np.asarray(values), dtype=torch.float32) for values in answer]
        if not all(values.isfinite().all() for values in tensors):
            raise UserError(f"{self.task} returned numbers that are not finite at step {self.steps}; fix it.")
        return tensors


def make(task: str, number: int) -> Any:
    import gymnasium

    if task.startswith(T_MAZE):
        from experiments.agents.t_maze import TMaze

        length = task.removeprefix(T_MAZE)
        if not length.isdecimal() or int(length) < 1:
            raise UserError(f"expected a T-maze as {T_MAZE}LENGTH, such as {T_MAZE}20, got {task}.")
        return TMaze(number, int(length))
    wrappers = [gymnasium.wrappers.FlattenObservation]
    if task.startswith("MiniGrid"):
        from minigrid.wrappers import ImgObsWrapper, OneHotPartialObsWrapper  # which also registers them

        wrappers = [OneHotPartialObsWrapper, ImgObsWrapper, *wrappers]
    return gymnasium.make_vec(task, num_envs=number, vectorization_mode="sync", wrappers=wrappers)


class GRUCore(nn.Module):
    """An ``nn.GRU`` from features F to D that is called as a [`MemoryCore`][]; its state is the memory."""

    def __init__(self, F: int, D: int):
        super().__init__()
        self.gru = nn.GRU(F, D)

    def initial(self, batch: int) -> Memory:
        return self.memory_of(torch.zeros(1, batch, self.gru.hidden_size))

    def memory_of(self, state: Tensor) -> Memory:
        """The GRU's ``state [1, B, D]`` as a memory."""
        return Memory((LayerMemory(state, state[:0]),))

    def forward(self, x: Tensor, memory: Memory, doc_starts: Tensor) -> CoreOutput:
        """Features ``x [S, B, F]`` to outputs ``[S, B, D]``, with the state reset where an episode begins."""
        state = memory.layers[0].mem
        outputs = []
        for features, begins in zip(x.split(1), doc_starts, strict=True):
            output, state = self.gru(features, state * ~begins[:, None])
            outputs.append(output)
        return CoreOutput(torch.cat(outputs), self.memory_of(state.detach()), x.new_zeros(()))


class Agent(nn.Module):
    def __init__(self, run: AgentRun, F: int, A: int):
        super().__init__()
        torch.manual_seed(run.seed)
        model = asdict(run.model)
        shared = {field.name: model[field.name] for field in fields(CoreConfig) if field.name in model}
        config = CoreConfig(**shared, d_input=F)
        D = config.d_model
        self.core: MemoryCore | GRUCore = GRUCore(F, D) if run.agent.core == "gru" else MemoryCore(config)
        self.policy, self.value = nn.Linear(D, A), nn.Linear(D, 1)
        for head, gain in ((self.policy, 0.01), (self.value, 1.0)):
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)

    def heads(self, output: Tensor) -> tuple[Categorical, Tensor]:
        return Categorical(logits=self.policy(output), validate_args=False), self.value(output)[..., 0]


class Window(NamedTuple):
    """A window of S steps of B streams, ``[S, B]`` each, but ``seen [S, B, F]``; ``memory`` is from before
    it, ``last_value [B]`` of what is seen after it. ``counts``: whether an action had an effect."""

    memory: Memory
    seen: Tensor
    doc_starts: Tensor
    counts: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    rewards: Tensor
    terminated: Tensor
    truncated: Tensor
    last_value: Tensor


class Actor:
    """An agent in its environments, from the beginning of episodes on."""

    def __init__(self, agent: Agent, environments: Environments, seed: int):
        self.agent, self.environments, B = agent, environments, environments.number
        self.seen, self.memory = environments.reset(seed), agent.core.initial(B)
        self.ended = torch.zeros(B, dtype=torch.bool)  # whether it is what was seen after an episode's end
        self.begins = ~self.ended  # whether an episode begins with what is seen, [B]

    @torch.no_grad()
    def act(self, steps: int, *, likeliest: bool = False) -> Window:
        agent, memory, read = self.agent, self.memory, []
        agent.eval()  # once, and not by the stepper at every step
        core = agent.core
        stepper = Stepper(core, len(self.seen), memory) if isinstance(core, MemoryCore) else None

        def output() -> Tensor:
            if stepper:
                return stepper.step(self.seen, self.begins)
            output, self.memory, _ = core(self.seen[None], self.memory, self.begins[None])
            return output[0]

        for _ in range(steps):
            policy, value = agent.heads(output())
            action = policy.logits.argmax(-1) if likeliest else policy.sample()
            seen, reward, *ends = self.environments.step(action)
            row = (self.seen, self.begins, ~self.ended, action, policy.log_prob(action), value)
            read.append((*row, reward, *ends))
            self.seen, self.begins, self.ended = seen, self.ended, ends[0] | ends[1]
        after = stepper.memory() if stepper else self.memory
        _, last_value = agent.heads(output())
        self.memory = after
        columns = [torch.stack(column) for column in zip(*read, strict=True)]
        return Window._make((memory, *columns, last_value))


def advantages(window: Window) -> Tensor:
    """Generalized advantage estimates ``[S, B]`` (Schulman et al. 2016, arXiv 1506.02438)."""
    by_step, advantage, next_value = [], torch.zeros_like(window.last_value), window.last_value
    for t in reversed(range(len(window.values))):
        goes_on = ~(window.terminated[t] | window.truncated[t])
        error = window.rewards[t] + DISCOUNT * next_value * ~window.terminated[t] - window.values[t]
        advantage = error + DISCOUNT * TRACE * goes_on * advantage
        next_value = window.values[t]
        by_step.append(advantage)
    return torch.stack(by_step[::-1])


def learn(agent: Agent, optimizer: torch.optim.Optimizer, window: Window, run: AgentRun) -> dict[str, float]:
    """Improve ``agent`` by what a window has shown; returns the means of its losses."""
    losses, advantage = [], advantages(window)
    agent.train()
    returns = advantage + window.values
    for _ in range(EPOCHS):
        for streams in torch.randperm(run.batch_size).chunk(MINIBATCHES):
            memory = window.memory.streams(streams)
            parts = (x[:, streams] for x in window[1:-1])
            batch = Window._make((memory, *parts, window.last_value[streams]))
            output, _, reconstruction = agent.core(batch.seen, memory, batch.doc_starts)
            policy, values = agent.heads(output)
            ratio = (policy.log_prob(batch.actions) - batch.log_probs)[batch.counts].exp()
            gain = advantage[:, streams][batch.counts]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy_loss = -torch.min(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain).mean()
            value_loss = (values - returns[:, streams])[batch.counts].square().mean() / 2
            entropy = policy.entropy()[batch.counts].mean()
            loss = policy_loss - run.agent.entropy * entropy + VALUE * value_loss + reconstruction
            if not loss.isfinite():
                raise UserError(f"the loss became {loss.item()}; use a lower learning rate.")
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(agent.parameters(), run.optim.max_grad_norm)
            optimizer.step()
            losses.append(torch.stack((policy_loss, value_loss, entropy, reconstruction, norm)).detach())
    names = ("loss.policy", "loss.value", "entropy", "reconstruction_loss.train", "gradient_norm")
    return dict(zip(names, torch.stack(losses).mean(0).tolist(), strict=True))


def counted(window: Window) -> Tensor:
    """Reward, whether a step counts, success (an end with a reward), and end: ``[4, S, B]``."""
    success, ends = window.terminated & (window.rewards > 0), window.terminated | window.truncated
    return torch.stack((window.rewards * window.counts, window.counts, success, ends))


def evaluate(
    agent: Agent, run: AgentRun, control: Callable[[Memory], Memory] = lambda memory: memory
) -> dict[str, float]:
    """The mean return, length and share of successes of equally many episodes of each stream, with the
    likeliest actions; ``control`` changes the memory before each window."""
    B, S = run.batch_size, run.model.segment_len
    actor = Actor(agent, Environments(run.agent.task, B), EVALUATED_SEED + run.seed)
    done, wanted, total = torch.zeros(B), -(-run.agent.evaluated // B), torch.zeros(3)
    while (done < wanted).any() and actor.environments.steps < MAX_STEPS * wanted:
        actor.memory = control(actor.memory)
        for step in counted(actor.act(S, likeliest=True)).unbind(1):
            due = done < wanted  # quick streams would otherwise count more
            total += (step[:3] * due).sum(-1)
            done += step[3] * due
    actor.environments.envs.close()
    return dict(zip(("return", "length", "success"), (total / (B * wanted)).tolist(), strict=True))


def train_agent(folder: Path) -> None:
    """Train the run in ``folder``, evaluate it, and write ``result.json``. Weights are always kept."""
    run = AgentTask().read_config(read_json(folder / CONFIG), str(folder / CONFIG))
    B, S = run.batch_size, run.model.segment_len
    environments, is_gru = Environments(run.agent.task, B), run.agent.core == "gru"
    agent = Agent(run, environments.features, environments.actions)
    optimizer = torch.optim.AdamW(agent.parameters(), run.optim.learning_rate, eps=1e-5, weight_decay=0.0)
    state, device = TrainingState((optimizer,)), torch.device("cpu")
    no_memory = {"memory": {"one_layer": 0, "all_layers": 0}, "keys": 0, "attention_operations": 0}
    facts = {
        "corpus": {"name": run.agent.task, "source": "acted in"},
        "parameters": sum(p.numel() for p in agent.parameters()),
        **(no_memory if is_gru else memory_facts(run.model)),
        "environment": describe_environment(device),
        "commit": git_commit(),
    }
    write_json(folder / FACTS, facts)
    with Tracking(folder, folder.resolve().name, {**asdict(run), **facts}) as track:
        actor, seen = Actor(agent, environments, run.seed), torch.zeros(4)
        try:
            while state.tokens < run.max_tokens:
                left = 1 - state.tokens / run.max_tokens
                optimizer.param_groups[0]["lr"] = run.optim.learning_rate * left
                begun = time.perf_counter()
                window = actor.act(S)
                losses = learn(agent, optimizer, window, run)
                seconds = time.perf_counter() - begun
                seen += counted(window).sum((1, 2))  # since the last record
                state.step, state.tokens = state.step + 1, state.tokens + B * S
                state.seconds += seconds
                if state.step % run.evaluation.log_every == 0:
                    names = ("return.train", "length.train", "success.train")  # of an episode that ended
                    means = zip(names, (seen[:3] / seen[3].clamp(min=1)).tolist(), strict=True)
                    record = {"tokens": state.tokens, "seconds": state.seconds, **dict(means), **losses}
                    track.record(record | {"tokens_per_second": B * S / seconds})
                    seen.zero_()
        finally:
            save_tensors(agent.state_dict(), folder / "model.safetensors")
        begun, scores = time.perf_counter(), evaluate(agent, run)
        controls = {} if is_gru else controls_of(run.model.memory_sizes)
        under = {name: evaluate(agent, run, control) for name, control in controls.items()}
        state.evaluation_seconds += time.perf_counter() - begun
        track.record({"tokens": state.tokens, "seconds": state.seconds, "success.valid": scores["success"]})
    result = {**state.progress, "peak_memory_bytes": peak_memory(device), **scores, "controls": under}
    print(f"{folder.name}: {scores['success']:.1%} of {run.agent.task} in {state.seconds:.0f} s", flush=True)
    write_json(folder / RESULT, result)


if __name__ == "__main__":
    train_alone(AgentTask())
