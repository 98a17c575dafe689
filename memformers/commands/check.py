"""``memformers check``: whether a memory keeps what every memory promises."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from memformers.common.errors import UserError
from memformers.evaluation.conformance import conformance


@dataclass(frozen=True)
class Check:
    """Check with a small network that a memory of your own satisfies what every memory must.

    Example: memformers check my_memory.py:Averages
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The memory, such as my_memory.py:Averages, or a built-in one."""

    def run(self) -> None:
        """Print a line for each check; UserError if one failed."""
        failed = 0
        for name, asked, said in conformance(self.model):
            print(f"{'FAILED' if said else 'ok':6}  {name:9}  {asked}", flush=True)
            if said:
                print(f"{'':19}{said}")
            failed += bool(said)
        if failed:
            raise UserError(f"{self.model} fails {failed} of the checks above.")
