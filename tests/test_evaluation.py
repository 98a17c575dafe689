import math

import pytest
import torch
import torch.nn.functional as F

from memformers.evaluation import evaluate
from tests.builders import MODELS, small_lm


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("model", MODELS)
def test_one_stream_equals_reading_the_text_segment_by_segment(model):
    lm, text = small_lm(model, dropout=0.3), torch.randint(0, 11, (101,))
    result = evaluate(lm, text, batch_size=1)
    assert lm.training
    lm.eval()
    memory, losses, hits = None, [], []
    for segment, targets in zip(text[:-1].split(7), text[1:].split(7), strict=True):
        logits, memory, _ = lm(segment[:, None], memory)
        losses.append(F.cross_entropy(logits[:, 0], targets, reduction="none"))
        hits.append(logits[:, 0].argmax(-1) == targets)
    assert result.loss == pytest.approx(torch.cat(losses).mean().item(), abs=1e-12)
    assert torch.equal(result.correct, torch.cat(hits))
    assert result.accuracy == torch.cat(hits).double().mean().item()
    assert (result.reconstruction_loss is not None) == (model == "compressive")


@pytest.mark.parametrize("streams", [2, 3, 7, 500])
def test_every_token_counts_once_however_many_streams(streams):
    lm, text = small_lm("transformer-xl"), torch.randint(0, 11, (100,))
    result = evaluate(lm, text, streams)
    assert len(result.correct) == 99
    length = result.stream_length
    lm.eval()
    for b in range(0, 99, length):  # each stream by itself, from an empty memory
        memory, hits = None, []
        targets = text[b + 1 : b + length + 1]
        for segment in text[b : b + len(targets)].split(7):
            logits, memory, _ = lm(segment[:, None], memory)
            hits.append(logits[:, 0].argmax(-1))
        assert torch.equal(result.correct[b : b + length], torch.cat(hits) == targets)


def test_bits_per_character_counts_characters_not_tokens():
    result = evaluate(small_lm("transformer"), torch.randint(0, 11, (51,)), 1)
    assert result.bits_per_character(50) == pytest.approx(result.loss / math.log(2))
    assert result.bits_per_character(25) == pytest.approx(2 * result.loss / math.log(2))
