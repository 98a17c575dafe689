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
from memformers.common.intervals import mean_of, paired
from memformers.data.corpus_reader import read_text
from memformers.data.tokenizers import TOKENIZER
from memformers.models.io import PACKAGED
from memformers.training.api import train
from memformers.training.config import TrainConfig
from memformers.training.initial_weights import load_initial

MODEL, RATES, CHOSEN_WITH = "compressive-shakespeare", (0.1, 0.3, 1.0), 100
"""Both sides are tried with these parts of the default learning rates, from this seed."""
PARTS = {"learned": (0.0, 0.8), "valid": (0.8, 0.9), "test": (0.9, 1.0)}


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
        known = set(load_initial(MODEL)[1].to_json()["vocabulary"])
        text = "".join(character for character in read_text(self.text) if character in known)
        self.out.mkdir(parents=True, exist_ok=True)
        for name, (begin, end) in PARTS.items():
            part = text[round(begin * len(text)) : round(end * len(text))]
            (self.out / f"{name}.txt").write_text(part, encoding="utf-8")
        rates, losses = {}, {}
        for side in ("begun", "scratch"):
            rates[side] = min(RATES, key=lambda rate: self.loss(side, rate, CHOSEN_WITH, "valid"))
            losses[side] = {seed: self.loss(side, rates[side], seed, "test") for seed in range(self.seeds)}
        means = {side: mean_of([*by_seed.values()]) for side, by_seed in losses.items()}
        summary = {**means, "difference": paired(losses["begun"], losses["scratch"])}
        write_json(self.out / "results.json", {"tokens": self.tokens, "rates": rates, "losses": summary})
        for name, mean in summary.items():
            assert mean
            print(f"{name:<11}{mean.mean:+.4f} ± {mean.half_width:.4f} nats per character")

    def loss(self, side: str, rate: float, seed: int, part: str) -> float:
        usual, begun = TrainConfig(), side == "begun"
        config = replace_nested(
            usual, model=load_initial(MODEL)[0].config, data=str(self.out / "learned.txt"),
            validation=str(self.out / f"{part}.txt"), max_tokens=self.tokens, batch_size=16, evaluations=1,
            tokenizer=usual.tokenizer if begun else str(PACKAGED / MODEL / TOKENIZER), evaluation_tokens=0,
            learning_rate=rate * usual.optim.learning_rate, seed=seed,
            muon_learning_rate=rate * usual.optim.muon_peak, memory_warmup=0.0 if begun else None,
        )  # fmt: skip
        folder = self.out / f"{side}-{rate}-{part}-{seed}"
        trained = train(config, folder, resume=True, init=MODEL if begun else None, dashboard="off")
        return float(trained.result["loss"])


if __name__ == "__main__":
    with cli_errors():
        parse_arguments(FineTuning).run()
