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

# The segment of a small model.
S = 7
# Longest first, as they are read.
DOCUMENTS = [40, 23, 23, 9]
# Large, so that what was learned shows after few segments.
RATE = 0.2
LEARN = LearnConfig(learn_rate=RATE)

pytestmark = pytest.mark.usefixtures("float64")


def losses_by_hand(lm, streams):
    """Of text ``streams [T, B]``, the losses ``[T − 1, B]`` of ``lm``, which learns from them."""
    lm.eval()
    memory = None
    losses = []
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


def changed_weights(lm, weights):
    """The names of the weights that are no longer these."""
    return {name for name, tensor in lm.state_dict().items() if not torch.equal(tensor, weights[name])}


def random_text(n):
    return torch.randint(0, 11, (n,))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("streams", [1, 2])
def test_segments_are_scored_then_learned_as_in_a_loop(model, streams):
    lm = small_lm(model, dropout=0.3)
    text = random_text(streams * 60 + 1)
    losses, evaluation = losses_in_order(lm, text, streams)
    side_by_side = torch.stack([text[60 * b : 60 * b + 61] for b in range(streams)], dim=1)
    wanted = losses_by_hand(copy.deepcopy(lm), side_by_side)
    assert losses.tolist() == pytest.approx(wanted.flatten().tolist(), abs=1e-10)
    assert evaluation.loss == pytest.approx(wanted.mean().item(), abs=1e-10)
    assert abs(evaluation.loss - evaluate(lm, text, streams).loss) > 1e-3, "it has learned something"


@pytest.mark.parametrize("position", [1, 3 * S, 3 * S + 4, 59])
def test_no_score_depends_on_its_own_token_or_on_later_text(position):
    """The first score that may differ is that of the prediction of the other token."""
    lm = small_lm("compressive")
    text = torch.randint(0, 10, (60,))
    changed_text = text.clone()
    changed_text[position] = 10
    losses, _ = losses_in_order(lm, text)
    changed_losses, _ = losses_in_order(lm, changed_text)
    prediction = position - 1
    assert losses[:prediction].tolist() == pytest.approx(changed_losses[:prediction].tolist(), abs=1e-12)
    assert losses[prediction] != changed_losses[prediction]
    probabilities = torch.stack([losses[prediction], changed_losses[prediction]]).neg().exp()
    assert probabilities.sum() <= 1, "both are of one prediction"


def test_learning_pays_where_a_text_repeats_itself():
    text = random_text(S).repeat(30)
    lm = small_lm("transformer-xl")
    _, evaluation = losses_in_order(lm, text)
    assert evaluation.loss < evaluate(lm, text, 1).loss - 0.5


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_model_is_as_before(error):
    lm = small_lm("compressive").train()
    lm.transformer.layers[0].eval()
    weights = weights_of(lm)
    modes = [module.training for module in lm.modules()]
    changes = []

    def progress(losses):
        changes.append(changed_weights(lm, weights))
        if error and len(changes) == 4:
            raise error

    text = random_text(80)
    if error:
        with pytest.raises(error):
            evaluate_learning(lm, text, 1, LEARN, progress=progress)
    else:
        evaluate_learning(lm, text, 1, LEARN, progress=progress)
    assert changes[3], "it changed in between"
    assert changed_weights(lm, weights) == set()
    assert [module.training for module in lm.modules()] == modes
    for weight in lm.parameters():
        assert weight.grad is None
        assert weight.requires_grad


def rms_by_hand(lm, text):
    """The root mean square of each gradient, over segments of ``text [n]`` in one stream."""
    lm.eval()
    inputs = text[:-1].split(S)
    targets = text[1:].split(S)
    memory = None
    squares = {name: 0.0 for name, _ in lm.named_parameters()}
    for x, y in zip(inputs, targets, strict=True):
        logits, memory, _ = lm(x[:, None], memory)
        lm.zero_grad()
        F.cross_entropy(logits[:, 0], y).backward()
        for name, weight in lm.named_parameters():
            squares[name] += 0.0 if weight.grad is None else weight.grad**2
    return {name: torch.as_tensor(square / len(inputs)).sqrt() for name, square in squares.items()}


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_a_step_of_rms_is_that_of_a_plain_loop(decay):
    """g / (RMS + ε), ε the mean RMS, and the decay λ RMS / mean RMS, at most 1, to the trained weights."""
    lm = small_lm("transformer-xl")
    text = random_text(60)
    training = random_text(90)
    learn = LearnConfig(learn_step="rms", learn_rate=0.01, learn_decay=decay)
    losses, evaluation = losses_in_order(lm, text, learn=learn, training=training)

    learner = copy.deepcopy(lm)
    rms = rms_by_hand(learner, training)
    mean = torch.cat([x.flatten() for x in rms.values()]).mean()
    memory = None
    wanted = []
    for x, y in zip(text[:-1].split(S), text[1:].split(S), strict=True):
        logits, memory, _ = learner(x[:, None], memory)
        scored = F.cross_entropy(logits[:, 0], y, reduction="none")
        wanted += scored.tolist()
        learner.zero_grad()
        scored.mean().backward()
        with torch.no_grad():
            for (name, weight), trained in zip(learner.named_parameters(), lm.parameters(), strict=True):
                to_trained = (decay * rms[name] / mean).clamp(max=1.0) * (trained - weight)
                weight += to_trained - 0.01 * weight.grad / (rms[name] + mean)
    assert losses.tolist() == pytest.approx(wanted, abs=1e-10)
    assert abs(evaluation.loss - evaluate(lm, text, 1).loss) > 1e-3


def test_rms_leaves_the_model_as_it_was():
    lm = small_lm("compressive")
    text = random_text(60)
    weights = weights_of(lm)
    losses_in_order(lm, text, 2, learn=LearnConfig(learn_step="rms"), training=text)
    assert changed_weights(lm, weights) == set()


def test_rms_needs_a_training_text():
    with pytest.raises(ValueError, match="learn_step=rms needs a part of the training text"):
        evaluate_learning(small_lm("compressive"), random_text(60), 1, LearnConfig(learn_step="rms"))


def weights_that_move(lm, learn, n_tokens):
    """The names of the weights that differ after any segment of a text."""
    weights = weights_of(lm)
    moved = set()

    def progress(losses):
        moved.update(changed_weights(lm, weights))

    evaluate_learning(lm, random_text(n_tokens), 1, learn, progress=progress)
    return moved


@pytest.mark.parametrize("model", ["transformer-xl", "compressive"])
@pytest.mark.parametrize("weights", ["all", "feed-forward", "norms"])
def test_only_the_chosen_weights_move(model, weights):
    lm = small_lm(model)
    moved = weights_that_move(lm, LearnConfig(learn_rate=RATE, learn_weights=weights), 80)
    names = {name for name, _ in lm.named_parameters()}
    chosen = {
        "all": {name for name in names if "f_c" not in name},
        "feed-forward": {name for name in names if ".feed_forward." in name},
        "norms": {name for name in names if "norm" in name},
    }
    assert moved == chosen[weights], "compressions learn from another loss"


def test_frozen_weights_stay():
    lm = small_lm("transformer-xl")
    lm.embed.requires_grad_(False)
    moved = weights_that_move(lm, LEARN, 40)
    assert "head.weight" in moved
    assert "embed.weight" not in moved


def test_a_model_without_weights_to_learn_is_an_error():
    lm = small_lm("transformer-xl").requires_grad_(False)
    with pytest.raises(ValueError, match=r"learn_weights=all names no weights .*requires_grad_"):
        evaluate_learning(lm, random_text(40), 1, LEARN)


def test_a_document_starts_empty_but_with_learned_weights():
    lm = small_lm("transformer-xl")
    text = random_text(sum(DOCUMENTS))
    learner = copy.deepcopy(lm)
    wanted = [losses_by_hand(learner, part[:, None]) for part in text.split(DOCUMENTS)]
    losses, evaluation = losses_in_order(lm, text, documents=DOCUMENTS)
    assert losses.tolist() == pytest.approx(torch.cat(wanted).flatten().tolist(), abs=1e-10)
    assert evaluation.document_losses == pytest.approx([x.mean().item() for x in wanted], abs=1e-10)


def test_each_document_is_learned_alone_with_reset():
    lm = small_lm("transformer-xl")
    text = random_text(sum(DOCUMENTS))
    learn = LearnConfig(learn_rate=RATE, learn_reset=True)
    losses, _ = losses_in_order(lm, text, learn=learn, documents=DOCUMENTS)
    alone = []
    for document in text.split(DOCUMENTS):
        document_losses, _ = losses_in_order(lm, document)
        alone += document_losses.tolist()
    assert losses.tolist() == alone


@pytest.mark.parametrize("documents", [(), DOCUMENTS])
@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("model", MODELS)
def test_a_rate_of_zero_is_the_static_evaluation(model, streams, documents):
    lm = small_lm(model)
    text = random_text(sum(DOCUMENTS))
    static = evaluate(lm, text, streams, documents=documents)
    learned = evaluate_learning(lm, text, streams, LearnConfig(learn_rate=0.0), documents=documents)
    assert learned.loss == pytest.approx(static.loss, abs=1e-12)
    assert learned.by_position == pytest.approx(static.by_position, abs=1e-12)
    assert learned.accuracy == static.accuracy
    assert static.minus(learned).mean == pytest.approx(0.0, abs=1e-12)


def test_divergence_is_an_error_that_leaves_the_model_as_it_was():
    lm = small_lm("transformer-xl")
    weights = weights_of(lm)
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) while learning; use a lower learn_rate"):
        evaluate_learning(lm, random_text(200), 1, LearnConfig(learn_rate=1e200))
    assert changed_weights(lm, weights) == set()


def test_learning_leaves_the_static_numbers_alone():
    lm = small_lm("compressive", vocab_size=256)
    text = "To be, or not to be. " * 20
    static = evaluate_text(lm, ByteTokenizer(), text, streams=1)
    both = evaluate_text(lm, ByteTokenizer(), text, learn=LEARN)
    for name, number in static.items():
        assert both[name] == pytest.approx(number, rel=0, abs=0, nan_ok=True)
    names = {f"learning_{name}" for name in static.keys() - {"tokens"}}
    names |= {"learning_saves_nats", "learning_saves_uncertainty_nats"}
    assert both.keys() - static.keys() == names
    saved = both["loss_nats"] - both["learning_loss_nats"]
    assert both["learning_saves_nats"] == pytest.approx(saved)
    assert saved > 0.1


def test_a_difference_is_paired_over_blocks_of_the_text():
    # Blocks are long, and so are these segments.
    lm = small_lm("transformer-xl", segment_len=64)
    text = random_text(4 * BLOCK + 30)
    static = evaluate(lm, text, 1)
    _, learned = losses_in_order(lm, text)
    saved = static.minus(learned)
    differences = []
    for (_, loss), (_, learned_loss) in zip(static.over_text(9), learned.over_text(9), strict=True):
        differences.append(loss - learned_loss)
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


def run_evaluate(*options):
    words = ["--pretrained", "transformer-xl-shakespeare", "--device", "cpu", *map(str, options)]
    parse_arguments(Evaluate, words).run()


@pytest.mark.drawn
def test_the_command_shows_both_side_by_side(book, tmp_path, capsys):
    run_evaluate("--text", book, "--learn", "--out", tmp_path / "out")
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
    run_evaluate("--text", tmp_path, "--learn", "--out", tmp_path / "out")
    for row in json.loads((tmp_path / "out" / NUMBERS).read_text())["documents"]:
        assert row["learning_loss"] < row["loss"]


def test_the_command_takes_a_training_text_for_rms(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Speak, good captain, speak.\n" * 20, encoding="utf-8")
    run_evaluate("--text", text, "--learn", "--learn-step", "rms", "--learn-text", text)
    assert "learning saves" in capsys.readouterr().out
    with pytest.raises(ValueError, match="name one with learn_text"):
        run_evaluate("--text", text, "--learn", "--learn-step", "rms")


def test_options_of_learning_need_it_and_are_checked(book):
    with pytest.raises(ValueError, match="are for --learn; add it"):
        run_evaluate("--text", book, "--learn-rate", "0.1")
    with pytest.raises(ValueError, match="learn_rate"):
        run_evaluate("--text", book, "--learn", "--learn-rate", "-1")


def run_generate(prompt, *options):
    words = ["--pretrained", "transformer-xl-shakespeare", "--device", "cpu", "--prompt", prompt]
    return run("generate", *words, "--tokens", 40, "--seed", 3, *options)


def test_generation_learns_its_prompt():
    model, tokenizer = load_pretrained("transformer-xl-shakespeare", torch.device("cpu"))
    prompt = "Speak, good captain, speak.\nI will not speak.\n" * 4
    with learned(model, tokenizer.encode(prompt), 1, LearnConfig()):
        wanted = continue_text(model, tokenizer, prompt, 40, Sampling(0.8), seed=3)
    assert wanted != continue_text(model, tokenizer, prompt, 40, Sampling(0.8), seed=3)
    assert run_generate(prompt, "--learn").out == f"{prompt}{wanted}\n"


def test_generation_needs_a_prompt_to_learn():
    ended = run_generate("R", "--learn")
    assert ended.code
    assert "--learn needs a prompt of at least 2 tokens, got 1" in ended.err


def test_what_was_learned_lasts_as_long_as_the_context():
    lm = small_lm("transformer-xl", vocab_size=256).eval()
    weights = weights_of(lm)
    with learned(lm, torch.randint(256, (99,)), 1, LearnConfig()) as evaluation:
        assert evaluation.tokens == 98
        assert changed_weights(lm, weights)
    assert changed_weights(lm, weights) == set()


def test_norms_are_all_layer_norms():
    """What the test above tells by their names."""
    lm = small_lm("compressive")
    norms = {name for name, module in lm.named_modules() if isinstance(module, nn.LayerNorm)}
    assert norms == {name.rpartition(".")[0] for name, _ in lm.named_parameters() if "norm" in name}
