"""A format of a user's own, with 6-bit codes and e8m0 scales, goes the whole way; one that is unfinished or unknown is
refused before a layer changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aoquant
from aoquant import PackedWeightConfig, QATConfig, formats, quantize_
from aoquant.formats import Encoded, Format, Scales, get_operand, layout, register_format

MAGNITUDES = torch.tensor(
    [*(m / 16 for m in range(4)), *((1 + m / 4) * 2.0**e for e in range(-2, 5) for m in range(4))]
)


@dataclass(frozen=True)
class E3M2(Format):
    """Sign, 3 bits of exponent, 2 of mantissa; blocks of 32 share a power of two, the smallest that clips nothing."""

    called: str = "own-e3m2"

    @property
    def name(self) -> str:
        return self.called

    @property
    def bits(self) -> int:
        return 6

    @property
    def block(self) -> int:
        return 32

    @property
    def element(self) -> str:
        return "e3m2"

    def measure(self, x_RK: Tensor) -> Scales:
        exponent = (self._blocks(x_RK).float().abs().amax(-1) / MAGNITUDES[-1]).log2().ceil().clamp(-127, 127)
        return Scales(torch.exp2(exponent).to(torch.float8_e8m0fnu))

    def quantize(self, x_RK: Tensor, s: Scales) -> Encoded:
        assert s.scale is not None
        v_RGB = self._blocks(x_RK).float() / s.scale.float().unsqueeze(-1)
        index = (v_RGB.abs().unsqueeze(-1) - MAGNITUDES.to(v_RGB.device)).abs().argmin(-1)
        codes = (index + 32 * (v_RGB < 0)).to(torch.uint8).flatten(1)
        return Encoded(layout.pack(codes, 6), s.scale, None, None, x_RK.shape[1])

    def operand(self, e: Encoded, dtype: torch.dtype) -> Tensor:
        assert e.scale is not None
        q_RK = layout.unpack(e.codes, 6, e.k).long()
        values = MAGNITUDES.to(q_RK.device)[q_RK % 32] * (1 - 2 * (q_RK // 32)).float()
        return (self._blocks(values) * e.scale.float().unsqueeze(-1)).flatten(1).to(dtype)

    def saturated(self, x_RK: Tensor, e: Encoded) -> Tensor:
        assert e.scale is not None
        return (self._blocks(x_RK).abs() > MAGNITUDES[-1] * e.scale.float().unsqueeze(-1)).flatten(1)

    def floored(self, e: Encoded) -> Tensor:
        assert e.scale is not None
        return e.scale.float() <= 2.0**-127


@dataclass(frozen=True)
class ReadsValues(E3M2):
    """Looks at values, which tensors on the meta device have not."""

    def measure(self, x_RK: Tensor) -> Scales:
        return super().measure(x_RK.nan_to_num() if x_RK.isnan().any() else x_RK)


@dataclass(frozen=True)
class Fitted(E3M2):
    """Takes a gradient while it measures, as a format does that fits its scales to the weight."""

    def measure(self, x_RK: Tensor) -> Scales:
        with torch.enable_grad():
            gain = torch.ones((), device=x_RK.device, requires_grad=True)
            (x_RK.float() * gain).square().sum().backward()
        return super().measure(x_RK)


class Unfinished(E3M2):
    """A first draft, which inherits two methods of `Format` that raise."""

    floored = Format.floored
    saturated = Format.saturated


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> E3M2:
    monkeypatch.setattr(formats, "_REGISTERED", {})
    for cached in (get_operand, formats._plain):
        cached.cache_clear()
    return E3M2()


def test_a_format_with_e8m0_scales_goes_the_whole_way(own: E3M2) -> None:
    register_format(own)
    prepared = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)).bfloat16()
    quantize_(prepared, QATConfig(weight_config=own, activation_config=own, step="prepare"))
    x = torch.randn(5, 64, dtype=torch.bfloat16)
    prepared(x).square().mean().backward()
    with torch.no_grad():
        for p in prepared.parameters():
            p -= 0.1 * p.grad
    converted = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)).bfloat16()
    converted.load_state_dict(prepared.state_dict())
    quantize_(converted, QATConfig(weight_config=own, activation_config=own, step="prepare"))
    quantize_(converted, QATConfig(step="convert"))  # warns of scales on their floor, so it counts them
    found = aoquant.verify(prepared, converted, x)
    assert all(None not in (row.saturated_share, row.floored_share) for row in found.layers)
    again = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)).bfloat16()
    quantize_(again, QATConfig(weight_config=own, activation_config=own, step="prepare"))
    quantize_(again, QATConfig(step="convert"))
    again.load_state_dict(converted.state_dict())
    assert torch.equal(again(x), prepared(x))


def test_a_format_that_takes_a_gradient_leaves_none_on_the_weight_that_it_converts(own: E3M2) -> None:
    register_format(Fitted("own-fitted"))
    model = nn.Sequential(nn.Linear(64, 32))
    weight = model[0].weight
    quantize_(model, PackedWeightConfig("own-fitted"))
    assert torch.equal(model[0].weight.qdata, own.encode(weight.detach()).codes) and weight.grad is None


def test_values_inside_codes_of_any_width_keep_them(own: E3M2) -> None:
    """With zeros of both signs, whose codes differ: what `unpack_` trains on from."""
    x = torch.randn(40, 64)
    x[:, ::3] *= 2.0**-12
    e = own.encode(x)
    zeros = layout.unpack(e.codes, 6, 64) % 32 == 0
    assert zeros.any() and (own.decode(e, torch.float32)[zeros].signbit()).any()
    again = own.hold(own.inside(e), own.held(e))
    assert torch.equal(again.codes, e.codes) and torch.equal(again.scale.float(), e.scale.float())


def test_a_format_that_reads_values_is_not_registered(own: E3M2) -> None:
    with pytest.raises(ValueError, match=r"reads-values.*meta"):
        register_format(ReadsValues("reads-values"))


def test_a_format_without_a_method_is_not_registered(own: E3M2) -> None:
    with pytest.raises(ValueError, match="Unfinished cannot be registered without saturated, floored: define them"):
        register_format(Unfinished())


@pytest.mark.parametrize(
    ("method", "made"),
    [
        ("measure", lambda made: made.scale),
        ("quantize", lambda made: tuple(made)),
        ("quantize", lambda made: made._replace(codes=made.codes.long())),
        ("quantize", lambda made: made._replace(codes=made.codes[1:])),
        ("quantize", lambda made: made._replace(scale=made.scale.double())),
        ("quantize", lambda made: made._replace(scale=made.scale.float().int())),
        ("quantize", lambda made: made._replace(scale=made.scale.unsqueeze(-1))),
        ("operand", lambda made: made.t()),
        ("operand", lambda made: made.double()),
        ("saturated", lambda made: made.any()),
        ("floored", lambda made: made.missing),
        ("operand", lambda made: made @ made),
    ],
)
def test_a_format_whose_method_gives_something_else_is_not_registered(own: E3M2, method: str, made: Any) -> None:
    def odd(self: Any, *given: Any) -> Any:
        return made(getattr(E3M2, method)(self, *given))

    wrong = type("Wrong", (E3M2,), {method: odd})
    with pytest.raises(ValueError, match=rf"own-wrong cannot be registered: its {method}"):
        register_format(wrong("own-wrong"))
    assert "own-wrong" not in formats._REGISTERED


@pytest.mark.parametrize("given", [E3M2, "int4-g32", None], ids=str)
def test_what_is_no_format_is_not_registered(given: Any) -> None:
    with pytest.raises(TypeError, match="Format"):
        register_format(given)


def test_a_format_that_is_not_registered_is_refused_before_a_layer_changes(own: E3M2) -> None:
    layer = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    with pytest.raises(ValueError, match=r"'own-e3m2' is not registered.*register_format"):
        quantize_(layer, QATConfig(weight_config=own, activation_config="int8-row", step="prepare"))
    assert type(layer[0]) is nn.Linear
    register_format(own)
    other = E3M2("nvfp4")  # a name that means other numerics
    with pytest.raises(ValueError, match="'nvfp4' is not registered"):
        quantize_(layer, QATConfig(weight_config=other, activation_config="int8-row", step="prepare"))
