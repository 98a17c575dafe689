"""``memformers check``: whether a memory does what every memory must."""

from dataclasses import dataclass, field, fields

from memformers.commands.train import with_custom_memory
from memformers.common.command_line import parse_arguments
from memformers.common.errors import UserError
from memformers.evaluation.conformance import SMALL, conformance
from memformers.models.config import ModelConfig


@dataclass(frozen=True)
class Check:
    """Test a memory in a small network: documents stay apart, no output depends on later tokens, generation
    equals evaluation, and so on. memformers check MODEL, then the settings of the network and of the memory.

    Example: memformers check my_memory.py:Averages --decay 0.5

    Example: memformers check compressive --compression dilated
    """

    config: ModelConfig = field(default_factory=lambda: ModelConfig(**SMALL, token_shift=True))
    """The network and its memory."""

    def run(self) -> None:
        """Print a line for each check; UserError if one failed."""
        settings = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        failed = 0
        for name, requirement, problem in conformance(**settings):
            print(f"{'FAILED' if problem else 'ok':6}  {name:9}  {requirement}", flush=True)
            if problem:
                print(f"{'':19}{problem}")
            failed += bool(problem)
        if failed:
            raise UserError(f"{self.config.model} fails {failed} of the checks above.")


def parse_check(arguments: list[str], prog: str | None = None) -> Check:
    """The arguments of a check, of which the first is the model."""
    if not arguments:
        raise UserError("name the memory to check, as in: memformers check my_memory.py:Averages")
    if not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    default = Check(with_custom_memory(Check().config, arguments))
    check: Check = parse_arguments(Check, arguments, prog=prog, default=default)
    return check
