"""What two published models ask of 1, 8 and 64 GPUs, on paper: compute, memory and communication a step.

Run it with ``python -m experiments.scaling``; it prints what it writes into docs/scaling.md, and trains
nothing. ``--help`` lists the rates that can be set.
"""

from importlib.util import find_spec

from experiments.scaling.page import Rates, page
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.errors import UserError


def main(rates: Rates) -> None:
    """Print the tables, and write them down. Raises UserError where there is no fused kernel to count."""
    if find_spec("triton") is None:
        raise UserError(
            "what the fused kernel keeps is counted with Triton; install it (pip install triton)."
        )
    text = page(rates)
    rates.out.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten: {rates.out}")


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Rates))
