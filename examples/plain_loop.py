"""An ordinary training loop with its activations offloaded: one line is new.

Run it with ``python examples/plain_loop.py``; it takes a few seconds on a CPU, where activations go to disk.
"""

import torch
from torch import nn
from torch.nn import functional as F

import backhaul as bh


class Block(nn.Module):
    """A residual feed-forward block, the kind of code that nobody wants to edit for memory's sake."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x`` (batch, hidden) to the same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(*[Block(256) for _ in range(6)]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, targets = torch.randn(2, 4096, 256, device=device)

    handle = bh.offload(model)  # the new line

    for step in range(5):
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")

    print(handle.report())
    handle.remove()


if __name__ == "__main__":
    main()
