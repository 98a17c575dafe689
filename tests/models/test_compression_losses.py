"""What compression functions learn from, and compression functions of a user's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memformers import (
    AutoEncodingLoss,
    CompressionAutoEncoder,
    CompressiveTransformer,
    Conv1dCompression,
    MaxCompression,
)
from memformers.generation.decoding import Decoder
from memformers.models.lengths import MemoryLengths
from memformers.models.memory import Memory
from tests.builders import fill_zeros, small_compressive, small_lm

LENGTHS = MemoryLengths(mem_len=5, c_mem_len=4, compression_rate=3)


class Newest(nn.Module):
    """A compression of a user's own: the newest position of a slot, through a map."""

    compression_rate = 3

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(12, 12)

    def forward(self, mem):
        return self.map(mem[2::3])


def stack_of(compress, *loss):
    """A stack of two layers with copies of this f_c."""
    layer = copy.deepcopy(small_compressive().layers[0])
    layer.compress = compress
    return fill_zeros(CompressiveTransformer(layer, 2, *loss))


def read(stack, segments=3, doc_starts=None):
    """The last output, memory and auxiliary loss of random segments."""
    memory = Memory(())
    for _ in range(segments):
        x = torch.randn(7, 2, 12)
        output, inputs = stack(x, memory.mem, memory.c_mem, doc_starts=doc_starts, valid=memory.valid)
        memory, auxiliary_loss = stack.remember(memory, inputs, LENGTHS, doc_starts)
    return output, memory, auxiliary_loss


def auto_encoders():
    return [CompressionAutoEncoder(Conv1dCompression(3, 12), 12) for _ in range(2)]


def memories(streams=2):
    return [torch.randn(9, streams, 12) for _ in range(2)]


@pytest.mark.parametrize("compression", ["conv", "dilated"])
@pytest.mark.parametrize("loss", ["attention", "auto-encoding"])
def test_one_loss_reaches_the_compression_with_its_decoder_and_the_other_all_else(loss, compression):
    lm = small_lm("compressive", compression=compression, compression_loss=loss)
    for auxiliary in (False, True):
        lm.zero_grad()
        memory = Memory(())
        for _ in range(3):
            tokens = torch.randint(11, (7, 2))
            logits, memory, auxiliary_loss = lm(tokens, memory)
        language = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        (auxiliary_loss if auxiliary else language).backward()
        for name, parameter in lm.named_parameters():
            reached = parameter.grad is not None and bool(parameter.grad.any())
            assert reached == ((".compress." in name) == auxiliary), name


def test_a_decoder_is_a_transposed_convolution_whose_kernel_and_stride_are_the_rate():
    f_c, slots = auto_encoders()[0], torch.randn(4, 2, 12)
    kernel = f_c.decoder.weight.squeeze(2).unflatten(0, (3, 12)).permute(2, 1, 0)  # [D, D, c]
    bias = f_c.decoder.bias.unflatten(0, (3, 12)).T  # [D, c], one for each position of a slot
    wanted = F.conv_transpose1d(slots.permute(1, 2, 0), kernel, stride=3) + bias.repeat(1, 4)
    torch.testing.assert_close(f_c.decode(slots), wanted.permute(2, 0, 1))


def test_the_auto_encoding_loss_is_the_mean_squared_error_of_the_decoded_summed_over_layers():
    compressions, mem = auto_encoders(), memories()
    pairs = list(zip(compressions, mem, strict=True))
    wanted = sum((old - f_c.decode(f_c(old))).square().mean() for f_c, old in pairs)
    loss = AutoEncodingLoss(compressions)
    torch.testing.assert_close(loss(mem), wanted)
    torch.testing.assert_close(loss(mem, [f_c(old) for f_c, old in pairs]), wanted)
    assert loss(mem, [torch.zeros(3, 2, 12)] * 2) != wanted


def test_the_auto_encoding_loss_gives_memories_no_gradient():
    mem = [old.requires_grad_() for old in memories()]
    AutoEncodingLoss(auto_encoders())(mem).backward()
    assert all(old.grad is None for old in mem)


def test_the_auto_encoding_loss_learns_memories_that_fit_into_slots():
    compressions = auto_encoders()
    mem = [torch.randn(9, 4, 4) @ torch.randn(4, 12) for _ in range(2)]  # 3 positions of 4 numbers each
    loss, learning = AutoEncodingLoss(compressions), [p for f_c in compressions for p in f_c.parameters()]
    optimizer, first = torch.optim.Adam(learning, lr=2e-2), loss(mem).item()
    for _ in range(100):
        optimizer.zero_grad()
        loss(mem).backward()
        optimizer.step()
    assert loss(mem).item() < 0.5 * first


@pytest.mark.usefixtures("float64")
def test_slots_that_are_left_out_are_as_if_they_and_their_positions_were_not_there():
    compressions, mem = auto_encoders(), memories(4)
    loss, learning = AutoEncodingLoss(compressions), [p for f_c in compressions for p in f_c.parameters()]
    streams = {0: 0, 1: 2, 3: 1}  # and of stream 2, all 3 slots
    alone = [loss([old[3 * slots :, b, None] for old in mem]) for b, slots in streams.items()]
    found = loss(mem, left_out=torch.tensor([0, 2, 3, 1]))
    wanted = torch.stack(alone).mean()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    for a, b in zip(*(torch.autograd.grad(x, learning) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    nothing = loss(mem, left_out=torch.full((4,), 3))
    assert nothing == 0
    nothing.backward()
    assert not any(p.grad.any() for p in learning)


def test_the_auto_encoding_loss_wants_one_tensor_a_layer():
    with pytest.raises(ValueError, match="each of 2 layers was expected; 1 came"):
        AutoEncodingLoss(auto_encoders())([torch.zeros(3, 1, 12)])


def test_from_the_same_seed_a_compression_starts_alike_with_a_decoder_and_without():
    states = []
    for loss in ("attention", "auto-encoding"):
        lm = small_lm("compressive", compression_loss=loss)
        torch.manual_seed(5)
        lm.reset_parameters()
        states.append({name.replace(".encode", ""): w for name, w in lm.state_dict().items()})
    without, beside = states
    assert {name for name in beside if name not in without} == {n for n in beside if ".decoder." in n}
    assert all(torch.equal(weight, beside[name]) for name, weight in without.items())


@pytest.mark.parametrize("compression", ["mean", "max"])
def test_without_a_loss_memories_are_the_same_and_the_auxiliary_loss_is_0(compression):
    measured, silent = (
        small_lm("compressive", compression=compression, compression_loss=loss)
        for loss in ("attention", "none")
    )
    silent.load_state_dict(measured.state_dict())
    memory, others, tokens = Memory(()), Memory(()), torch.randint(11, (28, 2))
    for part in tokens.split(7):
        logits, memory, auxiliary_loss = measured(part, memory)
        wanted, others, nothing = silent(part, others)
        assert torch.equal(logits, wanted)
        assert nothing == 0
    assert auxiliary_loss > 0
    assert memory.c_mem_len == 4
    assert all(torch.equal(a, b) for a, b in zip(memory.c_mem, others.c_mem, strict=True))


def test_what_a_stack_compresses_by_includes_decoders():
    lm = small_lm("compressive", compression_loss="auto-encoding")
    learning = {id(p) for f_c in lm.transformer.compressions for p in f_c.parameters()}
    assert learning == {id(p) for name, p in lm.named_parameters() if ".compress." in name}


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_compression_of_a_users_own_works_and_learns_in_a_stack(wrapped):
    own = CompressionAutoEncoder(Newest(), 12) if wrapped else Newest()
    stack = stack_of(own, "auto-encoding" if wrapped else "attention")
    doc_starts = torch.zeros(7, 2, dtype=torch.bool)
    doc_starts[6, 1] = True
    for begins in (None, doc_starts):
        stack.zero_grad()
        output, memory, auxiliary_loss = read(stack, doc_starts=begins)
        auxiliary_loss.backward()
        assert output.shape == (7, 2, 12)
        assert memory.c_mem_len == 4
        assert all(p.grad.any() for f_c in stack.compressions for p in f_c.parameters())


class Wrong(nn.Module):
    """An f_c that makes slots of another length or width."""

    def __init__(self, every=3, width=12):
        super().__init__()
        self.every, self.width = every, width

    def forward(self, mem):
        return mem[:: self.every, :, : self.width]


@pytest.mark.parametrize(
    ("compress", "made"),
    [(Wrong(every=2), "[2, 2, 12]"), (Wrong(width=5), "[1, 2, 5]"), (nn.Identity(), "[3, 2, 12]")],
)
def test_slots_of_another_number_or_width_are_an_error_of_one_line(compress, made):
    with pytest.raises(ValueError, match="was expected") as error:
        read(stack_of(compress), segments=1)
    name = type(compress).__name__
    assert str(error.value) == (
        f"{name} made {made} of memories [3, 2, 12]; [1, 2, 12] was expected, one slot for every "
        f"compression_rate=3 memories, of the same width. Return that shape from its forward method."
    )


def test_a_decoder_refuses_slots_of_another_width():
    lm = small_lm("compressive").eval()
    lm.transformer.layers[0].compress = Wrong(width=5)
    with pytest.raises(ValueError, match=r"Wrong made \[1, 2, 5\] of memories \[3, 2, 12\]"):
        Decoder(lm, 2).read(torch.randint(11, (20, 2)))


@pytest.mark.parametrize(
    ("compress", "loss", "message"),
    [
        (Newest(), "squares", "'squares' is unknown; use one of attention, auto-encoding, none"),
        (Newest(), "auto-encoding", "needs a decoder beside f_c, but Newest came"),
        (Newest(), "none", "would not train Newest"),
        (CompressionAutoEncoder(Newest(), 12), "attention", "would not train the decoder"),
        (CompressionAutoEncoder(Newest(), 12), "none", "would not train the decoder"),
    ],
)
def test_a_loss_that_can_not_train_the_compression_is_an_error(compress, loss, message):
    with pytest.raises(ValueError, match=message):
        stack_of(compress, loss)


def test_a_stack_without_a_loss_takes_what_has_no_parameters_or_learns_no_more():
    assert read(stack_of(MaxCompression(3), "none"))[2] == 0
    assert read(stack_of(Newest().requires_grad_(False), "none"))[2] == 0


def test_an_auto_encoder_wants_to_know_how_many_positions_a_slot_stands_for():
    with pytest.raises(
        ValueError, match="Identity has no compression_rate, the number of positions that a slot represents"
    ):
        CompressionAutoEncoder(nn.Identity(), 12)
