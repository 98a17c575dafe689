#!/bin/sh
# torch 2.13.0: Optimizer.load_state_dict casts the state of bfloat16 weights to bfloat16, whatever its dtype was.
#
# A floating-point state gets the dtype of its parameter when it is loaded, except one called "step". So
# an optimizer that keeps float32 master weights beside bfloat16 parameters loses them by saving and loading: they
# are rounded, without a warning, and the next steps start from the rounded ones. In PyTorch's NAdam, the product of
# momenta, a float32 scalar, becomes bfloat16.
# Guess: a state dict is loaded as it was saved, on the parameter's device.
# Output seen: master float32 1.0009765625 -> bfloat16 1.0; mu_product float32 -> bfloat16; step float32 -> float32
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 numpy==2.3.5
cd "$folder"
"$folder/venv/bin/python" - <<'PYTHON'
import torch


class WithMaster(torch.optim.Optimizer):
    """SGD on float32 copies of the parameters."""

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master", p.detach().float())
                master.sub_(p.grad.float(), alpha=group["lr"])
                p.data.copy_(master)


def saved_and_loaded(build):
    p = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, -1.0)
    optimizer = build([p])
    optimizer.step()
    torch.save(optimizer.state_dict(), "optimizer.pt")
    loaded = build([p])
    loaded.load_state_dict(torch.load("optimizer.pt"))
    return optimizer.state[p], loaded.state[p]


ours, theirs = saved_and_loaded(lambda ps: WithMaster(ps, {"lr": 2**-10}))
before, after = ours["master"], theirs["master"]
ours, theirs = saved_and_loaded(torch.optim.NAdam)
names = [str(x.dtype).removeprefix("torch.") for x in (before, after)]
print(f"master {names[0]} {before.item()} -> {names[1]} {after.item()}; ", end="")
for name in ("mu_product", "step"):
    kinds = [str(x[name].dtype).removeprefix("torch.") for x in (ours, theirs)]
    print(f"{name} {kinds[0]} -> {kinds[1]}", end="; " if name == "mu_product" else "\n")
assert before.dtype == torch.float32
assert after.dtype == torch.bfloat16
assert (before.item(), after.item()) == (1 + 2**-10, 1.0)
assert theirs["mu_product"].dtype == torch.bfloat16
assert theirs["step"].dtype == torch.float32
PYTHON
