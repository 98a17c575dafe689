#!/bin/sh
# tensordict 0.15.3, torch 2.13.0: TensorDict.to(dtype) and .bfloat16() convert integers and Booleans, too.
#
# nn.Module.to(torch.bfloat16) converts floating-point tensors alone, and so does everything named after it. A
# TensorDict converts all of its tensors: token ids, lengths, actions and masks become floating point, and in
# bfloat16 ids above 256 become other ids, without an error. An embedding refuses them; after .long(), which looks
# like the remedy, it reads the wrong rows.
# Guess: only floating-point tensors are converted.
# Output seen: module int64, tensordict bfloat16; ids 1001, 1003 become 1000, 1004; mask bfloat16
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 tensordict==0.15.3 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch
from tensordict import TensorDict

module = torch.nn.Module()
module.register_buffer("ids", torch.tensor([1001, 1003]))
module.to(torch.bfloat16)
batch = TensorDict({"ids": module.ids, "mask": torch.tensor([True, False])}, [2])
converted = batch.to(torch.bfloat16)
assert converted["ids"].dtype == batch.bfloat16()["ids"].dtype
ids = converted["ids"].long().tolist()
print(
    f"module {module.ids.dtype}, tensordict {converted['ids'].dtype}; ids 1001, 1003 become {ids[0]}, {ids[1]}; "
    f"mask {converted['mask'].dtype}".replace("torch.", "")
)
assert module.ids.dtype == torch.int64
assert converted["ids"].dtype == converted["mask"].dtype == torch.bfloat16
assert ids == [1000, 1004]
PYTHON
