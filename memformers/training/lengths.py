"""How long the memories of a model are in a step in which they are full."""

from dataclasses import dataclass

from memformers.language_model import ModelConfig
from memformers.memory import slots_to_compress


@dataclass(frozen=True)
class Lengths:
    """What a segment meets, and what becomes of it."""

    S: int
    """Positions of the segment."""
    M: int
    """Positions of memory before it."""
    C: int
    """Slots of compressed memory before it."""
    n: int
    """Slots that are compressed after it."""

    @property
    def P(self) -> int:
        """All that is remembered."""
        return self.C + self.M

    @property
    def K(self) -> int:
        """Keys that each query meets."""
        return self.P + self.S


def full_lengths(config: ModelConfig) -> Lengths:
    """The lengths of a step after so many that nothing grows any more.

    Where ``compression_rate`` doesn't divide the lengths, they vary by up to a slot's worth of positions
    from step to step, and of those the step counts that compresses most.
    """
    S, c = config.segment_len, config.compression_rate
    if config.model != "compressive":
        return Lengths(S, config.mem_len if config.model == "transformer-xl" else 0, 0, 0)
    M = C = 0
    until_full = (config.mem_len + (config.c_mem_len + 1) * c) // S + 1
    steps = []
    for _ in range(until_full + c):
        n = slots_to_compress(M + S, config.mem_len, c)
        steps.append(Lengths(S, M, C, n))
        M, C = M + S - n * c, min(C + n, config.c_mem_len)
    return max(steps[until_full:], key=lambda step: (step.n, step.M))
