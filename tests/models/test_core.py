"""A memory transformer from features to features: segments, steps, gates, saving, graphs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from memformers.models.building import build_transformer

from memformers import CoreConfig, GRUGate, Memory, MemoryCore, MemoryLM, ModelConfig, TransformerXLLayer
from tests.builders import fill_zeros

SMALL = CoreConfig(
    "compressive", d_model=8, heads=2, n_layers=2, d_ff=12, segment_len=5, mem_len=5, c_mem_len=3,
    compression_rate=2, d_input=3,
)  # fmt: skip
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def built(**changes):
    """A core in float64 whose every weight matters."""
    torch.manual_seed(0)
    return fill_zeros(MemoryCore(replace(SMALL, **changes))).double()


def features(steps, batch=3):
    return torch.randn(steps, batch, 3, dtype=torch.float64)


def in_segments(core, x, doc_starts, memory=None):
    """The outputs of whole segments, one after the other, and the memory after them."""
    outputs = []
    for begin in range(0, len(x), SMALL.segment_len):
        part = slice(begin, begin + SMALL.segment_len)
        output, memory, _ = core(x[part], memory, None if doc_starts is None else doc_starts[part])
        outputs.append(output)
    return torch.cat(outputs), memory


VARIANTS = {
    "model": st.sampled_from(["transformer", "transformer-xl", "compressive"]),
    "gate": st.sampled_from(["residual", "gru"]),
    "mem_len": st.sampled_from([0, 3, 5, (2, 7)]),
    "c_mem_len": st.sampled_from([0, 3]),
    "compression": st.sampled_from(["conv", "mean", "most-used"]),
    "positions": st.sampled_from(["sinusoidal", "learned"]),
}


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries(VARIANTS),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.sets(st.tuples(st.integers(0, 24), st.integers(0, 2)), max_size=4),
    st.booleans(),
)
def test_steps_give_what_segments_give_with_any_memory_gate_and_resets(variant, portions, begins, initial):
    if variant["model"] != "compressive":
        variant = {name: x for name, x in variant.items() if name not in ("c_mem_len", "compression")}
        if variant["model"] == "transformer":
            variant.pop("mem_len")
    core = built(**variant).eval()
    T = sum(portions)
    x, doc_starts = features(T), torch.zeros(T, 3, dtype=torch.bool)
    for at in begins:
        if at[0] < T:
            doc_starts[at] = True
    memory = core.initial(3) if initial else None
    wanted, _ = in_segments(core, x, doc_starts, memory)
    stepper, found = core.stepper(3, memory), []
    for part, starts in zip(x.split(portions), doc_starts.split(portions), strict=True):
        given = starts if starts.any() else None
        found.append(
            stepper.step(part[0], None if given is None else given[0])[None]
            if len(part) == 1
            else stepper.read(part, given)
        )
    torch.testing.assert_close(torch.cat(found), wanted, **EXACT)


def test_a_language_model_is_an_embedding_a_core_and_a_head():
    config = ModelConfig("compressive", vocab_size=11, d_model=8, heads=2, n_layers=2, d_ff=12)
    shared = {name: getattr(config, name) for name in CoreConfig.__dataclass_fields__ if name != "d_input"}
    names = build_transformer(config).state_dict().keys()
    assert MemoryCore(CoreConfig(**shared)).transformer.state_dict().keys() == names


def test_a_gate_is_that_of_the_paper():
    gate = GRUGate(4).double()
    x, y = torch.randn(2, 3, 4, dtype=torch.float64).unbind()
    w_r, w_z, w_g = gate.of_output.weight.chunk(3)
    u_r, u_z = gate.of_input.weight.chunk(2)
    r, z = torch.sigmoid(y @ w_r.T + x @ u_r.T), torch.sigmoid(y @ w_z.T + x @ u_z.T - 2)
    h = torch.tanh(y @ w_g.T + (r * x) @ gate.of_reset.weight.T)
    torch.testing.assert_close(gate(x, y), (1 - z) * x + z * h, **EXACT)


def test_a_gated_layer_is_first_nearer_to_the_identity():
    changes = {}
    for gate in ("residual", "gru"):
        layer = build_transformer(replace(SMALL, d_model=64, d_ff=128, gate=gate)).layers[0]
        x = torch.randn(5, 16, 64)
        changes[gate] = ((layer(x=x) - x).norm() / x.norm()).item()
    assert changes["gru"] < 0.3
    assert changes["gru"] < changes["residual"]


def test_a_gate_needs_pre_norm():
    with pytest.raises(ValueError, match="gate='gru' needs norm='pre'"):
        replace(SMALL, gate="gru", norm="post")
    parts = {
        name: getattr(build_transformer(SMALL).layers[0], name) for name in ("self_attn", "feed_forward")
    }
    with pytest.raises(ValueError, match="gate='gru' needs norm='pre'"):
        TransformerXLLayer(d_model=8, dropout_prob=0.0, norm="post", gate="gru", **parts)


@pytest.mark.parametrize("gate", ["residual", "gru"])
def test_every_weight_learns(gate):
    core = built(gate=gate)
    x, _ = features(15), None
    memory, total = None, 0
    for part in x.split(5):
        output, memory, auxiliary = core(part, memory)
        total = total + output.square().sum() + auxiliary
    total.backward()
    assert [name for name, p in core.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_core_is_saved_and_loaded(tmp_path):
    core = built(gate="gru").float().eval()
    core.save_pretrained(tmp_path / "a")
    loaded = MemoryCore.from_pretrained(tmp_path / "a")
    assert loaded.config == core.config
    x = features(5).float()
    assert torch.equal(loaded(x).output, core(x).output)
    with pytest.raises(ValueError, match="d_input"):
        MemoryLM.from_pretrained(tmp_path / "a")


def test_a_core_is_one_graph_and_can_be_exported(tmp_path):
    core = built(gate="gru").float().eval()
    x, memory, starts = features(5).float(), core.initial(3), torch.zeros(5, 3, dtype=torch.bool)
    memory = core(x, memory, starts).memory
    wanted = core(x, memory, starts)
    compiled = torch.compile(core, fullgraph=True, backend="aot_eager")(x, memory, starts)
    torch.testing.assert_close(compiled.output, wanted.output)
    torch.export.save(torch.export.export(core, (x, memory, starts)), tmp_path / "core.pt2")
    exported = torch.export.load(tmp_path / "core.pt2").module()(x, memory, starts)
    torch.testing.assert_close(exported.output, wanted.output)
    torch.testing.assert_close(exported.memory.c_mem, wanted.memory.c_mem)


@pytest.mark.parametrize(
    ("given", "message"),
    [(lambda x: {"x": x[..., :2]}, r"\[segment, batch, 3\].*got \[5, 3, 2\]"),
     (lambda x: {"x": x[0]}, r"got \[3, 3\]"),
     (lambda x: {"x": x[:0]}, r"got \[0, 3, 3\]"),
     (lambda x: {"x": x.float()}, "float64.*got torch.float32"),
     (lambda x: {"x": x, "doc_starts": torch.zeros(5, 2, dtype=torch.bool)}, "doc_starts"),
     (lambda x: {"x": x, "memory": 5}, "expected memory to be a Memory or None, got a int"),
     (lambda x: {"x": x, "memory": Memory((x, x))}, "mem of layer 0")],
)  # fmt: skip
def test_what_a_core_cant_read_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        built()(**given(features(5)))
    with pytest.raises(ValueError, match=r"expected \[steps, 3, 3\]"):
        built().stepper(3).read(features(5, batch=2))
