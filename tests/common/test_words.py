import pytest

from memformers.common.words import counted


@pytest.mark.parametrize(
    ("number", "said"), [(1, "1 document"), (0, "0 documents"), (2_000, "2,000 documents")]
)
def test_one_is_one(number, said):
    assert counted(number, "document") == said
