"""The model that the demo trains: a small mixture-of-experts transformer over bytes.

Covers: the model, written as such models are written, without a line about offloading.
Does not cover: training, measuring or comparing (demo.py).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # a token is a byte
NUM_EXPERTS = 4
NUM_CHOSEN = 2  # experts per token
HEAD_SIZE = 64


class Attention(nn.Module):
    """Causal self-attention with heads of ``HEAD_SIZE``."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix ``x`` (batch, seq, hidden) along the sequence."""
        q, k, v = (part.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class SwiGLU(nn.Module):
    """One expert: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, 2 * hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * hidden, bias=False)
        self.down = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (tokens, hidden) to the same shape."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class MixtureOfExperts(nn.Module):
    """Send each token through its ``NUM_CHOSEN`` best experts and add up what they say, weighted by the router."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(SwiGLU(hidden) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (tokens, hidden) to the same shape."""
        weights, chosen = self.router(x).softmax(dim=-1).topk(NUM_CHOSEN, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, rank = (chosen == number).nonzero(as_tuple=True)
            said = expert(x.index_select(0, token)) * weights[token, rank].unsqueeze(-1)
            out = out.index_add(0, token, said)
        return out


class Block(nn.Module):
    """Attention and experts, each behind a norm and beside a residual path."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden)
        self.attention = Attention(hidden)
        self.experts_norm = nn.RMSNorm(hidden)
        self.experts = MixtureOfExperts(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (batch, seq, hidden) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        said: Tensor = self.experts(self.experts_norm(x).flatten(0, 1))
        return x + said.view_as(x)


class ByteModel(nn.Module):
    """A language model over bytes that returns its loss.

    Args:
        layers: number of blocks.
        hidden: width, a multiple of ``HEAD_SIZE``.
        seq: the longest sequence, in bytes.
    """

    def __init__(self, *, layers: int, hidden: int, seq: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean cross-entropy of each byte of ``text`` (batch, seq + 1; int64) given those before it."""
        inputs, targets = text[:, :-1], text[:, 1:]
        x = self.embedding(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
