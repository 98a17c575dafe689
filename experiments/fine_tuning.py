"""The package's model begun on another text, beside the same network from scratch.

Run it with ``python -m experiments.fine_tuning BOOK.txt``, any text of some hundred thousand characters; what
the model's 65 characters don't have is left out. Both sides read the same tokens. Each takes the best of
the same learning rates, chosen with a seed of its own on the validation part; the losses that are compared
are those of the test part, over other seeds.
"""

from dataclasses import dataclass
from pathlib import Path

import tyro

from memformers.common.command_line import parse_arguments, plain_errors
from memformers.common.fields import Checked, Count, changed
from memformers.common.files import write_json
from memformers.common.intervals import mean_of
from memformers.data.corpus_reader import read_text
from memformers.data.tokenizers import TOKENIZER
from memformers.models.io import PACKAGED
from memformers.training.api import train
from memformers.training.config import TrainConfig
from memformers.training.initial import load_initial

MODEL = "compressive-shakespeare"
RATES = (0.1, 0.3, 1.0)
"""Parts of the default learning rates that both sides are tried with."""
CHOSEN_WITH = 100
"""The seed with which they are."""


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
        """Train both sides, and write and print what came out."""
        network, tokenizer = load_initial(MODEL)
        known = set(tokenizer.saved()["vocabulary"])
        text = "".join(character for character in read_text(str(self.text)) if character in known)
        parts = {name: self.out / f"{name}.txt" for name in ("learned", "valid", "test")}
        self.out.mkdir(parents=True, exist_ok=True)
        for path, begin, end in zip(parts.values(), (0.0, 0.8, 0.9), (0.8, 0.9, 1.0), strict=True):
            path.write_text(text[round(begin * len(text)) : round(end * len(text))], encoding="utf-8")

        def loss(begun: bool, rate: float, seed: int, part: str) -> float:
            """Train once; returns the loss on a part that isn't learned, in nats per character."""
            usual = TrainConfig()
            config = changed(
                usual,
                model=network.config,
                data=str(parts["learned"]),
                validation=str(parts[part]),
                tokenizer=usual.tokenizer if begun else str(PACKAGED / MODEL / TOKENIZER),
                tokens=self.tokens,
                batch_size=16,
                evaluations=1,
                evaluation_tokens=0,
                learning_rate=rate * usual.optim.learning_rate,
                muon_learning_rate=rate * usual.optim.muon_peak,
                memory_warmup=0.0 if begun else None,
                seed=seed,
            )
            folder = self.out / f"{'begun' if begun else 'scratch'}-{rate}-{part}-{seed}"
            found = train(config, folder, resume=True, init=MODEL if begun else None, dashboard="off")
            return float(found.result["loss"])

        best = {
            begun: min(RATES, key=lambda rate: loss(begun, rate, CHOSEN_WITH, "valid"))
            for begun in (True, False)
        }
        losses = {b: [loss(b, best[b], seed, "test") for seed in range(self.seeds)] for b in (True, False)}
        means = {"begun": mean_of(losses[True]), "scratch": mean_of(losses[False])}
        means["difference"] = mean_of([a - b for a, b in zip(losses[True], losses[False], strict=True)])
        rates = {"begun": best[True], "scratch": best[False]}
        write_json(self.out / "results.json", {"tokens": self.tokens, "rates": rates, "losses": means})
        for name, mean in means.items():
            print(f"{name:<11}{mean.mean:+.4f} ± {mean.half_width:.4f} nats per character")


if __name__ == "__main__":
    with plain_errors():
        parse_arguments(FineTuning).run()
