"""Generation in transformers by parts: prompts in chunks, and further text after what was generated."""

import copy
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

pytest.importorskip(
    "transformers", reason="transformers is not installed; use pip install '.[hf]' in a clone"
)

import transformers

from memformers import generate
from memformers.integrations.huggingface import MemformerConfig, MemformerForCausalLM, MemoryCache
from tests.builders import MODELS, small_lm

pytestmark = pytest.mark.usefixtures("here")
PROMPTS = [torch.arange(n) ** 2 % 11 for n in (3, 24, 10, 3)]
MASK = torch.stack([F.pad(torch.ones_like(p), (24 - len(p), 0)) for p in PROMPTS])
PADDED = torch.stack([F.pad(p, (24 - len(p), 0), value=999) for p in PROMPTS])
MORE = torch.stack([3 * torch.arange(9) + row for row in range(4)]) % 11
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def wrapped(model="compressive", **changes):
    """A model of transformers with large weights, whose text varies."""
    lm = small_lm(model, **changes)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.8)
    adapter = MemformerForCausalLM(MemformerConfig(**asdict(lm.config)))
    adapter.model = lm
    return adapter.eval()


def ours(adapter, texts, n=12):
    """What [`memformers.generate`][] writes after each of ``texts``: ``[B, n]``."""
    return torch.stack(list(generate(adapter.model, texts, n, temperature=0)), dim=1)


class CountedTokens(TorchFunctionMode):
    """Counts the tokens that are embedded; a model with a hook would be read as a whole for each of them."""

    n_tokens = 0

    def __torch_function__(self, function, _, args=(), kwargs=None):
        if function is F.embedding:
            self.n_tokens += len(args[0])
        return function(*args, **(kwargs or {}))


def with_cache(adapter, ids, mask=None, **options):
    return adapter.generate(ids, attention_mask=mask, return_dict_in_generate=True, **GREEDY | options)


def texts_of(sequences):
    """The rows of ``sequences [4, T]`` without the padding of ``PADDED``."""
    return [row[24 - len(prompt) :] for row, prompt in zip(sequences, PROMPTS, strict=True)]


def continued(sequences):
    """The ids of ``sequences [4, T]`` and ``MORE`` after them, and their mask."""
    ids = torch.cat((sequences, MORE), dim=1)
    return ids, F.pad(MASK, (0, ids.shape[1] - 24), value=1)


@pytest.mark.parametrize("size", [1, 3, 7, 100])
@pytest.mark.parametrize("model", MODELS)
def test_prompts_in_chunks_are_continued_as_whole_ones(model, size):
    """Chunks of 1 and 3 have only padding at first."""
    adapter = wrapped(model, token_shift=True)
    theirs = adapter.generate(PADDED, attention_mask=MASK, prefill_chunk_size=size, **GREEDY)
    assert torch.equal(theirs[:, 24:], ours(adapter, PROMPTS))


def test_beams_from_prompts_in_chunks_are_those_from_whole_ones():
    adapter = wrapped()
    whole, chunks = (
        adapter.generate(PADDED, attention_mask=MASK, num_beams=3, prefill_chunk_size=size, **GREEDY)
        for size in (None, 4)
    )
    assert torch.equal(chunks, whole)


@pytest.mark.parametrize("model", MODELS)
def test_a_returned_cache_is_continued_as_the_whole_text(model):
    adapter = wrapped(model, token_shift=True)
    first = with_cache(adapter, PADDED, MASK)
    ids, mask = continued(first.sequences)
    second = with_cache(adapter, ids, mask, cache=first.cache)
    assert torch.equal(second.sequences[:, ids.shape[1] :], ours(adapter, texts_of(ids)))
    third = adapter.generate(
        second.sequences, attention_mask=F.pad(mask, (0, 12), value=1), cache=second.cache, **GREEDY
    )
    expected = ours(adapter, texts_of(second.sequences))
    assert torch.equal(third[:, -12:], expected)
    assert len(second.sequences[:, ids.shape[1] :].unique()) > 2


def test_only_what_the_cache_has_not_read_is_computed():
    adapter = wrapped()
    first = with_cache(adapter, PROMPTS[1][None])
    with CountedTokens() as counted:
        adapter.generate(torch.cat((first.sequences, MORE[:1]), 1), cache=first.cache, **GREEDY)
    # The running segment, up to 7 tokens, is read again; the newest of the 36 was never read.
    assert 0 < counted.n_tokens <= 7 + (1 + 9) + 11


def test_a_cache_is_unchanged_and_can_be_continued_again():
    adapter = wrapped()
    first = with_cache(adapter, PADDED, MASK)
    ids, mask = continued(first.sequences)
    expected = ours(adapter, texts_of(ids))
    for cache in (first.cache, first.cache, copy.deepcopy(first.cache)):
        theirs = adapter.generate(ids, attention_mask=mask, cache=cache, **GREEDY)
        assert torch.equal(theirs[:, ids.shape[1] :], expected)


def test_a_cache_that_began_with_a_memory_is_continued():
    adapter = wrapped()
    text = torch.stack((torch.arange(28), 3 * torch.arange(28) ** 2)) % 11
    memory = adapter(text[:, :21]).cache  # three segments
    first = with_cache(adapter, text[:, 21:], cache=memory)
    ids = torch.cat((first.sequences, MORE[:2]), dim=1)
    theirs = adapter.generate(ids, cache=first.cache, **GREEDY)
    assert torch.equal(theirs[:, -12:], ours(adapter, list(torch.cat((text[:, :21], ids), dim=1))))


def test_beams_continue_a_cache_as_they_continue_the_whole_text():
    adapter = wrapped()
    first = with_cache(adapter, PADDED, MASK)
    ids, mask = continued(first.sequences)
    asked = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2} | GREEDY
    assert torch.equal(adapter.generate(ids, cache=first.cache, **asked), adapter.generate(ids, **asked))


def test_each_of_several_samples_is_continued_from_their_cache():
    adapter = wrapped()
    torch.manual_seed(0)
    asked = {"do_sample": True, "temperature": 30.0, "num_return_sequences": 2}
    samples = with_cache(adapter, PADDED[1:3], MASK[1:3], **asked)
    assert len(samples.sequences.unique(dim=0)) == 4
    mask = F.pad(MASK[1:3].repeat_interleave(2, 0), (0, 12), value=1)
    theirs = adapter.generate(samples.sequences, attention_mask=mask, cache=samples.cache, **GREEDY)
    texts = [row[n:] for row, n in zip(samples.sequences, (0, 0, 14, 14), strict=True)]
    assert torch.equal(theirs[:, -12:], ours(adapter, texts))


def test_the_model_reads_on_from_a_cache_that_generate_returned():
    adapter = wrapped()
    first = with_cache(adapter, PADDED, MASK)
    # The newest id was not read.
    text = torch.cat((first.sequences[:, -1:], MORE), dim=1)
    logits = adapter(text, cache=first.cache).logits
    for row, texts in enumerate(texts_of(torch.cat((first.sequences, MORE), 1))):
        assert torch.allclose(logits[row, -1], adapter(texts[None]).logits[0, -1], atol=1e-4)


def an_end(adapter):
    """An id that one row soon has and another row doesn't have in the end."""
    rows = ours(adapter, PROMPTS).tolist()
    missing = [set(range(11)) - set(row) for row in rows]
    return next(i for i in set.union(*missing) if any(i in row[:6] for row in rows))


def test_rows_that_ended_continue_with_what_they_show():
    adapter = wrapped()
    end = an_end(adapter)
    first = cached(adapter, eos_token_id=end, pad_token_id=end)
    assert (first.sequences[:, -2:] == end).all(1).any()
    ids, mask = continued(first.sequences)
    theirs = continue_with(adapter, ids, mask, first.cache)
    assert torch.equal(theirs[:, -12:], ours(adapter, texts_of(ids)))


def cached(adapter, **options):
    return with_cache(adapter, PADDED, MASK, **options)


def continue_with(adapter, ids, mask, cache):
    return adapter.generate(ids, attention_mask=mask, cache=cache, **GREEDY)


def continue_prompts(adapter):
    return continue_with(adapter, PADDED, MASK, cached(adapter).cache)


def continue_new_ids(adapter):
    return adapter.generate(MORE, cache=cached(adapter).cache, **GREEDY)


def continue_other_ids(adapter):
    first = cached(adapter)
    ids, mask = continued(first.sequences)
    ids[1, 5] = (ids[1, 5] + 1) % 11
    return continue_with(adapter, ids, mask, first.cache)


def continue_padding_as_ids(adapter):
    first = with_cache(adapter, PADDED.where(PADDED < 11, 0), MASK)
    ids, mask = continued(first.sequences)
    return continue_with(adapter, ids, torch.ones_like(mask), first.cache)


def continue_fewer_rows(adapter):
    first = cached(adapter)
    ids, mask = continued(first.sequences)
    return continue_with(adapter, ids[:3], mask[:3], first.cache)


def continue_more_rows(adapter):
    first = cached(adapter)
    ids, mask = continued(first.sequences)
    return continue_with(adapter, ids.repeat(2, 1), mask.repeat(2, 1), first.cache)


def continue_padded_on_the_right(adapter):
    first = cached(adapter)
    ids, mask = continued(first.sequences)
    mask[2, -2:] = 0
    return continue_with(adapter, ids, mask, first.cache)


def continue_rows_that_ended(adapter):
    first = cached(adapter, eos_token_id=an_end(adapter), pad_token_id=11)
    assert (first.sequences == 11).any()
    return continue_with(adapter, *continued(first.sequences), first.cache)


def continue_ids_outside_the_vocabulary(adapter):
    first = cached(adapter)
    ids, mask = continued(first.sequences)
    ids[0, -1] = 11
    return continue_with(adapter, ids, mask, first.cache)


def read_on_with_padding(adapter):
    mask = torch.ones(4, 35 + 9)
    mask[0, -1] = 0
    return adapter(MORE, attention_mask=mask, cache=cached(adapter).cache)


def generate_with_documents(adapter):
    starts = torch.zeros(1, 24, dtype=torch.bool)
    starts[0, 20] = True
    return adapter.generate(PROMPTS[1][None], doc_starts=starts, **GREEDY)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (continue_prompts, "4 rows of 35 ids that this cache has read"),
        (continue_new_ids, "4 rows of 35 ids that this cache has read"),
        (continue_other_ids, "4 rows of 35 ids that this cache has read"),
        (continue_padding_as_ids, "4 rows of 35 ids that this cache has read"),
        (continue_padded_on_the_right, "4 rows of 35 ids that this cache has read"),
        (continue_rows_that_ended, "ids that this cache has read"),
        (continue_fewer_rows, "the 4 rows that this cache has read, got 3"),
        (continue_more_rows, "the 4 rows that this cache has read, got 8"),
        (continue_ids_outside_the_vocabulary, "below vocab_size=11"),
        (read_on_with_padding, "padding_side='left'"),
        (lambda adapter: continue_with(wrapped(), PADDED, MASK, cached(adapter).cache), "of another model"),
        (lambda adapter: adapter(MORE, cache=cached(adapter).cache, labels=MORE), "leave out labels"),
        (generate_with_documents, "leave out labels and doc_starts"),
        (lambda adapter: adapter(MORE[:2], cache=adapter(MORE).cache), r"\[3, 2, 12\] on cpu, got"),
        (
            lambda adapter: adapter.generate(MORE[:2], cache=adapter(MORE).cache, **GREEDY),
            r"\[3, 2, 12\] on cpu, got",
        ),
        (lambda adapter: adapter(MORE, cache=transformers.DynamicCache()), "got a DynamicCache"),
        (lambda adapter: adapter.generate(MORE, cache=transformers.DynamicCache(), **GREEDY), "DynamicCache"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused_in_a_line(change, message):
    with pytest.raises(ValueError, match=message) as raised:
        change(wrapped())
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("model", MODELS)
def test_a_memory_cache_carries_the_memory(model):
    adapter = wrapped(model)
    ids = torch.arange(4 * 30).reshape(4, 30) ** 2 % 11
    cache = MemoryCache(adapter.config)
    memory = None
    with torch.no_grad():
        for part in ids.split((7, 14, 9), dim=1):
            by_memory = adapter(part, cache=memory)
            memory = by_memory.cache
            by_cache = adapter(part, cache=cache)
            assert torch.equal(by_cache.logits, by_memory.logits)
            assert by_cache.cache is cache
    assert cache.get_seq_length() == 30
    assert len(cache) == adapter.config.n_layers


def test_the_rows_of_a_cache_are_selected_repeated_and_reset():
    adapter = wrapped()
    ids = torch.arange(3 * 14).reshape(3, 14) ** 2 % 11
    cache = MemoryCache(adapter.config)
    with torch.no_grad():
        expected = adapter(ids, cache=adapter(ids).cache).logits
        adapter(ids, past_key_values=cache)  # the older name
        copied = copy.deepcopy(cache)
        copied.reorder_cache(torch.tensor([2, 0, 1]))
        assert torch.allclose(adapter(ids[[2, 0, 1]], cache=copied).logits, expected[[2, 0, 1]], atol=1e-5)
        copied = copy.deepcopy(cache)
        copied.batch_repeat_interleave(2)
        assert copied.batch_size == 6
        repeated = adapter(ids.repeat_interleave(2, dim=0), cache=copied).logits
        assert torch.allclose(repeated[::2], expected, atol=1e-5)
        copied = copy.deepcopy(cache)
        copied.batch_select_indices(torch.tensor([1]))
        assert torch.allclose(adapter(ids[1:2], cache=copied).logits, expected[1:2], atol=1e-5)
        adapter(ids, cache=cache, use_cache=False)
        assert cache.get_seq_length() == 14
        cache.reset()
        assert torch.equal(adapter(ids, cache=cache).logits, adapter(ids).logits)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match="earlier token"):
        cache.crop(-1)


def test_a_cache_that_does_not_fit_is_refused():
    adapter = wrapped()
    ids = PADDED[:2] % 11
    with pytest.raises(ValueError, match="expected a cache of memories"):
        adapter(ids, cache=transformers.DynamicCache())
    deeper = MemoryCache(wrapped(n_layers=3).config)
    with pytest.raises(ValueError, match="of 2 layers, got a MemoryCache of 3"):
        adapter(ids, cache=deeper)
    assert deeper.get_seq_length() == 0
    cache = MemoryCache(adapter.config)
    with pytest.raises(ValueError, match="rows that end together"):
        adapter(PADDED, attention_mask=MASK, cache=cache)
    with pytest.raises(ValueError, match="another name of cache"):
        adapter(ids, cache=cache, past_key_values=cache)
    text = adapter.generate(ids, cache=cache, **GREEDY)
    assert torch.equal(text, adapter.generate(ids, **GREEDY))
    adapter(ids, cache=cache)
    with pytest.raises(ValueError, match="this cache has read a text"):
        adapter.generate(ids, cache=cache, **GREEDY)
