#!/bin/sh
# lm-eval 0.4.13, transformers 5.24.0: if the tokenizer adds a start token, a document's log-likelihood includes it.
#
# loglikelihood_rolling puts prefix_token_id before the ids of the document, to predict the first of them. If the
# tokenizer adds a start token, as Llama's does, that is the document's first id: the model reads two start tokens
# and is charged for the second one, which no training text has. Bits per byte and perplexities rise, most for short
# documents, and models with and without a start token aren't comparable. add_bos_token=False gives the document alone.
# Guess: a start token is context, and is never a target.
# Output seen: "abcdefgh" after <s>: model -18.3106; HFLM -20.6230, as of "<s>abcdefgh"; add_bos_token=False -18.3106
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 "lm_eval[hf]==0.4.13" transformers==5.24.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON' 2> log || { cat log; exit 1; }
import math

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "abcdefgh"
torch.manual_seed(0)
vocabulary = {token: i for i, token in enumerate(["<s>", "</s>", *TEXT])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>"
)
sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **sizes)).eval()


def by_lm_eval(**options):
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu", **options)
    request = Instance("loglikelihood_rolling", {}, (TEXT,), 0)
    return lm.loglikelihood_rolling([request], disable_tqdm=True)[0]


@torch.no_grad()
def after_start(ids):
    """The log-likelihood of the ids, each predicted from <s> and those before it."""
    scores = model(torch.tensor([[0, *ids[:-1]]])).logits.log_softmax(-1)[0]
    return scores.gather(-1, torch.tensor(ids)[:, None]).sum().item()


document = [vocabulary[character] for character in TEXT]
expected, with_start = after_start(document), after_start([0, *document])
by_default, alone = by_lm_eval(), by_lm_eval(add_bos_token=False)
print(
    f'"{TEXT}" after <s>: model {expected:.4f}; HFLM {by_default:.4f}, as of "<s>{TEXT}"; '
    f"add_bos_token=False {alone:.4f}"
)
assert math.isclose(by_default, with_start, rel_tol=1e-5)
assert not math.isclose(by_default, expected, rel_tol=0.01)
assert math.isclose(alone, expected, rel_tol=1e-5)
PYTHON
