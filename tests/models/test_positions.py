import torch

from memformers.models.positions import Sinusoids, sinusoids
from tests.builders import small_lm


def test_the_table_holds_the_papers_sinusoids_of_any_dtype_though_it_grew_and_was_cast():
    table = Sinusoids(8)
    for distances, dtype in ((3, torch.float32), (7, torch.float32), (5, torch.float64), (9, torch.float64)):
        table.to(dtype)
        found = table(distances, torch.empty(0, dtype=dtype))
        assert torch.equal(found, sinusoids(distances, 8).to(dtype))


def test_the_table_is_computed_once_and_shared_by_all_layers():
    lm = small_lm("transformer-xl")
    lm(torch.zeros(7, 1, dtype=torch.long))
    tables = {layer.self_attn.sinusoids.table.data_ptr() for layer in lm.transformer.layers}
    lm(torch.zeros(7, 1, dtype=torch.long))
    assert len(tables) == 1
    assert tables == {layer.self_attn.sinusoids.table.data_ptr() for layer in lm.transformer.layers}
    assert not [name for name in lm.state_dict() if "table" in name]


def test_a_table_made_in_inference_mode_does_not_stop_a_training():
    lm, tokens = small_lm("transformer-xl"), torch.zeros(7, 1, dtype=torch.long)
    with torch.inference_mode():
        lm(tokens)
    lm(tokens).logits.sum().backward()
