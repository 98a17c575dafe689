"""The benchmarks' own arithmetic, checks and report; nothing is timed here."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from experiments.benchmarks import attention, flops, parity, peers, training
from experiments.benchmarks.cases import CASES, MODELS, Case
from experiments.benchmarks.profiling import KINDS, OPTIMIZER, OTHER, kind_of
from experiments.benchmarks.report import report, write_report
from experiments.benchmarks.training import BFLOAT16, COMPILED, LABML_FUSED, OURS
from memformers import MemoryLM, ModelConfig
from memformers.kernels import naive


def tiny(model="transformer-xl", **changes):
    sizes = {"d_model": 12, "heads": 3, "d_ff": 20, "n_layers": 2, "segment_len": 8, "mem_len": 8}
    sizes |= {"c_mem_len": 6, "compression_rate": 2, "vocab_size": 65, "positions": "learned"}
    return Case("tiny", ModelConfig(model=model, **sizes | changes), 3, 2, (1.0, 1.0))


@pytest.mark.parametrize("model", ["transformer", *MODELS])
def test_flops_are_those_that_pytorch_counts(model):
    config = tiny(model, kernel="naive", d_model=36).config
    lm, tokens, memory = MemoryLM(config), torch.randint(65, (8, 3)), None
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for _ in range(4):
            memory = lm(tokens, memory).memory
        with FlopCounterMode(display=False) as counter:
            lm(tokens, memory)
    more = counter.get_total_flops() - flops.forward(config, batch_size=3)
    # The reconstruction loss may project its queries for each of its two attentions, and needs to once.
    twice = config.n_layers * 2 * 8 * 3 * 36**2
    assert more in ((0, twice) if model == "compressive" else (0,))


@pytest.mark.parametrize("model", MODELS)
def test_labml_nn_agrees_with_ours_and_a_wrong_peer_is_caught(model):
    case = tiny(model)
    batches = training.random_batches(case)
    ours, theirs = parity.two_alike(case)
    assert parity.check_parity(ours, theirs, batches) < parity.TOLERANCE
    with torch.no_grad():
        theirs.transformer.layers[1].self_attn.key_pos_bias += torch.randn(8192, 3)
    with pytest.raises(ValueError, match="ours and labml-nn differ"):
        parity.check_parity(ours, theirs, batches)


def test_a_wrong_gradient_of_the_compression_is_caught():
    case = tiny("compressive")
    ours, theirs = parity.two_alike(case)
    theirs.transformer.layers[0].compress.requires_grad_(False)
    with pytest.raises(ValueError, match="in the gradient"):
        parity.check_parity(ours, theirs, training.random_batches(case))


def test_sdpa_with_a_bias_agrees_with_the_definition_and_a_wrong_attention_is_caught():
    inputs = attention.random_inputs(13, queries=7)
    expected = attention.forward_and_backward(naive.relative_attention, inputs)
    assert attention.check_parity(attention.sdpa, inputs, expected) < attention.TOLERANCE
    with pytest.raises(ValueError, match="differs from the definition"):
        attention.check_parity(
            lambda *q, u, s, **kv: attention.sdpa(*q, u=u, s=0 * s, **kv), inputs, expected
        )


def test_a_case_is_measured(monkeypatch):
    monkeypatch.setattr(training, "measure_in_child", lambda *_: 2**30)
    result = training.measure(tiny("compressive"), quick=True)
    assert {OURS, BFLOAT16, peers.LABML, LABML_FUSED} <= set(result["seconds"])
    assert sum(result["profile"].values()) == pytest.approx(1.0)
    assert result["peak memory"][OURS] == 2**30
    assert COMPILED in result["not run"]


def test_a_compiler_that_fails_is_reported(monkeypatch):
    def fail(*_):
        raise RuntimeError("no C++ compiler\nlong story")

    case = tiny()
    batches = training.random_batches(case)
    ours, _ = parity.two_alike(case)
    broken = training.copy_of(ours)
    monkeypatch.setattr(broken, "forward", fail)
    sides = {OURS: training.Trainer(ours, batches), COMPILED: training.Trainer(broken, batches)}
    absent: dict[str, str] = {}
    training.first_steps(sides, absent, warm_up=1)
    assert absent == {COMPILED: "torch.compile failed: no C++ compiler"}
    assert set(sides) == {OURS}


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::baddbmm_", "matrix products"),
        ("Optimizer.step#AdamW.step", OPTIMIZER),
        ("memformers::x", OTHER),
    ],
)
def test_operators_have_kinds(operator, kind):
    assert kind_of(operator) == kind


def made_up_results():
    step = {
        "case": "base",
        "model": "transformer-xl",
        "tokens": 1000,
        "flops": 50 * 10**9,
        "parity error": 2e-7,
        "seconds": {
            OURS: [0.5, 0.5],
            peers.LABML: [1.0, 1.5],
            LABML_FUSED: [1.0, 1.0],
            BFLOAT16: [0.25, 0.25],
        },
        "not run": {COMPILED: "too large"},
        "torch.mm, FLOP/s": [200e9] * 3,
        "profile": dict.fromkeys([*KINDS, OPTIMIZER, OTHER], 0.125),
        "peak memory": {OURS: 2**30, peers.LABML: None},
    }
    alone = {
        "memory_len": 512,
        "keys": 1024,
        "flops": 10**10,
        "errors": {attention.OURS: 1e-6},
        "seconds": {attention.OURS: [0.1, 0.1], attention.NAIVE: [0.3, 0.3]},
        "not run": {attention.SDPA: "would need about 9.0 GiB"},
        "torch.mm, FLOP/s": [200e9],
        "extra memory": {attention.OURS: 2**20, attention.NAIVE: None},
    }
    environment = {
        "device": "a CPU",
        "threads": 2,
        "platform": "Linux",
        "python": "3",
        "packages": {"torch": "2"},
    }
    return {"quick": False, "environment": environment, "training": [step], "attention": [alone]}


def test_the_report_says_what_was_measured():
    text = report(made_up_results())
    assert (
        "| base | transformer-xl | 2,000 | 800 | 2.50 (2.25 – 2.75) | 2.7 | 2.00 (2.00 – 2.00) | 50% |"
        in text
    )
    assert "| base | transformer-xl | 1,024 | – | – |" in text
    assert "| base | transformer-xl | 2,000 | 2.00 (2.00 – 2.00) | not run: too large | – |" in text
    assert "| 512 | 1024 | ours, blocked | 100 (100 – 100) | 98 | 3.00 (3.00 – 3.00) | 1 | 50% |" in text
    assert "| 512 | 1024 | SDPA with a bias | not run: would need about 9.0 GiB | – | – | – | – |" in text
    assert "Not run: no GPU." in text
    assert "- base, transformer-xl: 2.50 times labml-nn's speed; 2.7 was wanted." in text
    assert "- base, transformer-xl: 50% of `torch.mm`; 80% was wanted." in text
    assert "bfloat16 2.00 times" not in text
    shares = " | ".join(["12"] * len([*KINDS, OPTIMIZER, OTHER]))
    assert f"| base | transformer-xl | {shares} | 20.0 |" in text  # 2.5 / 0.125


def test_the_report_of_a_part_has_only_that_part_and_the_figure_is_drawn(tmp_path):
    results = made_up_results()
    del results["training"]
    write_report(results, tmp_path)
    assert "labml-nn 0.5.1" not in (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    assert (tmp_path / "figures" / "attention.png").stat().st_size > 1000


def test_every_case_fills_its_memories():
    assert CASES["long"].of("compressive").segments_to_fill == 9
