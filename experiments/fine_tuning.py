"""The package's model begun on another text, beside the same network from scratch.

Run it with ``python -m experiments.fine_tuning BOOK.txt``; characters beyond the model's 65 are left out.
Each side takes the best of the same learning rates, chosen with another seed on the validation part.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from memformers.common.command_line import cli_errors, parse_arguments
from memformers.common.fields import Checked, Count, replace_nested
from memformers.common.files import write_json
from memformers.common.intervals import Mean, mean_of, paired
from memformers.data.corpus_reader import read_text
from memformers.data.tokenizers import TOKENIZER
from memformers.models.io import PACKAGED
from memformers.training.api import train
from memformers.training.config import TrainConfig
from memformers.training.initial_weights import load_initial

MODEL = "compressive-shakespeare"
RATES = (0.1, 0.3, 1.0)
"""The parts of the default learning rates with which both sides are tried."""
SELECTION_SEED = 100
"""The seed with which they are tried; results are of other seeds."""
PARTS = {"learned": (0.0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1.0)}
"""Shares of the text at which its parts begin and end."""
FINE_TUNED = "begun"
SCRATCH = "scratch"


@dataclass(frozen=True)
class FineTuning(Checked):
    """The package's model begun on another text, beside the same network from scratch."""

    text: tyro.conf.Positional[Path]
    """A text file."""
    tokens: Count = 200_000
    """How many characters each training reads."""
    seeds: Count = 3
    out: Path = Path("runs/fine_tuning")
    """A folder for the trainings and the results."""

    def run(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.write_parts()
        # Each side chooses its rate on the validation part, and is measured on the test part.
        rates = {}
        losses = {}
        for side in (FINE_TUNED, SCRATCH):
            rates[side] = self.choose_rate(side)
            losses[side] = {seed: self.loss(side, rates[side], seed, "test") for seed in range(self.seeds)}
        means: dict[str, Mean | None] = {}
        for side, by_seed in losses.items():
            means[side] = mean_of([*by_seed.values()])
        means["difference"] = paired(losses[FINE_TUNED], losses[SCRATCH])
        write_json(self.out / "results.json", {"tokens": self.tokens, "rates": rates, "losses": means})
        for name, mean in means.items():
            assert mean
            print(f"{name:<11}{mean.mean:+.4f} ± {mean.half_width:.4f} nats per character")

    def write_parts(self) -> None:
        """Write the parts of the text, without characters that the model doesn't have."""
        _, tokenizer = load_initial(MODEL)
        characters = set(tokenizer.to_json()["vocabulary"])
        text = "".join(character for character in read_text(self.text) if character in characters)
        for name, (begin, end) in PARTS.items():
            part = text[round(begin * len(text)) : round(end * len(text))]
            (self.out / f"{name}.txt").write_text(part, encoding="utf-8")

    def choose_rate(self, side: str) -> float:
        losses = {rate: self.loss(side, rate, SELECTION_SEED, "valid") for rate in RATES}
        return min(losses, key=losses.__getitem__)

    def loss(self, side: str, rate: float, seed: int, part: str) -> float:
        """Train a ``side`` with a part of the default learning rates, and evaluate it on a ``part``."""
        defaults = TrainConfig()
        model, _ = load_initial(MODEL)
        config = replace_nested(
            defaults,
            model=model.config,
            data=str(self.out / "learned.txt"),
            validation=str(self.out / f"{part}.txt"),
            max_tokens=self.tokens,
            batch_size=16,
            evaluations=1,
            evaluation_tokens=0,
            learning_rate=rate * defaults.optim.learning_rate,
            muon_learning_rate=rate * defaults.optim.muon_peak,
            seed=seed,
        )
        # Both sides have the same tokens; only one begins with the trained weights.
        init = None
        if side == FINE_TUNED:
            init = MODEL
            config = replace_nested(config, memory_warmup=0.0)  # it is used to a full memory
        else:
            config = replace_nested(config, tokenizer=str(PACKAGED / MODEL / TOKENIZER))
        folder = self.out / f"{side}-{rate}-{part}-{seed}"
        trained = train(config, folder, resume=True, init=init, dashboard="off")
        return float(trained.result["loss"])


if __name__ == "__main__":
    with cli_errors():
        parse_arguments(FineTuning).run()
