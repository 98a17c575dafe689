"""Where attention falls, against one query at a time."""

import math

import pytest
import torch

from memformers.evaluation.attention_distribution import attention_distribution
from memformers.models.memory import Memory
from tests.builders import SMALL, small_lm


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_it_is_the_mean_over_full_memories_of_what_each_query_looks_at(norm):
    lm, tokens = small_lm("compressive", norm=norm), torch.randint(0, 11, (100,))
    mass = attention_distribution(lm, tokens, streams=1, segments=3)
    C, M, S, c = SMALL.c_mem_len, SMALL.mem_len, SMALL.segment_len, SMALL.compression_rate
    filling, memory, places, bins = -(-(M + C * c) // S), Memory(()), [], []
    for number, segment in enumerate(tokens[: (filling + 3) * S, None].split(S)):
        _, inputs = lm.transformer(lm.embed(segment), memory, sizes=lm.config.memory_sizes)
        if number >= filling:
            layer = lm.transformer.layers[1]
            context = torch.cat((memory.c_mem[1], memory.mem[1], inputs[1]))
            context = layer.norm_self_attn(context) if norm == "pre" else context
            looks = layer.self_attn.probabilities(query=context[-S:], key=context)[0, 2]  # of one head
            kept = memory.mem_len
            for i in range(S):
                places.append(torch.stack([part.sum() for part in looks[i].split((C, kept, S))]))
                found = torch.zeros(len(mass.nearest), dtype=torch.float64)
                for j in range(C + kept + i + 1):
                    distance = C + kept + i - j
                    if j < C:  # the middle of c positions, older than all of the memory
                        distance = kept + i + (C - j) * c - (c - 1) / 2
                    found[0 if distance < 1 else 1 + int(math.log2(distance))] += looks[i, j]
                bins.append(found)
        memory, _ = lm.transformer.remember(memory, inputs, lm.config.memory_sizes)
    assert mass.nearest == [0, 1, 2, 4, 8, 16]
    torch.testing.assert_close(torch.tensor(mass.by_place[1][2]), torch.stack(places).mean(0))
    torch.testing.assert_close(torch.tensor(mass.by_distance[1][2]), torch.stack(bins).mean(0))


@pytest.mark.parametrize("segments", [2, 8])
def test_documents_are_read_side_by_side_each_from_an_empty_memory(segments):
    lm, texts = small_lm("compressive"), torch.randint(0, 11, (3, 40))
    streams = torch.cat((texts.flatten(), texts[0, :1]))  # the last token is predicted only
    wanted = attention_distribution(lm, streams, streams=3, segments=segments)
    documents = [texts[0], texts[0, :20], texts[1], torch.cat((texts[2], texts[0]))]
    lengths = [len(document) for document in documents]
    found = attention_distribution(lm, torch.cat(documents), documents=lengths, streams=3, segments=segments)
    for name in ("by_place", "by_distance"):
        torch.testing.assert_close(torch.tensor(getattr(found, name)), torch.tensor(getattr(wanted, name)))
    assert attention_distribution(lm, streams, documents=[27, 27, 27, 13, 27], streams=3) is None
    with pytest.raises(ValueError, match=r"3 streams .* 50 tokens .* 85"):
        attention_distribution(lm, torch.zeros(50, dtype=torch.long), streams=3)
