"""Learning from prompts, at a size of moments."""

import torch

from experiments.prompt_learning import DISTANCE, N_PREDICTED, continuation_losses, texts_of
from memformers import LearnConfig
from memformers.evaluation.evaluate import evaluate
from tests.builders import small_lm

LEARN = LearnConfig(learn_rate=0.1)


def lm_of_bytes():
    return small_lm("transformer-xl", vocab_size=256, segment_len=8, mem_len=8).eval()


def test_without_learning_the_loss_is_that_of_an_evaluation():
    lm = lm_of_bytes()
    text = torch.randint(256, (16 + 20 + 1,))
    losses = []
    evaluate(lm, text, 1, progress=losses.append)
    torch.testing.assert_close(continuation_losses(lm, text, 16, None), torch.cat(losses)[16:])


def test_a_prompt_is_learned_and_the_model_restored():
    lm = lm_of_bytes()
    trained_weights = {name: weight.clone() for name, weight in lm.state_dict().items()}
    text = torch.tensor([*b"to be or not "] * 16)
    static = continuation_losses(lm, text, 160, None).mean()
    assert continuation_losses(lm, text, 160, LEARN).mean() < static - 0.1
    for name, weight in lm.state_dict().items():
        assert torch.equal(weight, trained_weights[name])


def test_nothing_of_the_continuation_is_learned():
    lm = lm_of_bytes()
    text = torch.randint(256, (41,))
    changed = torch.cat((text[:-8], torch.randint(256, (8,))))
    first = continuation_losses(lm, text, 16, LEARN)[:16]
    assert torch.equal(first, continuation_losses(lm, changed, 16, LEARN)[:16])
    learned_more = continuation_losses(lm, text, 24, LEARN)
    assert not torch.equal(first[8:], learned_more[:8])


def test_continuations_of_the_second_half_do_not_overlap():
    tokens = torch.arange(20_000)
    long = [*texts_of(tokens, 1024)]
    short = [*texts_of(tokens, 256)]
    assert [text[-N_PREDICTED:].tolist() for text in short] == [text[-N_PREDICTED:].tolist() for text in long]
    assert {len(text) for text in short} == {256 + N_PREDICTED + 1}
    assert long[0][0] >= len(tokens) // 2
    assert (short[1][0] - short[0][0]).item() == DISTANCE >= N_PREDICTED
