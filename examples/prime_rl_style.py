"""A loop in the style of prime-rl: experts, each block checkpointed and compiled by itself, a context around every microbatch.

The one line that has changed is the import of ``maybe_activation_offloading``. With each block checkpointed, what is left to move is the
input of each block; the weights, which a compiled block saves as well, stay.

Run it with ``python examples/prime_rl_style.py``; it takes less than a minute on a CPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from backhaul.compat.prime_rl import maybe_activation_offloading

HIDDEN, NUM_EXPERTS, NUM_LAYERS, NUM_TOKENS, VOCABULARY = 128, 8, 6, 1024, 512


@dataclass(frozen=True)
class Offloading:
    """What prime-rl has under ``model.ac_offloading``."""

    pin_memory: bool = True
    max_inflight_activations: int = 1


class Experts(nn.Module):
    """A mixture in which each expert takes the tokens that want it most, so that shapes are the same in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, 2 * HIDDEN) * HIDDEN**-0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * HIDDEN, HIDDEN) * HIDDEN**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` (tokens, hidden) to the same shape."""
        weights, tokens = self.router(x).softmax(-1).t().topk(2 * x.shape[0] // NUM_EXPERTS)
        y = torch.bmm(F.silu(torch.bmm(x[tokens], self.up)), self.down) * weights.unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, tokens.flatten(), y.flatten(0, 1))


class Block(nn.Module):
    """A residual block of experts. As in prime-rl, the checkpoint is inside what is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.experts = Experts()

    def compute(self, x: Tensor) -> Tensor:
        """Map ``x`` (tokens, hidden) to the same shape."""
        return x + self.experts(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        """Do that, and keep nothing but ``x`` for backward."""
        return checkpoint(self.compute, x, use_reentrant=False)


class Model(nn.Module):
    """An embedding, blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(NUM_LAYERS)])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (tokens, vocabulary)."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    for layer in model.layers:
        layer.compile(backend="inductor" if device == "cuda" else "aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(0, VOCABULARY, (2, NUM_TOKENS + 1), device=device)
    config = Offloading()

    for step in range(4):
        losses = []
        for tokens in batch:  # microbatches
            with maybe_activation_offloading(config, model) as offloading:
                loss = F.cross_entropy(model(tokens[:-1]), tokens[1:]) / len(batch)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {torch.stack(losses).sum().item():.4f}")

    print(offloading.handle.report())


if __name__ == "__main__":
    main()
