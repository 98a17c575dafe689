"""A run of an agent: one training run by PPO, from its config to the files in its folder.

``python -m experiments.agents.run FOLDER`` trains the run that ``FOLDER/config.json`` describes.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from experiments.agents.environments import Environments
from experiments.agents.ppo import Agent, AgentRun, Episodes, Place, act, evaluate, learn
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
from memformers.common.files import config_from_dict, read_json, write_json
from memformers.common.machine import describe_environment, git_commit, peak_memory
from memformers.evaluation.evaluate import BASELINE
from memformers.evaluation.memory_ablation import controls_of
from memformers.models.base import memory_facts
from memformers.models.io import save_tensors
from memformers.runs.folder import CHECKPOINTS, CONFIG, FACTS, METRICS, RESULT
from memformers.tracking.recorder import Tracking
from memformers.training.checkpoints import optimizer_tensors
from memformers.training.resume import alone_in, cut_metrics
from memformers.training.state import TrainingState, random_states, set_random_states

WEIGHTS, MOMENTS, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


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
    optimizer = torch.optim.AdamW(agent.parameters(), train.optim.learning_rate, eps=1e-5, weight_decay=0.0)
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
            optimizer.param_groups[0]["lr"] = train.optim.learning_rate * (1 - state.tokens / train.tokens)
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
            if state.step % train.evaluation.log_every == 0:
                record = {f"{name}.train": value for name, value in episodes.means().items()}
                speeds = {"acting": acted - begun, "learning": ended - acted, "tokens": ended - begun}
                record |= losses | {f"{name}_per_second": B * S / seconds for name, seconds in speeds.items()}
                track.record({"tokens": state.tokens, "seconds": state.seconds, **record})
            if time.monotonic() - saved > 60 * train.checkpoint.checkpoint_minutes:
                save(folder, agent, state)
                saved = time.monotonic()
        save(folder, agent, state)
        begun = time.perf_counter()
        found = {BASELINE: evaluate(agent, run)}
        if not is_gru:
            controls = controls_of(train.model.memory_sizes)
            found |= {name: evaluate(agent, run, control) for name, control in controls.items()}
        state.evaluation_seconds += time.perf_counter() - begun
        success = {"success.valid": found[BASELINE]["success"]}
        track.record({"tokens": state.tokens, "seconds": state.seconds, **success})
    untouched = found.pop(BASELINE)
    memory = {"peak_memory_bytes": peak_memory(device)}
    result = {**state.progress, **memory, **untouched, "controls": found}
    print(f"{folder.name}: {result['success']:.1%} of {run.agent.task} in {state.seconds:.0f} s", flush=True)
    write_json(folder / RESULT, result)


def save(folder: Path, agent: Agent, state: TrainingState) -> None:
    """Write a checkpoint, and delete those before it."""
    path = folder / CHECKPOINTS / f"{state.tokens:012}"
    records = len((folder / METRICS).read_bytes().splitlines()) if (folder / METRICS).exists() else 0
    with atomic_dir(path) as temporary:
        save_tensors(agent.state_dict(), temporary / WEIGHTS)
        save_tensors(optimizer_tensors(agent, state.optimizers), temporary / MOMENTS)
        write_json(temporary / STATE, {**state.progress, "records": records, "random": random_states()})
    for old in numbered(path.parent)[1:]:
        remove(old)


def restore(folder: Path, agent: Agent, state: TrainingState) -> TrainingState:
    """The newest checkpoint of ``folder``, put into ``agent`` and the optimizers of ``state``; ``state`` if
    there is none."""

    def read(path: Path) -> tuple[TrainingState, int]:
        check_manifest(path)
        numbers = read_json(path / STATE, {"records": int, "random": dict[str, Any]})
        records, random = numbers.pop("records"), numbers.pop("random")
        found = config_from_dict(TrainingState, numbers | {"optimizers": state.optimizers}, str(path / STATE))
        agent.load_state_dict(load_file(path / WEIGHTS))
        moments = load_file(path / MOMENTS)
        for name, tensor in optimizer_tensors(agent, state.optimizers).items():
            tensor.copy_(moments[name])
        set_random_states(random)
        return found, records

    remove_leftovers(folder / CHECKPOINTS)
    if not (folders := numbered(folder / CHECKPOINTS)):
        cut_metrics(folder, 0)
        return state
    path, (found, records) = newest_that_loads(folders, read)
    cut_metrics(folder, records)
    print(f"continues at step {found.tokens:,}, from {path}; the environments start over", flush=True)
    return found


if __name__ == "__main__":
    with plain_errors(), alone_in(folder := Path(sys.argv[1])):
        train_agent(folder)
