#!/bin/sh
# dacite 1.9.2: from_dict restores a field with init=False in a plain dataclass, and drops it in a frozen one.
#
# asdict writes all fields of a dataclass. from_dict passes those with init=True to the class and sets the others
# afterwards; a frozen class refuses that, so there they keep their default. strict=True, which reports unknown keys,
# reports nothing, since the key is known. So a frozen config that stores a derived or measured value, such as the
# size of a vocabulary, comes back from its own JSON with another one.
# Guess: from_dict(asdict(x)) equals x, or raises.
# Output seen: saved n_vocab 65; plain 65; frozen 0, with strict=True 0
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile dacite==1.9.2
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
from dataclasses import asdict, dataclass, field

from dacite import Config, from_dict


@dataclass
class Plain:
    width: int
    n_vocab: int = field(init=False, default=0)


@dataclass(frozen=True)
class Frozen:
    width: int
    n_vocab: int = field(init=False, default=0)


plain = Plain(8)
plain.n_vocab = 65
frozen = Frozen(8)
object.__setattr__(frozen, "n_vocab", 65)  # as __post_init__ of a frozen dataclass does
assert asdict(frozen) == asdict(plain)
of_plain = from_dict(Plain, asdict(plain)).n_vocab
of_frozen = from_dict(Frozen, asdict(frozen)).n_vocab
strict = from_dict(Frozen, asdict(frozen), Config(strict=True)).n_vocab
print(f"saved n_vocab {frozen.n_vocab}; plain {of_plain}; frozen {of_frozen}, with strict=True {strict}")
assert of_plain == 65
assert of_frozen == 0
assert strict == 0
PYTHON
