"""The compute, memory and communication of a step of two published models on 1, 8 and 64 GPUs, as estimates.

Run it with ``python -m experiments.scaling``; it prints the page that it writes to docs/scaling.md, and
trains nothing. ``--help`` lists the rates that can be set.
"""

from importlib.util import find_spec

from experiments.scaling.page import Rates, page
from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.errors import UserError


def main(rates: Rates) -> None:
    """Print the tables and write the page. Raises UserError if Triton is missing, which the fused kernel
    needs."""
    if find_spec("triton") is None:
        raise UserError(
            "counting the memory of the fused kernel needs Triton; install it (pip install triton)."
        )
    text = page(rates)
    rates.out.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten: {rates.out}")


if __name__ == "__main__":
    with plain_errors():
        main(parse_arguments(Rates))
