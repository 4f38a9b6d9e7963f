"""Quick start: train a small model as its NVFP4 version will compute, then pack it.

    python examples/quickstart.py

The model copies patterns: a made-up task that a CPU learns in seconds. What is printed shows the point of the library:
converting moves no output by a bit.
"""

import copy

import torch
from torch import nn

import aoquant
from aoquant import NVFP4WeightConfig, QATConfig, quantize_


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x (size, 64) of noisy signs, and the class of each: which of 8 fixed patterns it was made from."""
    patterns = torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).sign()
    label = torch.randint(8, (size,), generator=generator)
    return (patterns[label] + 2 * torch.randn(size, 64, generator=generator)).bfloat16(), label


def train(model: nn.Module, steps: int, lr: float, generator: torch.Generator) -> float:
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    for _ in range(steps):
        x, label = batch(128, generator)
        loss = nn.functional.cross_entropy(model(x).float(), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    x, label = batch(4096, torch.Generator().manual_seed(2))
    return (model(x).argmax(-1) == label).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).bfloat16()
    train(model, 100, 1e-2, generator)
    print(f"float      accuracy {accuracy(model):.3f}")

    base = NVFP4WeightConfig()
    ptq = copy.deepcopy(model)
    quantize_(ptq, base)
    print(f"PTQ        accuracy {accuracy(ptq):.3f}")

    quantize_(model, QATConfig(base, step="prepare"))
    train(model, 100, 1e-3, generator)
    print(f"prepared   accuracy {accuracy(model):.3f}")
    prepared = copy.deepcopy(model)

    quantize_(model, QATConfig(base, step="convert"))
    print(f"converted  accuracy {accuracy(model):.3f}")
    x, _ = batch(16, generator)
    assert torch.equal(model(x), prepared(x))
    print(aoquant.report(prepared, model, x, progress=False).to_markdown())


if __name__ == "__main__":
    main()
