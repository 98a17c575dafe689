"""EleutherAI's lm-evaluation-harness, with the extra ``lm-eval``: importing this registers the model
``memformers``, since the harness finds none of other packages by itself. ``python -m
memformers.integrations.lm_eval`` is its own command, ``lm_eval``, with this model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from memformers.common.errors import UserError
from memformers.common.machine import choose_device
from memformers.convert.load import load_checkpoint, load_packaged
from memformers.data.streams import IGNORED
from memformers.evaluation.evaluate import with_lengths
from memformers.generation.generate import generate
from memformers.models.language_model import LMScores
from memformers.models.memory import Memory


@register_model("memformers")
class MemformersLM(TemplateLM):
    """A trained model for the harness, which reads each document whole, its memory carried from segment to
    segment. Raises ValueError for a folder that holds no model, and for lengths that it can't have.

    Args:
        pretrained: The folder of a run, of a checkpoint, of ``save_pretrained`` or of Hugging Face's
            Transformer-XL, or the name of a model of the package.
        device: Where to compute; ``cuda:0``, the default of the command, is a GPU if there is one.
        batch_size: How many documents are read side by side.
        lengths: ``segment_len``, ``mem_len``, ``c_mem_len`` and ``divided_len``, where they are to be others
            than in training.
    """

    def __init__(
        self,
        pretrained: str,
        device: str = "auto",
        batch_size: int | str = 1,
        **lengths: Any,
    ):
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise UserError(f"expected batch_size as a number, at least 1, got {batch_size!r}.")
        if unknown := sorted(set(lengths) - {"segment_len", "mem_len", "c_mem_len", "divided_len"}):
            raise UserError(f"{', '.join(unknown)}: no argument of this model; see MemformersLM.")
        at, is_here = choose_device("auto" if device == "cuda:0" else device), Path(pretrained).exists()
        loaded = load_checkpoint(Path(pretrained), at) if is_here else load_packaged(pretrained, at)
        self.model, self.own_tokenizer = with_lengths(loaded[0], **lengths), loaded[1]
        self._device, self.batch_size = at, int(batch_size)

    @property
    def eot_token_id(self) -> int:
        """The line break, or what else the vocabulary has, which a text without a context follows."""
        return int(self.own_tokenizer.ids(self.own_tokenizer.line_break)[-1])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text, to which none are added."""
        return [int(number) for number in self.own_tokenizer.ids(string)]

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """For each text, its context and its continuation: the continuation's log-probability, and whether
        each of its tokens was the likeliest."""
        found = [(0.0, True)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        for begin in tqdm(range(0, len(order), self.batch_size), disable=disable_tqdm):
            chosen = order[begin : begin + self.batch_size]
            inputs, targets = [], []
            for _, given, continuation in (requests[i] for i in chosen):
                context = given or [self.eot_token_id]
                whole = torch.tensor(context + continuation, device=self._device)
                inputs.append(whole[:-1])
                targets.append(whole[1:].index_fill(0, torch.arange(len(context) - 1).to(whole), IGNORED))
            S, memory = self.model.config.segment_len, Memory()
            nats, right = (
                [torch.zeros(len(chosen), dtype=torch.float64)],
                [torch.ones(len(chosen), dtype=torch.bool)],
            )
            read = pad_sequence(inputs).split(S), pad_sequence(targets, padding_value=IGNORED).split(S)
            for tokens, following in zip(*read, strict=True) if len(read[0][0]) else ():
                scores, memory, _auxiliary = cast(LMScores, self.model(tokens, memory, following))
                nats.append(scores.losses.double().sum(0).cpu())
                right.append((scores.correct | (following == IGNORED)).all(0).cpu())
            sums, are_right = torch.stack(nats).sum(0).tolist(), torch.stack(right).all(0).tolist()
            for i, loss, is_right in zip(chosen, sums, are_right, strict=True):
                found[i] = (-loss, is_right)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, whole, as the continuation of a line break."""
        texts = [("", [self.eot_token_id], self.tok_encode(request.args[0])) for request in requests]
        return [nats for nats, _ in self._loglikelihood_tokens(texts, disable_tqdm)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each context, up to a text that ends it; greedy, or drawn if asked for."""
        texts = []
        for context, how in tqdm([request.args for request in requests], disable=disable_tqdm):
            until = [how["until"]] if isinstance(how.get("until"), str) else how.get("until", [])
            prompt = torch.tensor(self.tok_encode(context) or [self.eot_token_id], device=self._device)
            drawn = {name: how[name] for name in ("temperature", "top_k", "top_p") if name in how}
            sampling = drawn if how.get("do_sample") else {"temperature": 0.0}
            n, text, piece = how.get("max_gen_toks", 256), "", self.own_tokenizer.decoder()
            for token in generate(self.model, prompt[:, None], n, **sampling):
                text += piece(int(token))
                if ends := [text.index(stop) for stop in until if stop and stop in text]:
                    text = text[: min(ends)]
                    break
            texts.append(text)
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
