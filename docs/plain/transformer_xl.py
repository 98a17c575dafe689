# /// script
# requires-python = ">=3.10"
# dependencies = ["torch>=2.10", "numpy"]
# ///
"""Transformer-XL in plain PyTorch (Dai et al. 2019, arXiv 1901.02860), to read in one sitting.

python transformer_xl.py              trains on Tiny Shakespeare for about a minute and prints a sample
python transformer_xl.py novel.txt    trains on this text instead
uv run transformer_xl.py              does so in an environment with PyTorch, which uv makes

S tokens in a segment, M in the memory, K = M + S keys; B streams, H heads, D = d_model, E = D / H.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


class Attention(nn.Module):
    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.query = nn.Linear(d_model, d_model, bias=False)
        self.key = nn.Linear(d_model, d_model, bias=False)
        self.position = nn.Linear(d_model, d_model, bias=False)  # W_R
        self.value = nn.Linear(d_model, d_model)
        self.output = nn.Linear(d_model, d_model)
        self.u = nn.Parameter(torch.zeros(n_heads, d_model // n_heads))
        self.v = nn.Parameter(torch.zeros(n_heads, d_model // n_heads))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """The segment ``x [S, B, D]`` attends to the memory and itself, ``context [K, B, D]``."""
        S, K, D = len(x), len(context), x.shape[-1]
        q = self.heads(self.query(x))  # [S, B, H, E]
        k = self.heads(self.key(context))  # [K, B, H, E]
        v = self.heads(self.value(context))
        r = self.heads(self.position(sinusoids(K, D).to(x)))  # [K, H, E], by distance

        # score(i, j) = [(q_i + u)·k_j + (q_i + v)·r_d] / √E, where d is the distance from key j to query i
        distance = torch.arange(K - S, K)[:, None] - torch.arange(K)  # [S, K]
        content = torch.einsum("ibhe,jbhe->bhij", q + self.u, k)
        by_distance = torch.einsum("ibhe,dhe->bhid", q + self.v, r)
        position = by_distance.gather(-1, distance.clamp(min=0).expand_as(content))
        scores = (content + position) / math.sqrt(D // self.n_heads)  # [B, H, S, K]

        # A query sees itself and what is before it
        attention = scores.masked_fill(distance < 0, -math.inf).softmax(dim=-1)
        y = torch.einsum("bhij,jbhe->ibhe", attention, v)
        return self.output(y.flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_heads, -1))  # [·, D] to [·, H, E]


def sinusoids(distances: int, features: int) -> Tensor:
    f = torch.arange(0, features, 2, dtype=torch.float64)
    rates = 10_000 ** -(f / features)
    angles = torch.arange(distances)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class Layer(nn.Module):
    def __init__(self, d_model: int, n_heads: int):
        super().__init__()
        self.attention = Attention(d_model, n_heads)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.feed_forward = nn.Sequential(
            nn.Linear(d_model, 4 * d_model), nn.ReLU(), nn.Linear(4 * d_model, d_model)
        )

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        z = self.norm1(context)  # [K, B, D]; its last S are the segment
        x = x + self.attention(z[-len(x) :], z)
        return x + self.feed_forward(self.norm2(x))


class TransformerXL(nn.Module):
    def __init__(
        self, vocab_size: int, d_model: int = 128, n_heads: int = 4, n_layers: int = 4, mem_len: int = 64
    ):
        super().__init__()
        self.mem_len = mem_len
        self.embed = nn.Embedding(vocab_size, d_model)
        self.head = nn.Linear(d_model, vocab_size)
        self.layers = nn.ModuleList(Layer(d_model, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, tokens: Tensor, memory: list[Tensor] | None = None):
        """The logits ``[S, B, V]`` of a segment ``tokens [S, B]``, and the memory for the next segment: the
        newest M inputs of each layer, without their gradients."""
        x = self.embed(tokens)  # [S, B, D]
        memory = memory or [x[:0]] * len(self.layers)  # empty at first
        new_memory = []
        for layer, past in zip(self.layers, memory, strict=True):
            context = torch.cat((past, x))  # [K, B, D]
            new_memory.append(context[-self.mem_len :].detach())
            x = layer(x, context)
        return self.head(self.norm(x)), new_memory


def train(model: nn.Module, text: Tensor, steps: int, streams: int = 16, segment_len: int = 64) -> None:
    text = text[: len(text) // streams * streams].view(streams, -1).T  # [·, B]: each column is a stream
    segments = list(zip(text[:-1].split(segment_len), text[1:].split(segment_len), strict=True))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=steps)
    for step in range(steps):
        x, y = segments[step % len(segments)]
        if step % len(segments) == 0:
            memory = None  # the text starts again
        logits, memory, *auxiliary = model(x, memory)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        (loss + sum(auxiliary)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.2f} nats per character", flush=True)


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, n: int) -> Tensor:
    tokens = new = prompt
    memory = None
    for _ in range(n):  # each step reads the new tokens alone: the memory holds those before them
        logits, memory, *_ = model(new[:, None], memory)
        new = torch.multinomial((logits[-1, 0] / 0.7).softmax(dim=-1), 1)
        tokens = torch.cat((tokens, new))
    return tokens


def read_text(path: str) -> str:
    """The text in ``path``; Tiny Shakespeare, from the network, if no path is given."""
    try:
        if path:
            return Path(path).read_text(encoding="utf-8")
        cached = Path("input.txt")
        if not cached.exists():
            torch.hub.download_url_to_file(URL, str(cached))
        return cached.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        sys.exit(f"{path or URL} can't be read: {error}. Name a text file in UTF-8 as the first argument.")


def main(build: type[nn.Module], path: str = "", steps: str = "400", length: str = "300") -> None:
    text = read_text(path)
    if len(text) < 32:
        sys.exit(f"expected a text of at least 32 characters, two for each stream, got {len(text)}.")
    characters = sorted(set(text))
    number = {character: i for i, character in enumerate(characters)}
    model = build(len(characters))
    train(model, torch.tensor([number[character] for character in text]), int(steps))
    # The first line of the text, of whose characters the model knows all; of a long one the beginning.
    first_line = text.splitlines(keepends=True)[0][:40]
    prompt = torch.tensor([number[character] for character in first_line])
    tokens = generate(model, prompt, int(length))
    print("".join(characters[i] for i in tokens))


if __name__ == "__main__":
    main(TransformerXL, *sys.argv[1:])
