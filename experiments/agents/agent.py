"""An agent: a core that remembers, with a head for its policy and one for the value of what it observes; and
the settings of its training."""

from dataclasses import asdict, dataclass, field, fields
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

from memformers import CoreConfig, LayerMemory, Memory, MemoryCore
from memformers.common.fields import Checked, Count, Share
from memformers.models.config import ModelConfig
from memformers.models.core import CoreOutput
from memformers.training.config import TrainConfig

POLICY_GAIN = 0.01
"""Of the first weights of the policy: small, so that all actions begin equally likely."""
VALUE_GAIN = 1.0


@dataclass(frozen=True)
class AgentSettings(Checked):
    """What a TrainConfig doesn't have; its tokens are steps of environments, ``batch_size`` is how many there
    are, and ``model.segment_len`` is the window."""

    task: str = "t-maze-20"
    """See Environments."""
    core: Literal["memory", "gru"] = "memory"
    """What remembers: the transformer of ``model``, or nn.GRU of the same width."""
    entropy: Share = 0.05
    """The weight of the policy's entropy."""
    evaluated: Count = 256
    """Episodes of the evaluation."""


@dataclass(frozen=True)
class AgentRun(TrainConfig):
    agent: AgentSettings = field(kw_only=True)

    @property
    def is_gru(self) -> bool:
        return self.agent.core == "gru"


class Agent(nn.Module):
    """F features to a policy over A actions and a value."""

    def __init__(self, run: AgentRun, n_features: int, n_actions: int):
        super().__init__()
        # The same first weights whatever the process has drawn before.
        torch.manual_seed(run.seed)
        D = run.model.d_model
        self.core: MemoryCore | GRUCore
        if run.is_gru:
            self.core = GRUCore(n_features, D)
        else:
            self.core = MemoryCore(core_config(run.model, n_features))
        self.policy = nn.Linear(D, n_actions)
        self.value = nn.Linear(D, 1)
        for head, gain in ((self.policy, POLICY_GAIN), (self.value, VALUE_GAIN)):
            nn.init.orthogonal_(head.weight, gain)
            nn.init.zeros_(head.bias)

    def heads(self, output: Tensor) -> tuple[Categorical, Tensor]:
        """The policy and the values ``[…]`` of the core's ``output [… D]``."""
        policy = Categorical(logits=self.policy(output), validate_args=False)
        return policy, self.value(output)[..., 0]


def core_config(model: ModelConfig, n_features: int) -> CoreConfig:
    """The settings that a language model and a core share, with features in place of tokens."""
    settings = asdict(model)
    shared = {field.name: settings[field.name] for field in fields(CoreConfig) if field.name in settings}
    return CoreConfig(**shared, d_input=n_features)


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
        # Step by step, since an episode can begin at any of them.
        outputs = []
        for features, begins in zip(x.split(1), doc_starts, strict=True):
            state = state.masked_fill(begins[:, None], 0.0)
            output, state = self.gru(features, state)
            outputs.append(output)
        return CoreOutput(torch.cat(outputs), self.memory_of(state.detach()), x.new_zeros(()))
