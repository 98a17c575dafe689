#!/bin/sh
# torch 2.13.0: an optimizer of named parameters loads its state by position, and takes over the saved names.
#
# Since 2.6 an optimizer takes model.named_parameters(), and its state_dict holds "param_names". load_state_dict
# ignores them: after two layers of one size have changed places in the model, each weight gets the other's
# moments, without an error, and param_groups then names each parameter as the other. The weights themselves, in the
# model's state_dict, are loaded by name. The documentation of load_state_dict says that names don't affect loading, and
# a request of 2017 is open (github.com/pytorch/pytorch/issues/1489).
# Guess: what is saved with names is matched by names, or an error says that they differ.
# Output seen: first exp_avg saved 0.1, loaded 0.5, named second; second exp_avg saved 0.5, loaded 0.1, named first
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch


def named(*names):
    parameters = {name: torch.nn.Parameter(torch.zeros(2, 2)) for name in names}
    return parameters, torch.optim.AdamW(parameters.items())


saved, optimizer = named("first", "second")
saved["first"].grad = torch.full((2, 2), 1.0)
saved["second"].grad = torch.full((2, 2), 5.0)
optimizer.step()
torch.save(optimizer.state_dict(), "optimizer.pt")
loaded, other = named("second", "first")
other.load_state_dict(torch.load("optimizer.pt"))
group = other.param_groups[0]
seen = []
for name in ("first", "second"):
    before = round(optimizer.state[saved[name]]["exp_avg"][0, 0].item(), 4)
    after = round(other.state[loaded[name]]["exp_avg"][0, 0].item(), 4)
    index = [parameter is loaded[name] for parameter in group["params"]].index(True)
    called = group["param_names"][index]
    seen.append(f"{name} exp_avg saved {before}, loaded {after}, named {called}")
print("; ".join(seen))
assert seen == [
    "first exp_avg saved 0.1, loaded 0.5, named second",
    "second exp_avg saved 0.5, loaded 0.1, named first",
]
PYTHON
