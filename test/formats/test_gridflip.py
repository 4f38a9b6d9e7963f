"""GridFlip's decode, its three ways to be multiplied, and its life in a layer."""

from fractions import Fraction

import pytest
import torch
from support.golden_inputs import data_set
from support.rational import rounded
from torch import nn

from aoquant import GridFlipFP4WeightConfig, NVFP4WeightConfig, PackedTensor, QATConfig, quantize_
from aoquant.formats import Encoded, GridFlip, get_format, layout
from aoquant.formats.elements import from_e2m1

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E2M1 = [Fraction(v) for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)]


def every_byte(blocks: int = 1) -> Encoded:
    """(256, 16 * blocks): row b has the scale byte b in every block, and all codes."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, blocks)
    scale = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).unsqueeze(1).expand(-1, blocks).contiguous()
    return Encoded(layout.pack(codes, 4), scale, None, torch.tensor([[0.75]]), 16 * blocks)


def scale_of(byte: int) -> Fraction | None:
    """e4m3 from its bits; None for NaN."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if byte & 127 == 127:
        return None
    value = Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7) if exponent else Fraction(mantissa, 8 * 64)
    return -value if byte & 128 else value


def table(byte: int, c: Fraction) -> list[Fraction] | None:
    """What the 16 codes mean under a scale byte, before t."""
    s = scale_of(byte)
    return None if s is None else [s * q + c * min(s, Fraction(0)) for q in E2M1]


BYTES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}", marks=[] if i == 0 or i == j + 1 else [pytest.mark.slow])
    for i, name in enumerate(("gridflip", "gridflip-search", "gridflip-alternating", "gridflip-c0.5"))
    for j, dtype in enumerate((BF16, F16, F32))
]


@pytest.mark.parametrize(("name", "dtype"), BYTES)
def test_every_scale_byte_with_every_code(name: str, dtype: torch.dtype) -> None:
    """256 x 16, operands and values; 0x80 is 0, 0x7F and 0xFF are NaN. A bf16 operand is rounded where it has 9
    bits.
    """
    fmt, e = get_format(name), every_byte(2)
    assert isinstance(fmt, GridFlip)
    operand, values = fmt.operand(e, dtype).tolist(), fmt.decode(e, F32).tolist()
    inexact = set()
    for byte in range(256):
        for b, sign in enumerate((1, -1 if fmt.alternating else 1)):
            want = table(byte, Fraction(fmt.c) * sign)
            for code in range(16):
                got, value = operand[byte][16 * b + code], values[byte][16 * b + code]
                if want is None:
                    assert got != got
                    assert value != value
                    continue
                exact = want[code]
                assert Fraction(got) == rounded(exact, dtype)
                assert Fraction(value) == rounded(exact * Fraction(0.75), F32)
                if Fraction(got) != exact and b == 0:
                    inexact.add((code, 8 + (byte & 7)))
    assert all(v == 0 for v in values[128])
    expected = {(7, 11), (7, 13), (7, 15), (15, 13), (15, 15)}
    assert inexact == (expected if dtype == BF16 and fmt.c == 0.25 else set())


def test_a_shift_that_is_no_power_of_two_decodes_as_written() -> None:
    """One product, one product and one sum, each rounded to float32, and t."""
    c = torch.tensor(0.2, dtype=F32)
    e = every_byte()
    assert e.scale is not None
    assert e.outer is not None
    s = e.scale.float()
    want = e.outer * (s * from_e2m1(torch.arange(16, dtype=torch.uint8)) + c * s.clamp(max=0))
    torch.testing.assert_close(get_format("gridflip-c0.2").decode(e, F32), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "name", ["gridflip", "gridflip-search", "gridflip-c0.2", "gridflip-alternating", "gridflip-16x16", "gridflip-sided"]
)
def test_the_identity_of_two_gemms(name: str) -> None:
    fmt = get_format(name)
    assert isinstance(fmt, GridFlip)
    w, x = data_set("normal", 48, 256, BF16), data_set("heavy", 24, 256, F32).double()
    e = fmt.encode(w)
    plain, shift_NG = fmt.split(e)
    assert e.scale is not None
    assert plain.scale is not None
    assert (e.scale.view(torch.uint8) > 0x80).any()
    assert (plain.scale.view(torch.uint8) < 0x80).all()
    xbar_MG = x.unflatten(1, (-1, 16)).sum(-1)
    got = x @ fmt.plain.operand(plain, F32).double().t() + xbar_MG @ shift_NG.double().t()
    want = x @ fmt.operand(e, F32).double().t()
    assert (got - want).norm() / want.norm() < (1e-14 if fmt.c == 0.25 else 1e-6)
    # codes are turned in flagged blocks alone, and everything that the tensor core reads is NVFP4
    flagged = (e.scale.view(torch.uint8) > 0x80).repeat_interleave(fmt.tile_rows, 0)[:48].repeat_interleave(16, 1)
    turned = layout.unpack(plain.codes, 4, 256) ^ layout.unpack(e.codes, 4, 256)
    assert (turned == torch.where(flagged, 8, 0)).all()
    if fmt.c == 0.25:
        assert torch.equal(shift_NG.bfloat16().float(), shift_NG)
        assert torch.equal(fmt.plain.operand(plain, BF16).float(), fmt.plain.operand(plain, F32))


def layer(config: object, dtype: torch.dtype = BF16, n: int = 48, k: int = 128) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(k, n)).to(dtype)
    quantize_(model, QATConfig(config))  # type: ignore[arg-type]
    return model


CONFIGS = {
    "4/6": NVFP4WeightConfig(rule="four_over_six", activation="fouroversix"),
    "4/6 tiles": NVFP4WeightConfig(rule="four_over_six", metric="mae", tile=16),
    "base": GridFlipFP4WeightConfig(),
    "search": GridFlipFP4WeightConfig("search", activation="fouroversix"),
    "options": GridFlipFP4WeightConfig("sided", c=0.2, alternating=True, activation=None),
    "tiles": GridFlipFP4WeightConfig(tile=16),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@every_config
def test_one_weight_forward_and_backward(config: NVFP4WeightConfig | GridFlipFP4WeightConfig) -> None:
    """dx is dy times the very w^ of the forward pass; dW passes straight through."""
    model = layer(config, F32)
    w = model[0].weight
    w_hat = config.weight_format().fake_quantize(w.detach())
    x = data_set("normal", 24, 128, F32).clone().requires_grad_()
    y = model(x)
    grad = torch.randn(y.shape)
    y.backward(grad)
    x_format = get_format(config.activation) if config.activation else None
    x_hat = x_format.fake_quantize(x.detach()) if x_format else x.detach()
    torch.testing.assert_close(y.detach(), x_hat @ w_hat.t() + model[0].bias.detach(), rtol=1e-4, atol=1e-4)
    assert torch.equal(x.grad, grad @ w_hat)
    torch.testing.assert_close(w.grad, grad.t() @ x_hat, rtol=1e-5, atol=1e-5)
    quantize_(model, QATConfig(step="convert"))
    assert torch.equal(model(x), y)
    assert torch.equal(model[0].weight.dequantize(), w_hat)


def test_saturated_values_are_those_beyond_the_grid() -> None:
    """Half a step beyond the last code, on either side of a grid that is longer on one."""
    fmt = get_format("gridflip")
    scale = torch.tensor([[1.0, -1.0]]).to(torch.float8_e4m3fn)
    e = Encoded(torch.zeros(1, 16, dtype=torch.uint8), scale, None, torch.ones(1, 1), 32)
    x = torch.zeros(1, 32)
    x[0, [0, 1, 2, 3]] = torch.tensor([6.9, 7.1, -6.9, -7.1])
    x[0, [16, 17, 18, 19]] = torch.tensor([6.7, 6.8, -7.2, -7.3])
    assert fmt.saturated(x, e).nonzero()[:, 1].tolist() == [1, 3, 17, 19]


def test_packed_weights_are_cut_where_codes_and_scales_are() -> None:
    for config, rows, columns in (
        (CONFIGS["base"], 1, 16),
        (CONFIGS["options"], 1, 32),
        (CONFIGS["tiles"], 16, 16),
        (CONFIGS["4/6 tiles"], 16, 16),
    ):
        model = layer(config)
        quantize_(model, QATConfig(step="convert"))
        w = model[0].weight.data
        assert isinstance(w, PackedTensor)
        assert w.per_tensor_scale is not None
        assert w.per_tensor_scale.shape == (48, 1)
        whole = w.dequantize()
        assert torch.equal(w[16:32].dequantize(), whole[16:32])
        assert torch.equal(w[:, 32:96].dequantize(), whole[:, 32:96])
        assert torch.equal(w[32:, 96:].dequantize(), whole[32:, 96:])
        with pytest.raises(ValueError, match=f"weights are cut along K at multiples of {columns}"):
            w[:, columns // 2 :]
        if rows > 1:
            with pytest.raises(ValueError, match=f"weights are cut along N at multiples of {rows}"):
                w[rows // 2 :]


def test_configs_say_what_goes_together() -> None:
    for says, make in (
        ("got 'six'", lambda: NVFP4WeightConfig(rule="six")),
        ("got outer='none'", lambda: NVFP4WeightConfig("none", rule="four_over_six")),
        ("got metric='mae'", lambda: NVFP4WeightConfig(metric="mae")),
        ("metric is one of", lambda: NVFP4WeightConfig(rule="four_over_six", metric="max")),
        ("got activation='hadamard16", lambda: GridFlipFP4WeightConfig(activation="hadamard16+gridflip")),
        ("got activation='gridflip'", lambda: GridFlipFP4WeightConfig(activation="gridflip")),
        ("c takes a number, got True", lambda: GridFlipFP4WeightConfig(c=True)),
        ("c takes a number, got 'a'", lambda: GridFlipFP4WeightConfig(c="a")),
        ("c=1e-05", lambda: GridFlipFP4WeightConfig(c=1e-5)),
        ("effort is one of", lambda: GridFlipFP4WeightConfig("more")),
        ("gridflip needs K", lambda: quantize_(nn.Sequential(nn.Linear(40, 16)), GridFlipFP4WeightConfig())),
    ):
        with pytest.raises(ValueError, match=says):
            make()
    one = GridFlipFP4WeightConfig(c=1).weight_format()
    assert get_format(one.name) == GridFlipFP4WeightConfig(c=1.0).weight_format()
