"""Your own format: ternary weights, defined here and used through QATConfig like any other.

    python examples/own_format.py

A format is a frozen dataclass: `measure` finds scales, `quantize` rounds under them, a GEMM multiplies `operand`;
warnings and reports count by `saturated` and `floored`. `register_format` asks for these, `name` and `bits`.

    s = mean |x| of a group;   code = clamp(rn(x / s), -1, 1);   value = code * s      (BitNet b1.58, per group)
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aoquant import QATConfig, quantize_
from aoquant.formats import Encoded, Format, Scales, layout, register_format


@dataclass(frozen=True)
class Ternary(Format):
    """Codes -1, 0 and 1 in 2 bits, a float32 scale (R, G) for each group of K."""

    group: int = 64

    @property
    def name(self) -> str:
        return f"ternary-g{self.group}"  # equal names mean equal numerics

    @property
    def bits(self) -> int:
        return 2

    @property
    def block(self) -> int:
        return self.group

    def measure(self, x_RK: Tensor) -> Scales:
        return Scales(self._blocks(x_RK).float().abs().mean(-1).clamp(min=1e-12))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        q_RGB = (self._blocks(x_RK).float() / s.scale.unsqueeze(-1)).round().clamp(-1, 1)
        codes = (q_RGB.nan_to_num(0.0) + 1).to(torch.uint8).flatten(1)
        return Encoded(layout.pack(codes, self.bits), s.scale, None, None, x_RK.shape[1])

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        q_RK = layout.unpack(e.codes, self.bits, e.k).float() - 1
        return (self._blocks(q_RK) * e.scale.unsqueeze(-1)).flatten(1).to(dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        return (self._blocks(x_RK).abs() > 1.5 * e.scale.unsqueeze(-1)).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        return e.scale <= 1e-12


def main() -> None:
    ternary = register_format(Ternary(64))  # layers and checkpoints know formats by their names
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).bfloat16()
    quantize_(model, QATConfig(weight_config=ternary, activation_config="int8-row", step="prepare"))

    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(60):
        x = torch.randn(64, 64, dtype=torch.bfloat16)
        loss = (model(x) - x.roll(1, -1)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    y = model(x)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x), y)
    print(f"{ternary.bits_per_weight(128, 64)} bits a weight: {model[0].weight}")


if __name__ == "__main__":
    main()
