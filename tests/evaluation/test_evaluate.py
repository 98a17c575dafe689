import math
import statistics

import pytest
import torch
import torch.nn.functional as F

from memformers.evaluation.evaluate import BLOCK, Evaluation, evaluate, summary, with_lengths
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


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("tokens", "streams"), [(101, 1), (100, 3), (99, 7), (20, 16)])
@pytest.mark.parametrize("segments", [1, 2, 4, 50])
def test_the_beginning_of_an_evaluation_is_the_evaluation_of_the_beginning(model, tokens, streams, segments):
    lm, text = small_lm(model), torch.randint(0, 11, (tokens,))
    whole = evaluate(lm, text, streams)
    beginning, alone = whole.beginning(segments, 7), evaluate(lm, text, streams, segments=segments)
    assert torch.equal(beginning.losses, alone.losses)
    assert torch.equal(beginning.correct, alone.correct)
    for name in ("loss", "accuracy", "reconstruction_loss", "stream_length"):
        assert getattr(beginning, name) == getattr(alone, name)
    assert len(alone.losses) <= min(tokens - 1, streams * segments * 7)
    assert (alone.loss == whole.loss) == (segments * 7 >= whole.stream_length)


def test_losses_are_those_of_each_token_and_their_mean_is_the_loss():
    lm, text = small_lm("transformer-xl"), torch.randint(0, 11, (101,))
    result = evaluate(lm, text, batch_size=3)
    assert result.losses.shape == (100,)
    assert result.loss == pytest.approx(result.losses.double().mean().item(), abs=1e-6)
    length = result.stream_length
    places = [t % length for t in range(100)]
    for position, mean in enumerate(result.by_position(7)):
        same = [result.losses[t].item() for t in range(100) if places[t] % 7 == position]
        assert mean == pytest.approx(sum(same) / len(same), abs=1e-5)


def test_losses_are_grouped_by_what_was_read_before_up_to_what_is_remembered():
    losses = torch.rand(100)
    result = Evaluation(0.0, 0.0, (), losses, losses > 0, 34)  # 3 streams of 34, 34 and 32
    found = result.by_memory(7, reach=10)
    streams = [stream.double() for stream in losses.split(34)]
    groups = {0: [s[:7] for s in streams], 7: [s[7:14] for s in streams], 10: [s[14:] for s in streams]}
    assert [before for before, _, _ in found] == [0, 7, 10]
    for before, mean, width in found:
        of_streams = [part.mean().item() for part in groups[before]]
        assert mean == pytest.approx(torch.cat(groups[before]).mean().item())
        assert width == pytest.approx(4.303 * statistics.stdev(of_streams) / math.sqrt(3), rel=1e-3)
    one = Evaluation(0.0, 0.0, (), losses[:7], losses[:7] > 0, 7).by_memory(7, reach=0)
    assert len(one) == 1
    assert math.isnan(one[0][2])


def test_papers_numbers_are_normalized_by_what_they_name():
    text = "aß cd\n" * 20  # 6 characters, 7 bytes, 2 words each
    lm, tokens = small_lm("transformer"), torch.randint(0, 11, (len(text),))
    result = evaluate(lm, tokens, 1)
    numbers, nats = summary(result, text), result.losses.double().sum().item()
    assert numbers["bits_per_character"] == pytest.approx(nats / math.log(2) / 119)
    assert numbers["bits_per_byte"] == pytest.approx(nats / math.log(2) / 139)
    assert numbers["word_perplexity"] == pytest.approx(math.exp(nats / 40))


def test_the_uncertainty_covers_the_truth_about_95_times_in_100():
    covered = 0
    for _ in range(400):
        draws = (
            torch.randn(20 * BLOCK).add_(torch.randn(20).repeat_interleave(BLOCK)) + 3.0
        )  # alike in blocks
        result = Evaluation(draws.mean().item(), 0.0, (), draws, draws > 0, len(draws))
        covered += abs(result.loss - 3.0) <= result.uncertainty
    assert 0.90 <= covered / 400 <= 0.98
    assert math.isnan(Evaluation(0.0, 0.0, (), draws[:BLOCK], draws > 0, BLOCK).uncertainty)


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_memory_may_be_longer_than_in_training_as_far_as_positions_reach(positions):
    lm = with_lengths(small_lm("transformer-xl", positions=positions), segment_len=4, mem_len=8)
    text = torch.randint(0, 11, (60,))
    same = small_lm("transformer-xl", positions=positions, segment_len=4, mem_len=8)
    same.load_state_dict(lm.state_dict())
    assert torch.equal(evaluate(lm, text, 1).losses, evaluate(same, text, 1).losses)
    if positions == "learned":
        with pytest.raises(ValueError, match="13 positions was asked for, but the model learned 12"):
            with_lengths(lm, mem_len=9)
    else:
        assert with_lengths(lm, mem_len=500).config.mem_len == 500
