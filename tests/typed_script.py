"""A user's program. Type checkers know what public names return: test_user_script.py runs mypy on it."""

import torch
from typing_extensions import assert_type

from memformers import (
    CoreOutput,
    LMOutput,
    Memory,
    MemoryCore,
    MemoryLM,
    ModelConfig,
    Stepper,
    TrainConfig,
    TrainedModel,
    generate,
    train,
)

model = MemoryLM(ModelConfig(model="compressive", vocab_size=65, d_model=32, n_layers=1))
tokens = torch.randint(65, (9, 2))  # [S, B]
assert_type(model(tokens), LMOutput)
scores, memory, auxiliary_loss = model(tokens[:-1], None, tokens[1:])
assert_type(scores.loss, torch.Tensor)
assert_type(memory, Memory)
(scores.loss + auxiliary_loss).backward()  # type: ignore[no-untyped-call]  # PyTorch's

core = MemoryCore(4, 32)
assert_type(core(torch.rand(8, 2, 4)), CoreOutput)
features, memory = core(torch.rand(8, 2, 4), memory=None, return_loss=False)
assert_type(features, torch.Tensor)

for token in generate(model, tokens, max_new_tokens=2):
    assert_type(token, torch.Tensor)
assert_type(Stepper(core, batch=2).step(torch.rand(2, 4)), torch.Tensor)


def train_on(path: str) -> MemoryLM:
    run = train(TrainConfig(data=path), "runs/typed")
    assert_type(run, TrainedModel)
    assert_type(run.tokenizer.encode("a"), torch.Tensor)
    return run.model
