import pytest
import torch

from memformers.memory import Memory, keep_newest
from tests.builders import small_xl

SCHEMES = ["learned", "sinusoidal"]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("positions", SCHEMES)
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("segment_len", [1, 7, 64])
def test_segments_with_unlimited_memory_equal_one_pass(segment_len, norm, positions):
    model = small_xl(norm=norm, positions=positions, max_positions=130)
    x = torch.randn(130, 2, 12)
    whole, inputs = model(x, None)
    outputs, memory = [], Memory(())
    for segment in x.split(segment_len):
        output, new_mem = model(segment, memory.mem)
        outputs.append(output)
        memory = keep_newest(memory, new_mem, mem_len=130)
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=0, atol=1e-10)
    for mem, layer_inputs in zip(memory.mem, inputs, strict=True):
        torch.testing.assert_close(mem, layer_inputs, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("float64")
def test_a_short_memory_reaches_as_far_as_layers_times_memory():
    model = small_xl(n_layers=2, positions="sinusoidal")
    x = torch.randn(24, 1, 12)

    def last_output(x):
        memory = Memory(())
        for segment in x.split(4):
            output, new_mem = model(segment, memory.mem)
            memory = keep_newest(memory, new_mem, 6)
        return output[0]  # position 20

    reach = [
        i
        for i in range(21)
        if not torch.equal(last_output(x), last_output(x.index_fill(0, torch.tensor(i), 9.0)))
    ]
    assert min(reach) >= 20 - 2 * (6 + 3)  # two layers, each M back from its segment's start
    assert min(reach) < 20 - 6  # farther than one layer's memory


def test_new_memories_are_the_detached_inputs_of_each_layer():
    model = small_xl()
    x = torch.randn(5, 2, 12, requires_grad=True)
    _, new_mem = model(x, None)
    assert len(new_mem) == 2
    torch.testing.assert_close(new_mem[0], x.detach())
    torch.testing.assert_close(new_mem[1], model.layers[0](x=x, mem=None).detach())
    assert not any(mem.requires_grad for mem in new_mem)


@pytest.mark.parametrize("mem", [None, [], [torch.zeros(0, 2, 12)] * 2])
def test_no_memory_can_be_said_in_three_ways(mem):
    model = small_xl()
    x = torch.randn(5, 2, 12)
    torch.testing.assert_close(model(x, mem)[0], model(x, None)[0])


@pytest.mark.parametrize(
    ("mem", "message"),
    [
        ([torch.zeros(3, 2, 12)], "2 layers was expected.*has 1"),
        ([torch.zeros(3, 4, 12)] * 2, r"batch.*\[·, 2, 12\]; it is \[3, 4, 12\]"),
        ([torch.zeros(3, 2, 8)] * 2, r"it is \[3, 2, 8\]"),
        ([torch.zeros(3, 2, 12, dtype=torch.float64)] * 2, "float64 on cpu, but .*float32"),
        ([torch.zeros(3, 2, 12, device="meta")] * 2, "on meta, but .* on cpu"),
        ([torch.zeros(3, 2, 12), torch.zeros(4, 2, 12)], "3 positions in layer 0 and 4 in layer 1"),
    ],
)
def test_a_memory_that_does_not_fit_is_an_error(mem, message):
    with pytest.raises(ValueError, match=message):
        small_xl()(torch.randn(5, 2, 12), mem)
