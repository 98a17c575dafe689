"""What every model keeps, whatever it is built of: each test runs over the configurations below."""

import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from memformers import AdaptiveConfig, CoreConfig, Memory, MemoryCore, MemoryLM, ModelConfig, Stepper
from memformers.evaluation.conformance import SMALL, assert_conforms
from memformers.models.layers import MemoryLayer
from memformers.models.registry import load_class
from tests.builders import fill_zeros
from tests.texts import documents, gradients, kept, read, same, tokens

MEMORIES = Path(__file__).parents[2] / "experiments" / "memories"
Averages = load_class(f"{MEMORIES}/averages.py:Averages")


class OwnLayer(MemoryLayer):
    """A layer of a user, which may attend in any way, so that its keys are not cached."""

    def attend(self, *inputs):
        return super().attend(*inputs)


class ReadsAgain(Averages):
    """The same memory, without keys that are kept."""

    layer = OwnLayer


XL, COMPRESSIVE = {"model": "transformer-xl"}, {"model": "compressive"}
WAITS = {"positions": "learned", "mem_len": 1, "compression_rate": 4}
BY_LAYER = {"mem_len": (6, 4), "c_mem_len": (0, 3), "compression_rate": (2, 3)}
ADAPTIVE = {"embedding": "adaptive", "adaptive": AdaptiveConfig((3, 6), 2, None, True, True)}
DILATED = {"compression": "dilated", "compression_start": "mean"}
MAX = {"compression": "max", "compression_loss": "none"}
SHIFT = {"token_shift": True}
OWN_WAY = ("infini", "memory tokens", "averages, read again")  # of reading or attending
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
    """In which no weight is zero; in eval mode."""
    return fill_zeros(MemoryLM(ModelConfig(**{**SMALL, **CONFIGS[name], **changes}))).eval()


def core_settings(name):
    return {k: x for k, x in {**SMALL, **CONFIGS[name]}.items() if k in CoreConfig.__dataclass_fields__}


def starts_of(T, B=2):
    return torch.rand(T, B) < 0.15


def results(lm, forward, text, doc_starts=None, memory=None):
    """Losses, memories and gradients of a text in segments, as it is trained on."""
    results, S = [], lm.config.segment_len
    starts = [None] * len(text) if doc_starts is None else doc_starts.split(S)
    for part, start in zip(text.split(S), starts, strict=False):
        output = forward(part, memory, part.flip(0), doc_starts=start)
        memory = output.memory
        loss = output.scores.loss + output.auxiliary_loss
        grads = torch.autograd.grad(loss, list(lm.parameters()), allow_unused=True, materialize_grads=True)
        results += [output.scores.loss, output.auxiliary_loss, *kept(memory), *grads]
    return results


@every_model
@pytest.mark.parametrize("token_shift", [False, True])
def test_a_model_passes_every_check_of_the_conformance_suite(name, token_shift):
    if token_shift and name in OWN_WAY:
        with pytest.raises(ValueError, match="reads or attends in its own way; use token_shift=False"):
            assert_conforms(**CONFIGS[name], token_shift=True)
    else:
        assert_conforms(**CONFIGS[name] | {"token_shift": token_shift})


def rotates(name):
    """Whether the flash kernel can compute the distances of this model."""
    return CONFIGS[name].get("positions") != "learned" and "clamp_len" not in CONFIGS[name]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("name", "kernel"),
    [(name, kernel) for name in CONFIGS for kernel in ("blocked", "sdpa", "flash")
     if kernel != "flash" or rotates(name)],
)  # fmt: skip
def test_a_model_computes_the_same_with_every_kernel_where_documents_begin(name, kernel):
    """Losses, memories and every gradient."""
    lm, text, doc_starts = lm_of(name, kernel="naive", dropout=0.0).train(), tokens(30), starts_of(30)
    other = lm_of(name, kernel=kernel, dropout=0.0).train()
    other.load_state_dict(lm.state_dict())
    same(results(other, other, text, doc_starts), results(lm, lm, text, doc_starts))


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("bounded", "recompute"), [(False, True), (True, False)])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in WITHOUT_MEM_LEN])
def test_segments_through_memory_have_the_gradient_of_one_pass_over_the_joined_text(name, bounded, recompute):
    lm, text = lm_of(name, mem_len=20, segment_len=20, dropout=0.0).train(), tokens(20)
    doc_starts = starts_of(20) if bounded else None

    def loss(lengths, through):
        logits, _, memory = read(lm, text, doc_starts, lengths=lengths, through_memory=through)
        assert not any(x.requires_grad for x in kept(memory.detach()))
        return F.cross_entropy(logits.flatten(0, 1), text.flip(1).flatten())

    wanted = gradients(lm, loss([20], False))
    lm.transformer.activation_checkpointing = recompute
    same(gradients(lm, loss([5, 1, 3, 7, 4], True)), wanted)
    cut = gradients(lm, loss([5, 1, 3, 7, 4], False))
    assert not all(map(torch.allclose, cut, wanted))


@pytest.mark.usefixtures("float64")
@every_model
def test_nothing_of_an_old_document_reaches_a_new_one(name):
    """Nor where a slot straddles the start; neither the outputs nor the losses nor the gradients."""
    lm = lm_of(name, dropout=0.0).train()
    for begin in (9, 10, 11):
        doc_starts, (text, other) = torch.zeros(36, 1, dtype=torch.bool), (tokens(36, 1) for _ in range(2))
        doc_starts[begin] = True
        other[begin:] = text[begin:]
        new, wanted = ([], [])
        for results, read_text in ((new, text), (wanted, other)):
            logits, losses, memory = read(lm, read_text, doc_starts)
            results += [logits[begin:], *losses[2:], memory.n_valid]
            results += gradients(lm, logits[begin:].square().sum() + torch.stack(losses[2:]).sum())
        same(new, wanted)
        assert not torch.equal(text, other)


@pytest.mark.usefixtures("float64")
@every_model
@pytest.mark.parametrize("how", ["a start", "a reset"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_of_numbers_that_are_not_finite_nothing_is_left_after_a_start_or_a_reset(name, how, number):
    """Neither in outputs nor in gradients, forward and step by step; and no other stream notices them."""
    lm, S = lm_of(name, dropout=0.0).train(), SMALL["segment_len"]
    core = fill_zeros(MemoryCore(CoreConfig(**core_settings(name), d_input=12))).eval()
    x, of_both = torch.randn(5 * S, 2, 12), []
    for bad in (0.5, number):
        x[: 2 * S, 0] = bad
        memory, results, stepper = None, [], Stepper(core, 2)
        for i, part in enumerate(x.split(S)):
            starts = documents(S, 2, (0, 0)) if i == 2 else None
            if i == 2 and how == "a reset":
                memory, starts = memory.reset(torch.tensor([True, False])), None
                stepper = Stepper(core, 2, stepper.memory().reset(torch.tensor([True, False])))
            output, memory, loss = lm.transformer(part, memory, doc_starts=starts)
            steps = stepper.read(part, starts)
            if i > 1:
                results += [output, steps, loss]
                results += gradients(lm.transformer, output.square().sum() + loss)
            results += [output[:, 1], steps[:, 1]]
        of_both.append(results)
    same(*of_both)
    assert all(bool(result.isfinite().all()) for result in of_both[1])


@pytest.mark.usefixtures("float64")
@every_model
def test_after_an_empty_memory_of_full_length_all_is_as_after_none(name):
    lm, text = lm_of(name, dropout=0.0).train(), tokens(30)
    of_both = [
        [logits, *losses, *gradients(lm, logits.square().sum() + torch.stack(losses).sum())]
        for logits, losses, _ in (read(lm, text, memory=m) for m in (Memory.empty(lm.config, 2), None))
    ]
    same(*of_both)


@pytest.mark.usefixtures("float64")
@every_model
def test_a_core_reads_steps_of_any_number_as_segments_where_documents_begin(name):
    core = fill_zeros(MemoryCore(CoreConfig(**core_settings(name), d_input=3))).eval()
    x, doc_starts = torch.randn(36, 2, 3), starts_of(36)
    for memory in (None, core.initial(2)):
        stepper, (wanted, _, after) = Stepper(core, 2, memory), read(core, x, doc_starts, memory)
        portions = [1, 1, 9, 2, 1, 13, 1, 7, 1]
        parts = zip(x.split(portions), doc_starts.split(portions), strict=True)
        outputs = [stepper.read(part, starts) for part, starts in parts]
        same([torch.cat(outputs), *kept(stepper.memory())], [wanted, *kept(after)])


@pytest.mark.long
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", [n for n in CONFIGS if "<" not in n])
def test_an_exported_model_reads_segment_after_segment_as_the_model_does(name):
    lm = lm_of(name)
    _, _, memory = read(lm, tokens(48), torch.zeros(48, 2, dtype=torch.bool))
    file, starts = io.BytesIO(), {"doc_starts": starts_of(6)}
    torch.export.save(torch.export.export(lm, (tokens(6), memory), starts), file)
    exported, got = torch.export.load(io.BytesIO(file.getvalue())).module(), memory
    for _ in range(3):
        text, starts = tokens(6), {"doc_starts": starts_of(6)}
        ours, theirs = lm(text, memory, **starts), exported(text, got, **starts)
        memory, got = ours.memory, theirs.memory
        same(*([x.logits, x.auxiliary_loss, *kept(x.memory)] for x in (theirs, ours)))
        assert torch.equal(got.n_valid, memory.n_valid)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["conv", "xl, learned, post-norm", "bptt", "adaptive, tied, max", "averages"]
)
def test_a_compiled_model_is_one_graph_with_the_same_results(name, bounded):
    """And the same graph for every segment where the memory has its length from the beginning."""
    torch.compiler.reset()
    lm, text, backend = lm_of(name, dropout=0.0).train(), tokens(18), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lm, fullgraph=True, backend=backend)
    arguments = (starts_of(18), Memory.empty(lm.config, 2)) if bounded else (None, None)
    same(results(lm, compiled, text, *arguments), results(lm, lm, text, *arguments))
    assert backend.frame_count == 1 or not bounded


@pytest.mark.long
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
def test_inductor_computes_the_loss_and_every_gradient_of_a_training_step(model, bounded):
    """In float32, with two layers: so it once reused a buffer that was still to be read."""
    torch.compiler.reset()
    sizes = {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 64, "segment_len": 16, "mem_len": 16}
    lm = fill_zeros(MemoryLM(ModelConfig(model=model, vocab_size=11, c_mem_len=8, **sizes)))
    text, memory = tokens(81, 8), None
    starts = (torch.rand(80, 8) < 0.01).split(16) if bounded else [None] * 5
    with torch.no_grad():
        for part, start in zip(text[:48].split(16), starts, strict=False):
            memory = lm(part, memory, None, start).memory
    results = []
    for forward in (lm, torch.compile(lm, fullgraph=True)):
        output = forward(text[48:64], memory, text[49:65], starts[3])
        losses = output.scores.loss, output.auxiliary_loss
        results.append([*losses, *gradients(lm, sum(losses))])
    assert (results[0][1] > 0) == (model == "compressive")
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-6)
