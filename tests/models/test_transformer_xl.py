import pytest
import torch

from tests.builders import small_xl


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
        ([torch.zeros(3, 2, 12)], "2 layers.* got 1"),
        ([torch.zeros(3, 4, 12)] * 2, r"batch.*\[·, 2, 12\], got \[3, 4, 12\]"),
        ([torch.zeros(3, 2, 8)] * 2, r"got \[3, 2, 8\]"),
        ([torch.zeros(3, 2, 12, dtype=torch.float64)] * 2, "float32 on cpu, .* got torch.float64"),
        ([torch.zeros(3, 2, 12, device="meta")] * 2, "on cpu, .* on meta"),
    ],
)
def test_a_memory_that_does_not_fit_is_an_error(mem, message):
    with pytest.raises(ValueError, match=message):
        small_xl()(torch.randn(5, 2, 12), mem)
