"""What every model keeps, whatever it is built of: each test runs over the configurations below."""

import io
import math
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from memformers import AdaptiveConfig, CoreConfig, Memory, MemoryCore, MemoryLM, ModelConfig, Stepper
from memformers.evaluation.conformance import SMALL, assert_conforms
from memformers.models.layers import MemoryLayer
from memformers.models.registry import load_class
from tests.builders import fill_zeros
from tests.texts import documents, gradients, kept, read, same, split_starts, tokens

MEMORIES = Path(__file__).parents[2] / "experiments" / "memories"
Averages = load_class(f"{MEMORIES}/averages.py:Averages")


class OwnLayer(MemoryLayer):
    """A layer of a user, which may attend in any way, so that its keys are not cached."""

    def attend(self, *inputs):
        return super().attend(*inputs)


class ReadsAgain(Averages):
    """The same memory, without keys that are kept."""

    layer = OwnLayer


XL = {"model": "transformer-xl"}
COMPRESSIVE = {"model": "compressive"}
WAITS = {"positions": "learned", "mem_len": 1, "compression_rate": 4}
BY_LAYER = {"mem_len": (6, 4), "c_mem_len": (0, 3), "compression_rate": (2, 3)}
ADAPTIVE = {"embedding": "adaptive", "adaptive": AdaptiveConfig((3, 6), 2, None, True, True)}
DILATED = {"compression": "dilated", "compression_start": "mean"}
MAX = {"compression": "max", "compression_loss": "none"}
SHIFT = {"token_shift": True}
# Models that read or attend in their own way.
OWN_WAY = ("infini", "memory tokens", "averages, read again")
CONFIGS = {
    "no memory": {"model": "transformer"},
    "xl, learned, post-norm": XL | {"positions": "learned", "norm": "post"},
    "xl, same length": XL | {"same_length": True, "mem_len": (3, 8), "norm": "pre-without-final"} | SHIFT,
    "xl, by layer, gated": XL
    | {"mem_len": (0, 7), "gate": "gru", "clamp_len": 5, "position_features": 10}
    | SHIFT,
    "conv": COMPRESSIVE,
    "conv, learned, mem_len < rate": COMPRESSIVE | WAITS,
    "dilated, by layer": COMPRESSIVE | DILATED | BY_LAYER | SHIFT,
    "mean, gated": COMPRESSIVE | {"compression": "mean", "c_mem_len": (5, 2), "gate": "gru"},
    "bptt": COMPRESSIVE | {"compression_loss": "none", "bptt": 2, "dropout": 0.3} | SHIFT,
    "adaptive, tied, max": COMPRESSIVE | ADAPTIVE | MAX | {"norm": "post"} | SHIFT,
    "averages": {"model": Averages, "mem_len": 3} | SHIFT,
    "averages, read again": {"model": ReadsAgain, "memory_config": {"decay": 0.5}, "positions": "learned"},
    "memory tokens": {
        "model": f"{MEMORIES}/memory_tokens.py:MemoryTokens",
        "memory_config": {"tokens_of_memory": 3},
    },
    "infini": {"model": f"{MEMORIES}/infini.py:InfiniAttention"},
    "selective": {"model": "selective", "mem_len": (3, 8)} | SHIFT,
    "xl, flash": XL | {"kernel": "flash", "position_features": 4, "position_base": 50.0} | SHIFT,
    "conv, flash": COMPRESSIVE | {"kernel": "flash", "position_features": 6},
}
every_model = pytest.mark.parametrize("name", CONFIGS)
WITHOUT_MEM_LEN = ("no memory", "memory tokens", "infini")


def lm_of(name, **changes):
    """A model in eval mode in which no weight is zero."""
    return fill_zeros(MemoryLM(ModelConfig(**{**SMALL, **CONFIGS[name], **changes}))).eval()


def core_of(name, **changes):
    """A core in eval mode in which no weight is zero."""
    settings = {**SMALL, **CONFIGS[name], **changes}
    used = {field: value for field, value in settings.items() if field in CoreConfig.__dataclass_fields__}
    return fill_zeros(MemoryCore(CoreConfig(**used))).eval()


def random_starts(T, B=2):
    return torch.rand(T, B) < 0.15


def train_on(lm, forward, text, doc_starts=None, memory=None):
    """Losses, memories and gradients of a text in segments, as it is trained on."""
    S = lm.config.segment_len
    results = []
    for part, starts in zip(text.split(S), split_starts(doc_starts, text, S), strict=True):
        output = forward(part, memory, part.flip(0), doc_starts=starts)
        memory = output.memory
        loss = output.scores.loss
        total = loss + output.auxiliary_loss
        grads = torch.autograd.grad(total, list(lm.parameters()), allow_unused=True, materialize_grads=True)
        results += [loss, output.auxiliary_loss, *kept(memory), *grads]
    return results


def rotates(name):
    """Whether the flash kernel can compute the distances of this model."""
    return CONFIGS[name].get("positions") != "learned" and "clamp_len" not in CONFIGS[name]


@every_model
def test_a_model_passes_every_check_of_the_conformance_suite(name):
    assert_conforms(**CONFIGS[name])


@pytest.mark.parametrize("name", OWN_WAY)
def test_a_model_that_reads_in_its_own_way_has_no_token_shift(name):
    with pytest.raises(ValueError, match="reads or attends in its own way; use token_shift=False"):
        assert_conforms(**CONFIGS[name], token_shift=True)


@cache
def results_of_naive(name):
    """The weights of a model, a text with its documents, and what the naive kernel computes of it."""
    lm = lm_of(name, kernel="naive", dropout=0.0).train()
    text = tokens(30)
    doc_starts = random_starts(30)
    return lm.state_dict(), text, doc_starts, train_on(lm, lm, text, doc_starts)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "kernel"),
    [(name, kernel) for name in CONFIGS for kernel in ("blocked", "sdpa", "flash")
     if kernel != "flash" or rotates(name)],
)  # fmt: skip
def test_a_model_computes_the_same_with_every_kernel(name, kernel):
    """Losses, memories and every gradient, where documents begin too."""
    weights, text, doc_starts, wanted = results_of_naive(name)
    lm = lm_of(name, kernel=kernel, dropout=0.0).train()
    lm.load_state_dict(weights)
    same(train_on(lm, lm, text, doc_starts), wanted)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("bounded", "recompute"), [(False, True), (True, False)])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in WITHOUT_MEM_LEN])
def test_segments_through_memory_have_the_gradient_of_one_pass(name, bounded, recompute):
    lm = lm_of(name, mem_len=20, segment_len=20, dropout=0.0).train()
    text = tokens(20)
    doc_starts = random_starts(20) if bounded else None

    def loss(lengths, through):
        logits, _, memory = read(lm, text, doc_starts, lengths=lengths, through_memory=through)
        assert not any(x.requires_grad for x in kept(memory.detach()))
        return F.cross_entropy(logits.flatten(0, 1), text.flip(1).flatten())

    of_one_pass = gradients(lm, loss([20], through=False))
    lm.transformer.activation_checkpointing = recompute
    same(gradients(lm, loss([5, 1, 3, 7, 4], through=True)), of_one_pass)
    cut = gradients(lm, loss([5, 1, 3, 7, 4], through=False))
    assert not all(map(torch.allclose, cut, of_one_pass))


@pytest.mark.usefixtures("float64")
@every_model
def test_nothing_of_an_old_document_reaches_a_new_one(name):
    """Nor where a slot straddles the start; neither the outputs nor the losses nor the gradients."""
    lm = lm_of(name, dropout=0.0).train()
    # One in each stream, all in the second segment of six tokens.
    begins = (9, 10, 11)
    doc_starts = documents(36, 3, *zip(begins, range(3), strict=True))
    is_new = doc_starts.cumsum(0).bool()

    def results_of_new_documents(text):
        logits, losses, memory = read(lm, text, doc_starts)
        loss = logits[is_new].square().sum() + torch.stack(losses[2:]).sum()
        return [logits[is_new], *losses[2:], memory.n_valid, *gradients(lm, loss)]

    text = tokens(36, 3)
    with_other_old_documents = torch.where(is_new, text, tokens(36, 3))
    for stream in range(3):
        assert not torch.equal(text[:, stream], with_other_old_documents[:, stream])
    same(results_of_new_documents(text), results_of_new_documents(with_other_old_documents))


@pytest.mark.usefixtures("float64")
@every_model
@pytest.mark.parametrize("boundary", ["a start", "a reset"])
def test_nothing_is_left_of_nan_after_a_boundary(name, boundary):
    """Neither in outputs nor in gradients, forward and step by step; and no other stream notices it."""
    S = SMALL["segment_len"]
    stack = lm_of(name, dropout=0.0).train().transformer
    core = core_of(name, d_input=12)
    x = torch.randn(5 * S, 3, 12)
    is_reset = torch.tensor([True, True, False])

    def results_with(first, second):
        """All that is computed if the first streams have these values in two segments before the boundary."""
        x[: 2 * S, 0] = first
        x[: 2 * S, 1] = second
        memory = None
        stepper = Stepper(core, 3)
        results = []
        for i, part in enumerate(x.split(S)):
            starts = None
            if i == 2 and boundary == "a start":
                starts = documents(S, 3, (0, 0), (0, 1))
            elif i == 2:
                memory = memory.reset(is_reset)
                stepper = Stepper(core, 3, stepper.memory().reset(is_reset))
            output, memory, loss = stack(part, memory, doc_starts=starts)
            steps = stepper.read(part, starts)
            if i >= 2:
                results += [output, steps, loss, *gradients(stack, output.square().sum() + loss)]
            results += [output[:, 2], steps[:, 2]]
        return results

    finite = results_with(0.5, 0.5)
    results = results_with(math.nan, math.inf)
    same(finite, results)
    for result in results:
        assert result.isfinite().all()


@pytest.mark.usefixtures("float64")
@every_model
def test_an_empty_memory_of_full_length_is_like_none(name):
    lm = lm_of(name, dropout=0.0).train()
    text = tokens(30)

    def results_after(memory):
        logits, losses, _ = read(lm, text, memory=memory)
        return [logits, *losses, *gradients(lm, logits.square().sum() + torch.stack(losses).sum())]

    same(results_after(Memory.empty(lm.config, 2)), results_after(None))


@pytest.mark.usefixtures("float64")
@every_model
def test_a_core_reads_steps_of_any_number_as_segments(name):
    """Where documents begin, too."""
    core = core_of(name, d_input=3)
    x = torch.randn(36, 2, 3)
    doc_starts = random_starts(36)
    portions = [1, 1, 9, 2, 1, 13, 1, 7, 1]
    for memory in (None, core.initial(2)):
        stepper = Stepper(core, 2, memory)
        outputs = []
        for part, starts in zip(x.split(portions), doc_starts.split(portions), strict=True):
            outputs.append(stepper.read(part, starts))
        wanted, _, wanted_memory = read(core, x, doc_starts, memory)
        same([torch.cat(outputs), *kept(stepper.memory())], [wanted, *kept(wanted_memory)])


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "conv, learned, mem_len < rate"])
def test_an_exported_model_reads_segments_as_the_model_does(name):
    lm = lm_of(name)
    _, _, memory = read(lm, tokens(48), torch.zeros(48, 2, dtype=torch.bool))
    program = torch.export.export(lm, (tokens(6), memory), {"doc_starts": random_starts(6)})
    file = io.BytesIO()
    torch.export.save(program, file)
    exported = torch.export.load(io.BytesIO(file.getvalue())).module()
    exported_memory = memory
    for _ in range(3):
        text = tokens(6)
        starts = {"doc_starts": random_starts(6)}
        wanted = lm(text, memory, **starts)
        output = exported(text, exported_memory, **starts)
        memory = wanted.memory
        exported_memory = output.memory
        same([output.logits, output.auxiliary_loss], [wanted.logits, wanted.auxiliary_loss])
        same(kept(exported_memory), kept(memory))
        assert torch.equal(exported_memory.n_valid, memory.n_valid)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["conv", "xl, learned, post-norm", "bptt", "adaptive, tied, max", "averages"]
)
def test_a_compiled_model_is_one_graph_with_the_same_results(name, bounded, graph_counter):
    """And the same graph for every segment where the memory has its length from the beginning."""
    torch.compiler.reset()
    lm = lm_of(name, dropout=0.0).train()
    text = tokens(18)
    compiled = torch.compile(lm, fullgraph=True, backend=graph_counter)
    arguments = (random_starts(18), Memory.empty(lm.config, 2)) if bounded else (None, None)
    same(train_on(lm, compiled, text, *arguments), train_on(lm, lm, text, *arguments))
    assert graph_counter.frame_count == 1 or not bounded


@pytest.mark.long
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_inductor_computes_the_loss_and_gradients_of_a_step(model, bounded):
    """In float32, with two layers: so it once reused a buffer that was still to be read."""
    torch.compiler.reset()
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 64, "segment_len": 16, "mem_len": 16}
    lm = fill_zeros(MemoryLM(ModelConfig(model=model, vocab_size=11, c_mem_len=8, **sizes)))
    text = tokens(81, 8)
    doc_starts = torch.rand(80, 8) < 0.01 if bounded else None
    *past_starts, starts, _ = split_starts(doc_starts, text[:80], 16)
    memory = None
    with torch.no_grad():
        for part, part_starts in zip(text[:48].split(16), past_starts, strict=True):
            memory = lm(part, memory, None, part_starts).memory

    def results_of(forward):
        output = forward(text[48:64], memory, text[49:65], starts)
        losses = [output.scores.loss, output.auxiliary_loss]
        return [*losses, *gradients(lm, sum(losses))]

    expected = results_of(lm)
    _, auxiliary_loss, *_ = expected
    assert (auxiliary_loss > 0) == (model == "compressive")
    results = results_of(torch.compile(lm, fullgraph=True))
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-6)
