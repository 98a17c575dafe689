"""A model that learns from the text that it is evaluated on, against a loop that scores and steps by hand."""

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memformers import ByteTokenizer, LearnConfig
from memformers import evaluate as evaluate_text
from memformers.commands.evaluate import FIGURE_OF_LEARNING, NUMBERS, Evaluate
from memformers.common.command_line import parse_arguments
from memformers.evaluation.evaluate import BLOCK, evaluate
from memformers.evaluation.learning import evaluate_learning, learned
from memformers.generation.generate import Sampling, continue_text
from memformers.runs.load import load_pretrained
from tests.builders import MODELS, small_lm
from tests.processes import run

S = 7
"""The segment of a small model."""
DOCUMENTS = [40, 23, 23, 9]
"""Longest first, as they are read."""
RATE = 0.2
"""Large, so that what was learned shows after few segments."""
LEARN = LearnConfig(learn_rate=RATE)

pytestmark = pytest.mark.usefixtures("float64")


def losses_by_hand(lm, streams):
    """Of text ``streams [T, B]``, the losses ``[T − 1, B]`` of ``lm``, which learns from them."""
    lm.eval()
    memory, losses = None, []
    for x, y in zip(streams[:-1].split(S), streams[1:].split(S), strict=True):
        logits, memory, _ = lm(x, memory)
        scored = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        losses.append(scored.detach().view_as(y))
        lm.zero_grad()
        scored.mean().backward()
        with torch.no_grad():
            for weight in lm.parameters():
                if weight.grad is not None:
                    weight -= RATE * weight.grad
    return torch.cat(losses)


def losses_in_order(lm, text, streams=1, learn=LEARN, **options):
    """What ``evaluate_learning`` reports, segment by segment, with its evaluation."""
    received = []
    evaluation = evaluate_learning(lm, text, streams, learn, progress=received.append, **options)
    return torch.cat(received), evaluation


def weights_of(lm):
    return {name: tensor.clone() for name, tensor in lm.state_dict().items()}


def changed(lm, before):
    return {name for name, tensor in lm.state_dict().items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("streams", [1, 2])
def test_segments_are_scored_then_learned_as_in_a_loop(model, streams):
    lm, text = small_lm(model, dropout=0.3), torch.randint(0, 11, (streams * 60 + 1,))
    got, evaluation = losses_in_order(lm, text, streams)
    side_by_side = torch.stack([text[60 * b : 60 * b + 61] for b in range(streams)], dim=1)
    wanted = losses_by_hand(copy.deepcopy(lm), side_by_side)
    assert got.tolist() == pytest.approx(wanted.flatten().tolist(), abs=1e-10)
    assert evaluation.loss == pytest.approx(wanted.mean().item(), abs=1e-10)
    assert abs(evaluation.loss - evaluate(lm, text, streams).loss) > 1e-3, "it has learned something"


@pytest.mark.parametrize("place", [1, 3 * S, 3 * S + 4, 59])
def test_no_score_depends_on_its_own_token_or_on_later_text(place):
    """The first score that may differ is that of the prediction of the other token."""
    lm, text = small_lm("compressive"), torch.randint(0, 10, (60,))
    other = text.clone()
    other[place] = 10
    ours, theirs = losses_in_order(lm, text)[0], losses_in_order(lm, other)[0]
    assert ours[: place - 1].tolist() == pytest.approx(theirs[: place - 1].tolist(), abs=1e-12)
    assert ours[place - 1] != theirs[place - 1]
    probabilities = torch.stack([ours[place - 1], theirs[place - 1]]).neg().exp()
    assert probabilities.sum() <= 1, "both are of one prediction"


def test_learning_pays_where_a_text_repeats_itself():
    text = torch.randint(0, 11, (S,)).repeat(30)
    lm = small_lm("transformer-xl")
    assert losses_in_order(lm, text)[1].loss < evaluate(lm, text, 1).loss - 0.5


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_model_is_as_before(error):
    lm = small_lm("compressive").train()
    lm.transformer.layers[0].eval()
    before = weights_of(lm)
    modes = [module.training for module in lm.modules()]
    seen = []

    def progress(losses):
        seen.append(changed(lm, before))
        if error and len(seen) == 4:
            raise error

    text = torch.randint(0, 11, (80,))
    if error:
        with pytest.raises(error):
            evaluate_learning(lm, text, 1, LEARN, progress=progress)
    else:
        evaluate_learning(lm, text, 1, LEARN, progress=progress)
    assert seen[3], "it changed in between"
    assert changed(lm, before) == set()
    assert [module.training for module in lm.modules()] == modes
    assert all(weight.grad is None and weight.requires_grad for weight in lm.parameters())


def rms_by_hand(lm, text):
    """The root mean square of each gradient, over segments of ``text [n]`` in one stream."""
    lm.eval()
    memory, squares, n = None, {name: 0.0 for name, _ in lm.named_parameters()}, 0
    for x, y in zip(text[:-1].split(S), text[1:].split(S), strict=True):
        logits, memory, _ = lm(x[:, None], memory)
        lm.zero_grad()
        F.cross_entropy(logits[:, 0], y).backward()
        n += 1
        for name, weight in lm.named_parameters():
            squares[name] += 0.0 if weight.grad is None else weight.grad**2
    return {name: torch.as_tensor(square / n).sqrt() for name, square in squares.items()}


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_step_of_rms_is_that_of_a_plain_loop(decay):
    """g / (RMS + ε), ε the mean RMS, and the decay λ RMS / mean RMS, at most 1, to the trained weights."""
    lm, text = small_lm("transformer-xl"), torch.randint(0, 11, (60,))
    training = torch.randint(0, 11, (90,))
    learn = LearnConfig(learn_step="rms", learn_rate=0.01, learn_decay=decay)
    got, evaluation = losses_in_order(lm, text, learn=learn, training=training)

    learner = copy.deepcopy(lm)
    rms = rms_by_hand(learner, training)
    mean = torch.cat([x.flatten() for x in rms.values()]).mean()
    memory, wanted = None, []
    for x, y in zip(text[:-1].split(S), text[1:].split(S), strict=True):
        logits, memory, _ = learner(x[:, None], memory)
        scored = F.cross_entropy(logits[:, 0], y, reduction="none")
        wanted += scored.tolist()
        learner.zero_grad()
        scored.mean().backward()
        with torch.no_grad():
            for (name, weight), trained in zip(learner.named_parameters(), lm.parameters(), strict=True):
                back = (decay * rms[name] / mean).clamp(max=1.0) * (trained - weight)
                weight += back - 0.01 * weight.grad / (rms[name] + mean)
    assert got.tolist() == pytest.approx(wanted, abs=1e-10)
    assert abs(evaluation.loss - evaluate(lm, text, 1).loss) > 1e-3


def test_rms_leaves_the_model_as_it_was_and_needs_a_training_text():
    lm, text = small_lm("compressive"), torch.randint(0, 11, (60,))
    before = weights_of(lm)
    learn = LearnConfig(learn_step="rms")
    losses_in_order(lm, text, 2, learn=learn, training=text)
    assert changed(lm, before) == set()
    with pytest.raises(ValueError, match="learn_step=rms needs a part of the training text"):
        evaluate_learning(lm, text, 1, learn)


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
@pytest.mark.parametrize("weights", ["all", "feed-forward", "norms"])
def test_only_the_chosen_weights_move(model, weights):
    lm = small_lm(model)
    before, moved = weights_of(lm), set()
    learn = LearnConfig(learn_rate=RATE, learn_weights=weights)
    text = torch.randint(0, 11, (80,))
    evaluate_learning(lm, text, 1, learn, progress=lambda losses: moved.update(changed(lm, before)))
    named = {name for name, _ in lm.named_parameters()}
    chosen = {
        "all": {name for name in named if "f_c" not in name},
        "feed-forward": {name for name in named if ".feed_forward." in name},
        "norms": {name for name in named if "norm" in name},
    }
    assert moved == chosen[weights], "compressions learn from another loss"


def test_frozen_weights_stay():
    lm = small_lm("transformer-xl")
    lm.embed.requires_grad_(False)
    before, moved = weights_of(lm), set()
    text = torch.randint(0, 11, (40,))
    evaluate_learning(lm, text, 1, LEARN, progress=lambda losses: moved.update(changed(lm, before)))
    assert "head.weight" in moved
    assert "embed.weight" not in moved
    with pytest.raises(ValueError, match=r"learn_weights=all names no weights .*requires_grad_"):
        evaluate_learning(lm.requires_grad_(False), text, 1, LEARN)


def test_a_document_starts_empty_but_with_learned_weights():
    lm, text = small_lm("transformer-xl"), torch.randint(0, 11, (sum(DOCUMENTS),))
    learner = copy.deepcopy(lm)
    wanted = [losses_by_hand(learner, part[:, None]) for part in text.split(DOCUMENTS)]
    got, evaluation = losses_in_order(lm, text, documents=DOCUMENTS)
    assert got.tolist() == pytest.approx(torch.cat(wanted).flatten().tolist(), abs=1e-10)
    assert evaluation.document_losses == pytest.approx([x.mean().item() for x in wanted], abs=1e-10)


def test_each_document_is_learned_alone_with_reset():
    lm, text = small_lm("transformer-xl"), torch.randint(0, 11, (sum(DOCUMENTS),))
    learn = LearnConfig(learn_rate=RATE, learn_reset=True)
    got, _ = losses_in_order(lm, text, learn=learn, documents=DOCUMENTS)
    alone = [losses_in_order(lm, part)[0] for part in text.split(DOCUMENTS)]
    assert got.tolist() == torch.cat(alone).tolist()


@pytest.mark.parametrize("documents", [(), DOCUMENTS])
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_a_rate_of_zero_is_the_static_evaluation(model, streams, documents):
    lm, text = small_lm(model), torch.randint(0, 11, (sum(DOCUMENTS),))
    static = evaluate(lm, text, streams, documents=documents)
    learned = evaluate_learning(lm, text, streams, LearnConfig(learn_rate=0.0), documents=documents)
    assert learned.loss == pytest.approx(static.loss, abs=1e-12)
    assert learned.by_position == pytest.approx(static.by_position, abs=1e-12)
    assert learned.accuracy == static.accuracy
    assert static.minus(learned).mean == pytest.approx(0.0, abs=1e-12)


def test_divergence_is_an_error_that_leaves_the_model_as_it_was():
    lm = small_lm("transformer-xl")
    before = weights_of(lm)
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) while learning; use a lower learn_rate"):
        evaluate_learning(lm, torch.randint(0, 11, (200,)), 1, LearnConfig(learn_rate=1e200))
    assert changed(lm, before) == set()


def test_learning_leaves_the_static_numbers_alone():
    lm, text = small_lm("compressive", vocab_size=256), "To be, or not to be. " * 20
    static = evaluate_text(lm, ByteTokenizer(), text, streams=1)
    both = evaluate_text(lm, ByteTokenizer(), text, learn=LEARN)
    assert {name: both[name] for name in static if static[name] == static[name]} == {
        name: number for name, number in static.items() if number == number
    }
    learned = {name for name in both if name not in static}
    names = {f"learning_{name}" for name in static.keys() - {"tokens"}}
    assert learned == names | {"learning_saves_nats", "learning_saves_uncertainty_nats"}
    saved = both["loss_nats"] - both["learning_loss_nats"]
    assert both["learning_saves_nats"] == pytest.approx(saved)
    assert saved > 0.1


def test_a_difference_is_paired_over_blocks_of_the_text():
    lm, text = small_lm("transformer-xl"), torch.randint(0, 11, (4 * BLOCK + 30,))
    static, learned = evaluate(lm, text, 1), losses_in_order(lm, text)[1]
    saved = static.minus(learned)
    differences = [
        loss - loss_learned
        for (_, loss), (_, loss_learned) in zip(static.over_text(9), learned.over_text(9), strict=True)
    ]
    assert saved.mean == static.loss - learned.loss
    assert saved.n == len(differences) == 4
    deviation = torch.tensor(differences).std().item()
    assert saved.half_width == pytest.approx(3.182 * deviation / 2, rel=1e-3)
    assert [middle for middle, _ in static.over_text(3)] == [BLOCK, 3 * BLOCK]


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("Speak, good captain, speak.\nI will not speak.\n" * 45, encoding="utf-8")
    return path


def evaluated(*options):
    words = ["--pretrained", "transformer-xl-shakespeare", "--device", "cpu", *map(str, options)]
    parse_arguments(Evaluate, words).run()


@pytest.mark.drawn
def test_the_command_shows_both_side_by_side(book, tmp_path, capsys):
    evaluated("--text", book, "--learn", "--out", tmp_path / "out")
    heads, loss, *_, saves, _ = capsys.readouterr().out.splitlines()
    numbers = json.loads((tmp_path / "out" / NUMBERS).read_text())
    assert heads.split() == ["as", "trained", "learning"]
    assert heads.index("learning") == loss.rindex(f"{numbers['learning_loss_nats']:.4f}")
    assert f"loss            {numbers['loss_nats']:.4f}" in loss
    assert f"learning saves  {numbers['learning_saves_nats']:.4f} ±" in saves
    assert numbers["learn"]["learn_weights"] == "all"
    assert len(numbers["loss_over_text"]) == numbers["tokens"] // BLOCK
    assert (tmp_path / "out" / FIGURE_OF_LEARNING).read_bytes().startswith(b"\x89PNG")


def test_the_command_shows_each_document_twice(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("Speak, good captain, speak.\n" * 9, encoding="utf-8")
    evaluated("--text", tmp_path, "--learn", "--out", tmp_path / "out")
    for row in json.loads((tmp_path / "out" / NUMBERS).read_text())["documents"]:
        assert row["learning_loss"] < row["loss"]


def test_the_command_takes_a_training_text_for_rms(book, tmp_path, capsys):
    evaluated("--text", book, "--learn", "--learn-step", "rms", "--learn-text", book)
    assert "learning saves" in capsys.readouterr().out
    with pytest.raises(ValueError, match="name one with learn_text"):
        evaluated("--text", book, "--learn", "--learn-step", "rms")


def test_options_of_learning_need_it(book):
    with pytest.raises(ValueError, match="are for --learn; add it"):
        evaluated("--text", book, "--learn-rate", "0.1")
    with pytest.raises(ValueError, match="learn_rate"):
        evaluated("--text", book, "--learn", "--learn-rate", "-1")


def generated(prompt, *options):
    words = ["--pretrained", "transformer-xl-shakespeare", "--device", "cpu", "--prompt", prompt]
    return run("generate", *words, "--tokens", 40, "--seed", 3, *options)


def test_generation_learns_its_prompt():
    model, tokenizer = load_pretrained("transformer-xl-shakespeare", torch.device("cpu"))
    prompt = "Speak, good captain, speak.\nI will not speak.\n" * 4
    with learned(model, tokenizer.encode(prompt), 1, LearnConfig()):
        wanted = continue_text(model, tokenizer, prompt, 40, Sampling(0.8), seed=3)
    assert wanted != continue_text(model, tokenizer, prompt, 40, Sampling(0.8), seed=3)
    assert generated(prompt, "--learn").out == f"{prompt}{wanted}\n"


def test_generation_needs_a_prompt_to_learn():
    ended = generated("R", "--learn")
    assert ended.code
    assert "--learn needs a prompt of at least 2 tokens, got 1" in ended.err


def test_what_was_learned_lasts_as_long_as_the_context():
    lm = small_lm("transformer-xl", vocab_size=256).eval()
    before = {name: weight.clone() for name, weight in lm.state_dict().items()}
    with learned(lm, torch.randint(256, (99,)), 1, LearnConfig()) as evaluation:
        assert evaluation.tokens == 98
        assert any(not torch.equal(weight, before[name]) for name, weight in lm.state_dict().items())
    for name, weight in lm.state_dict().items():
        assert torch.equal(weight, before[name])


def test_norms_are_all_layer_norms():
    """What the test above tells by their names."""
    lm = small_lm("compressive")
    norms = {name for name, module in lm.named_modules() if isinstance(module, nn.LayerNorm)}
    assert norms == {name.rpartition(".")[0] for name, _ in lm.named_parameters() if "norm" in name}
