"""Prompts of several lengths in one batch: each stream is read and written as it would be alone."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from memformers.generation.generate import Sampling, batch_prompts, generate
from tests.builders import MODELS, small_lm
from tests.texts import same, tokens

pytestmark = pytest.mark.usefixtures("float64")

SAME_LENGTH = {"model": "transformer-xl", "same_length": True, "segment_len": 4}


def prompts_of(*lengths):
    return [torch.randint(11, (length,)) for length in lengths]


def generate_with_logits(lm, prompt, n):
    """The greedy text ``[n, B]`` after a prompt, and the logits ``[·, B, 11]`` of each token drawn."""
    drawn_from = []
    draw = Sampling.draw

    def watch(sampling, logits, generator):
        drawn_from.append(logits)
        return draw(sampling, logits, generator)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sampling, "draw", watch)
        patch.setattr(torch.Tensor, "float", lambda x: x)
        text = torch.stack(list(generate(lm, prompt, n, temperature=0.0)))
    return text, torch.stack(drawn_from)


def check_each_is_as_alone(lm, prompts, n):
    text, logits = generate_with_logits(lm, prompts, n)
    ends = batch_prompts(prompts, lm.config).ends
    assert text.shape == (n, len(prompts))
    for stream, prompt in enumerate(prompts):
        wanted, wanted_logits = generate_with_logits(lm, prompt[:, None], n)
        begin = ends[stream] - min(ends)
        assert torch.equal(text[:, stream], wanted[:, 0])
        same([logits[begin : begin + n, stream]], [wanted_logits[:, 0]])


@settings(max_examples=15)
@given(
    model=st.sampled_from(MODELS),
    positions=st.sampled_from(["learned", "sinusoidal"]),
    shape=st.fixed_dictionaries({
        "segment_len": st.integers(1, 6), "mem_len": st.integers(0, 7), "c_mem_len": st.integers(0, 3),
        "compression_rate": st.integers(1, 4),
    }),
    lengths=st.lists(st.integers(1, 33), min_size=1, max_size=4),
)  # fmt: skip
@example("compressive", "learned", {"segment_len": 5, "mem_len": 7, "compression_rate": 4}, [44, 1, 23, 24])
@example("transformer-xl", "sinusoidal", {"segment_len": 4, "mem_len": 7}, [5, 30, 13])
def test_each_stream_is_read_and_written_as_alone(model, positions, shape, lengths):
    """Wherever its prompt ends in a segment, and whether or not c divides a segment or the memory."""
    lm = small_lm(model, **shape, positions=positions, n_layers=1)
    check_each_is_as_alone(lm, prompts_of(*lengths), 12)


@pytest.mark.parametrize("settings", [*({"model": model} for model in MODELS), SAME_LENGTH])
def test_each_is_as_alone_far_beyond_what_is_remembered(settings):
    """In two layers, each of which keeps at most 17 positions."""
    check_each_is_as_alone(small_lm(**settings), prompts_of(1, 50, 23), 40)


def test_prompts_of_one_length_are_those_of_a_tensor():
    lm = small_lm("compressive")
    first, second = prompts_of(9, 9)
    assert batch_prompts([first, second], lm.config).doc_starts is None
    for prompts in ([first, second], [first]):
        wanted = torch.stack(list(generate(lm, prompts, 30, seed=1)))
        for same_prompts in (torch.stack(prompts, 1), tuple(prompts)):
            text = torch.stack(list(generate(lm, same_prompts, 30, seed=1)))
            assert torch.equal(text, wanted)
    assert len(next(generate(lm, [first], 1, batch=3))) == 3


@pytest.mark.parametrize("prompts", [prompts_of(3, 12), torch.randint(11, (3, 2))])
def test_the_same_seed_writes_the_same(prompts):
    lm = small_lm("transformer-xl")
    first, second, with_other_seed = (
        torch.stack(list(generate(lm, prompts, 30, seed=seed))) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, with_other_seed)


@pytest.mark.parametrize("prompts", [prompts_of(3, 12), torch.randint(11, (3, 2))])
def test_a_batch_ends_when_the_last_stream_has_come_to_stop(prompts):
    lm = small_lm("transformer-xl")
    text = torch.stack(list(generate(lm, prompts, 90, seed=1)))
    ends = [int((stream == 4).nonzero()[0]) for stream in text.T]
    stopped = torch.stack(list(generate(lm, prompts, 90, seed=1, stop=4)))
    assert len(stopped) == max(ends) + 1 < 90
    assert torch.equal(stopped, text[: len(stopped)])
    assert list(generate(lm, prompts, 0)) == []


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [([], {}, "no prompts"),
     ([torch.ones(3).long(), torch.tensor([])], {}, "prompt 1 of 2"),
     ([torch.ones(3).long(), torch.ones(3)], {}, "prompt 1 of 2"),
     ([torch.ones(3, 1).long()], {}, "prompt 0 of 1"),
     ([[1, 2], [3]], {}, "prompt 0 of 2"),
     ([torch.tensor([1]), torch.tensor([11, 2])], {}, "vocab_size=11"),
     (tokens(0, 1), {}, "at least one"),
     (tokens(3), {"max_new_tokens": -1}, "max_new_tokens=-1"),
     (tokens(3), {"temperature": -1}, "temperature=-1"),
     (tokens(3), {"batch": 2}, "batch=2"),
     (prompts_of(3, 4, 5), {"batch": 2}, "batch=2")],
)  # fmt: skip
def test_what_cant_be_continued_is_an_error_at_once(prompt, options, message):
    with pytest.raises(ValueError, match=message):
        generate(small_lm("transformer-xl"), prompt, **({"max_new_tokens": 3} | options))
