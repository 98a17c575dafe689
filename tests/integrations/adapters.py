"""Models of transformers around small ones of ours, rows with padding, and trainings of them. Import it after
``pytest.importorskip("transformers")``."""

from dataclasses import asdict

import torch
import torch.nn.functional as F
import transformers

from memformers.integrations import huggingface
from memformers.integrations.huggingface import MemformerConfig, MemformerForCausalLM
from tests.builders import SMALL, small_lm

PROMPTS = [torch.arange(n) % 11 for n in (3, 24, 10, 3)]
MASK = torch.tensor([[0] * (24 - len(p)) + [1] * len(p) for p in PROMPTS])
PADDED = torch.stack([F.pad(p, (24 - len(p), 0), value=999) for p in PROMPTS])
ROWS = huggingface.rows_in_order(torch.arange(560) ** 2 % 11, batch_size=4, length=14)


def wrapped(model="compressive", **changes):
    """A model of transformers, and the MemoryLM in it, which doesn't always say the same."""
    lm = small_lm(model, **changes)
    lm.embed.weight.data.mul_(5)
    lm.head.weight.data.mul_(20)
    adapter = MemformerForCausalLM(MemformerConfig(**asdict(lm.config)))
    adapter.model = lm
    return adapter.eval(), lm.eval()


def small_adapter(**changes):
    torch.manual_seed(0)
    return MemformerForCausalLM(MemformerConfig(**asdict(SMALL) | {"model": "compressive"} | changes))


def trained(rows, model=None, steps=6, collator=None, loss=None, *, kind=transformers.Trainer, **settings):
    """The losses that a Trainer logs, and the Trainer."""
    settings = {
        "per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "max_steps": steps,
        "learning_rate": 1e-2, "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 0.0,
        "logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True,
    } | settings  # fmt: skip
    arguments = transformers.TrainingArguments(output_dir="trained", **settings)
    trainer = kind(model or small_adapter(), arguments, collator, rows, rows[:4], compute_loss_func=loss)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer
