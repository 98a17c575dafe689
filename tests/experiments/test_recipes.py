"""The search for recipes, without its trainings."""

import pytest

from experiments.recipes.__main__ import Search, main, table
from experiments.recipes.candidates import CANDIDATES
from experiments.recipes.trial import result_of
from memformers.common.errors import UserError
from memformers.common.files import write_json


def test_the_table_has_each_recipe_beside_the_default_seed_by_seed(tmp_path):
    losses = {"default": (1.5, 1.6, 1.7), "β₂ 0.999": (1.51, 1.61, 1.71), "6 layers": (1.4,)}
    for name, of_name in losses.items():
        for seed, loss in enumerate(of_name):
            write_json(result_of(tmp_path, name, seed), {"loss": loss})
    search = Search(out=tmp_path, recipes=(*losses, "float32"), seeds=3, seconds=100.0)
    assert table(search, dict.fromkeys(CANDIDATES, 20_000.0)).splitlines()[2:] == [
        "| 6 layers | 2.00 M | 1.400 | −0.100 | 1 |",
        "| default | 2.00 M | 1.600 ± 0.248 | – | 3 |",
        "| β₂ 0.999 | 2.00 M | 1.610 ± 0.248 | +0.010 ± 0.000 | 3 |",
    ]


def test_only_recipes_whose_steps_have_the_same_work_share_a_speed():
    work = {name: recipe.work for name, recipe in CANDIDATES.items()}
    default = {name for name, of_name in work.items() if of_name == work["default"]}
    assert {"β₂ 0.999", "no weight decay", "text from front to back"} <= default
    assert not default & {"32 streams", "full memory from the beginning", "float32", "memory of 128"}


def test_an_unknown_recipe_is_an_error(tmp_path):
    with pytest.raises(UserError, match="recipes β₂ 2 are unknown; there are: default; first version"):
        main(Search(out=tmp_path, recipes=("β₂ 2",)))
