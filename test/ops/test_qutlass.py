"""The qutlass adapter over a double of the package: it checks each argument and computes what the arguments stand for.

The double shares nothing with aoquant: layouts are index formulas, values a table, sums float64. What is tested is the
contract (shapes, padding, swizzle, dtypes, who is asked for what); the kernels themselves were not run on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.gemm import scaled_mm, with_values
from torch import Tensor

from aoquant import backend, explain, get_format
from aoquant.formats import Encoded, Format, layout
from aoquant.ops import CodecRequest, Request, codec
from aoquant.ops.gemm import qutlass as adapter

BF16 = torch.bfloat16
CPU = torch.device("cpu")
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def tile_index(rows: int, groups: int) -> Tensor:
    """Where scale (r, c) lies in the swizzled buffer."""
    columns = -(-groups // 4)
    r, c = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
    return (r // 128 * columns + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def values(codes: Tensor, scale: Tensor, block: int) -> Tensor:
    """(rows, K) float64 of packed codes and swizzled scales."""
    rows, k = codes.shape[0], 2 * codes.shape[1]
    code = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    index = tile_index(rows, k // block)
    flat = scale.flatten()
    assert flat.numel() == -(-rows // 128) * 128 * -(-(k // block) // 4) * 4
    padding = torch.ones(flat.numel(), dtype=torch.bool)
    padding[index.flatten()] = False
    assert (flat.view(torch.uint8)[padding] == 0).all(), "scale padding is not zero"
    return VALUES[code] * flat[index].double().repeat_interleave(block, 1)


class Package:
    """The functions of qutlass. swizzles: as newer builds do it. without: symbols that this build lacks."""

    def __init__(self, swizzles: bool = True, without: tuple[str, ...] = ()) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        newer = self._mx_newer if swizzles else self._mx_older
        for name, function in (
            ("matmul_mxf4_bf16_tn", self._mxf4),
            ("matmul_nvf4_bf16_tn", self._nvf4),
            ("fusedQuantizeMx", newer),
            ("fusedQuantizeNv", self._nv),
        ):
            if name not in without:
                setattr(self, name, function)

    def _multiply(self, name: str, block: int, *args: Tensor) -> Tensor:
        a, b, a_sf, b_sf, alpha = args
        self.calls.append((name, args))
        assert a.dtype == b.dtype == torch.uint8 and a.is_contiguous() and b.is_contiguous()
        assert a.shape[1] == b.shape[1] and 2 * a.shape[1] % 128 == 0
        assert alpha.dtype == torch.float32 and alpha.shape == (1,)
        acc = values(a, a_sf, block) @ values(b, b_sf, block).t()
        return (acc.float() * alpha).to(BF16)

    def _mxf4(self, a: Tensor, b: Tensor, a_sf: Tensor, b_sf: Tensor, alpha: Tensor) -> Tensor:
        assert a_sf.dtype == b_sf.dtype == torch.float8_e8m0fnu and a_sf.dim() == b_sf.dim() == 1
        return self._multiply("mx", 32, a, b, a_sf, b_sf, alpha)

    def _nvf4(self, a: Tensor, b: Tensor, a_sf: Tensor, b_sf: Tensor, alpha: Tensor) -> Tensor:
        assert a_sf.dtype == b_sf.dtype == torch.float8_e4m3fn
        assert a_sf.shape[1] == b_sf.shape[1] == 2 * a.shape[1] // 16
        return self._multiply("nv", 16, a, b, a_sf, b_sf, alpha)

    def _coded(self, x: Tensor, b: Tensor, scale: Tensor, factor: Tensor, block: int) -> Tensor:
        """Packed codes of x b / scale * factor, half to even."""
        y = (x.double().unflatten(1, (-1, b.shape[0])) @ b.double()).flatten(1)
        y = y / scale.double().repeat_interleave(block, 1) * factor
        y = torch.where(y.isnan(), 0.0, y)
        magnitude = VALUES[:8]
        distance = (y.abs().unsqueeze(-1) - magnitude).abs() + (torch.arange(8) % 2) * 1e-12
        code = distance.argmin(-1) + 8 * y.signbit()
        return (code[:, ::2] | code[:, 1::2] << 4).to(torch.uint8)

    def _mx(self, x: Tensor, b: Tensor, method: str) -> tuple[Tensor, Tensor]:
        self.calls.append((f"quantise {method}", (x, b)))
        assert x.dtype == b.dtype == BF16 and b.shape[0] == b.shape[1] >= 32
        y = (x.double().unflatten(1, (-1, b.shape[0])) @ b.double()).flatten(1).unflatten(1, (-1, 32))
        v = y.abs().amax(-1) if method == "abs_max" else y.std(-1, correction=0) * (2.92247856 / 6)
        scale = (v + 1e-8).log2().floor().exp2().to(torch.float8_e8m0fnu)
        factor = torch.tensor(3.0 if method == "abs_max" else 1.0)
        return self._coded(x, b, scale, factor, 32), scale

    def _mx_newer(self, a: Tensor, b: Tensor, *, method: str = "quest", is_sf_swizzled_layout: bool = True) -> Any:
        codes, scale = self._mx(a, b, method)
        flat = torch.full((tile_index(*scale.shape).max() + 512 & -512,), 0x7F, dtype=torch.uint8)
        flat[tile_index(*scale.shape).flatten()] = scale.view(torch.uint8).flatten()
        return codes, flat.view(scale.dtype)

    def _mx_older(self, a: Tensor, b: Tensor, *, method: str = "quest") -> Any:
        codes, scale = self._mx(a, b, method)
        return codes, uninitialised(scale)

    def _nv(self, a: Tensor, b: Tensor, global_scale: Tensor, *, method: str = "abs_max") -> Any:
        self.calls.append(("quantise nv", (a, b, global_scale)))
        assert a.dtype == b.dtype == BF16 and global_scale.dtype == torch.float32 and global_scale.shape == (1,)
        y = (a.double().unflatten(1, (-1, b.shape[0])) @ b.double()).flatten(1).unflatten(1, (-1, 16))
        scale = (global_scale * (y.abs().amax(-1).float() * (1 / 6))).clamp(max=448).to(torch.float8_e4m3fn)
        return self._coded(a, b, scale, global_scale.double(), 16), uninitialised(scale)


def uninitialised(scale: Tensor) -> Tensor:
    """Row-major in a buffer padded to (128, 4), whose padding is noise, and whose shape says nothing about rows."""
    rows, groups = scale.shape
    padded = torch.full((-(-rows // 128) * 128, -(-groups // 4) * 4), 0x7F, dtype=torch.uint8)
    padded[:rows, :groups] = scale.view(torch.uint8)
    return padded.view(scale.dtype)


def install(monkeypatch: pytest.MonkeyPatch, package: Any, capability: tuple[int, int] = (10, 0)) -> None:
    monkeypatch.setattr(adapter, "_package", lambda: package)
    monkeypatch.setattr(adapter, "_capability", lambda device: capability)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    double = Package()
    install(monkeypatch, double)
    yield double
    assert double.calls


def gemm(x_name: str, w_name: str, x: Tensor, w: Encoded, bias: Tensor | None) -> Tensor:
    x_q = codec.encode(get_format(x_name), x)
    return scaled_mm(x_q, w, bias, x_name, w_name, "aoquant", [x.shape[0]], x.dtype)


PAIRS = (
    ("mxfp4", "mxfp4-even"),
    ("xx-mxfp4", "xx-mxfp4"),
    ("mxfp4-quest", "qutlass-mxfp4"),
    ("nvfp4", "nvfp4"),
    ("nvfp4-none", "nvfp4-search"),
    ("xx-nvfp4-static:0.1", "xx-nvfp4"),
    ("te-nvfp4", "te-nvfp4"),
    ("fouroversix", "fouroversix"),
)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 40, 32), (5, 130, 96), (129, 16, 2080), (3, 8, 256)])
@pytest.mark.parametrize(("x_name", "w_name"), PAIRS)
def test_the_gemm_is_the_references(package: Package, x_name: str, w_name: str, m: int, n: int, k: int) -> None:
    """K padded to 128 with zero codes and zero scales, any M; alpha and no bias: one rounding, as the contract has
    it.
    """
    x, w = torch.randn(m, k).to(BF16), codec.encode(get_format(w_name), torch.randn(n, k).to(BF16) * 0.02)
    with backend("reference"):
        want = gemm(x_name, w_name, x, w, None)
    with backend("qutlass", role="gemm"):
        got = gemm(x_name, w_name, x, w, None)
    assert [name for name, _ in package.calls] == ["mx" if "mx" in x_name else "nv"]
    # float64 sums against float32 ones, and alpha_x * alpha_w in one number
    assert (got != want).double().mean() < 0.02
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=1e-6)


def test_the_bias_is_added(package: Package) -> None:
    x, w = torch.randn(4, 128).to(BF16), codec.encode(get_format("nvfp4"), torch.randn(16, 128))
    bias = torch.randn(16).to(BF16)
    with backend("qutlass", role="gemm"):
        plain, biased = gemm("nvfp4", "nvfp4", x, w, None), gemm("nvfp4", "nvfp4", x, w, bias)
    assert torch.equal(biased, plain + bias) and not torch.equal(biased, plain)


def test_rows_with_outer_scales_of_their_own(package: Package) -> None:
    """q, k and v packed one by one and loaded into one weight."""
    x, fmt = torch.randn(4, 128).to(BF16), get_format("nvfp4")
    parts = [codec.encode(fmt, torch.randn(16, 128) * s) for s in (0.02, 1.0, 300.0)]
    codes, scale = (torch.cat([getattr(p, field) for p in parts]) for field in ("codes", "scale"))
    outer = torch.cat([p.outer.expand(16, 1) for p in parts])  # type: ignore[union-attr]
    fused = Encoded(codes, scale, None, outer, 128)
    with backend("qutlass", role="gemm"):
        got = gemm("nvfp4", "nvfp4", x, fused, None)
        first = gemm("nvfp4", "nvfp4", x, parts[0], None)
        rest = torch.cat([gemm("nvfp4", "nvfp4", x, p, None) for p in parts[1:]], 1)
    assert torch.equal(got[:, :16], first)
    torch.testing.assert_close(got[:, 16:], rest, rtol=2.0**-7, atol=0)  # rounded twice


@pytest.mark.parametrize("swizzles", [True, False], ids=["newer", "older"])
@pytest.mark.parametrize(
    "name", ["qutlass-mxfp4", "mxfp4-quest", "hadamard32+mxfp4-quest", "hadamard64-s5+mxfp4-quest"]
)
def test_mx_codes_are_the_formats(monkeypatch: pytest.MonkeyPatch, name: str, swizzles: bool) -> None:
    """Layout, method, matrix: B is T^T, random signs before the mixing. Codes differ where the double's float64 rounds
    elsewhere.
    """
    double = Package(swizzles)
    install(monkeypatch, double)
    fmt, x = get_format(name), torch.randn(70, 384).to(BF16)
    want = fmt.encode(x)
    with backend("qutlass", role="quantize"):
        got = codec.encode(fmt, x)
        values = with_values(fmt, x, BF16, operand=True, keep=False).values
    assert len(double.calls) == 2 and double.calls[0][0].endswith("abs_max" if "quest" not in name else "quest")
    agree_mostly(got, want)
    assert torch.equal(values, fmt.operand(got, BF16))


@pytest.mark.parametrize("name", ["qutlass-nvfp4", "qutlass-nvfp4-static:0.01", "hadamard16+qutlass-nvfp4"])
def test_nv_codes_are_the_formats_and_the_global_scale_is_the_reciprocal(package: Package, name: str) -> None:
    fmt, x = get_format(name), torch.randn(70, 384).to(BF16)
    want = fmt.encode(x)
    with backend("qutlass", role="quantize"):
        got = codec.encode(fmt, x)
    assert want.outer is not None and got.outer is not None
    torch.testing.assert_close(package.calls[0][1][2], 1 / want.outer.flatten())
    assert torch.equal(got.outer, want.outer)
    agree_mostly(got, want, 0.998)  # bf16 values on a tie, which float32 reciprocals break and float64 does not


def agree_mostly(got: Encoded, want: Encoded, share: float = 0.9997) -> None:
    assert got.scale is not None and want.scale is not None
    assert got.codes.shape == want.codes.shape and got.scale.shape == want.scale.shape and got.k == want.k
    assert got.scale.dtype == want.scale.dtype and got.scale.is_contiguous()
    same = got.scale.view(torch.uint8) == want.scale.view(torch.uint8)
    assert same.double().mean() > 0.995
    codes, wanted = (layout.unpack(e.codes, 4, e.k).unflatten(1, (same.shape[1], -1))[same] for e in (got, want))
    assert (codes == wanted).double().mean() > share


def test_scale_buffers_are_read_as_rows_of_padded_columns() -> None:
    """65 groups, as K = 2080 has: a buffer sliced as if its rows were 65 wide would be wrong from the second row on."""
    scale = torch.randint(0, 255, (7, 65), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    for padded in (uninitialised(scale), uninitialised(scale).flatten()):
        got = adapter.row_major(padded, 7, 65, swizzled=False)
        assert torch.equal(got.view(torch.uint8), scale.view(torch.uint8))
    swizzled = layout.swizzle_128x4(scale)
    assert torch.equal(adapter.row_major(swizzled, 7, 65, True).view(torch.uint8), scale.view(torch.uint8))


def request(x: str, w: str, dtype: torch.dtype = BF16, contract: str = "aoquant") -> Request:
    return Request(contract, get_format(x) if x else None, get_format(w), CPU, dtype, 4, 16, 128)


def verdict(r: Request | CodecRequest) -> str:
    return dict(explain(r))["qutlass"]


@pytest.mark.parametrize(
    ("r", "says"),
    [
        (request("nvfp4", "nvfp4", contract="nvfp4_rescale"), "computes aoquant, not nvfp4_rescale"),
        (request("", "nvfp4"), "got high precision"),
        (request("fp8-row", "nvfp4"), "got fp8-row"),
        (request("nvfp4", "gridflip"), "got gridflip"),
        (request("nvfp4", "te-nvfp4-16x16"), "got te-nvfp4-16x16"),
        (request("nvfp4-row", "nvfp4"), "one alpha for the whole product, got one a row of x"),
        (request("mxfp4", "nvfp4"), "MX by MX and NVFP4 by NVFP4, got mxfp4 by nvfp4"),
        (request("nvfp4", "nvfp4", torch.float16), "qutlass computes bfloat16, got torch.float16"),
        (request("mxfp4", "mxfp4", torch.float32), "qutlass computes bfloat16, got torch.float32"),
        (request("nvfp4", "nvfp4"), "willing, lower priority|runs"),
        (request("xx-mxfp4", "xx-mxfp4"), "willing, lower priority|runs"),
    ],
)
def test_gemms_that_it_takes_and_reasons(monkeypatch: pytest.MonkeyPatch, r: Request, says: str) -> None:
    install(monkeypatch, Package())
    assert any(s in verdict(r) for s in says.split("|")), verdict(r)


def test_what_is_missing_is_said_symbol_by_symbol(monkeypatch: pytest.MonkeyPatch) -> None:
    nv, mx = request("nvfp4", "nvfp4"), request("mxfp4", "mxfp4")
    assert "need a Blackwell GPU" in verdict(nv)  # this machine
    install(monkeypatch, Package(), (9, 0))
    assert "need a Blackwell GPU" in verdict(nv)
    install(monkeypatch, None)
    assert "qutlass is not installed" in verdict(nv)
    for capability in ((10, 0), (10, 3), (11, 0), (12, 0)):
        install(monkeypatch, Package(without=("matmul_mxf4_bf16_tn",)), capability)
        assert verdict(nv) == "runs"
        assert verdict(mx) == "this build of qutlass has no matmul_mxf4_bf16_tn"
    with backend("qutlass", role="gemm"), pytest.raises(ValueError, match="has no matmul_mxf4_bf16_tn"):
        gemm(
            "mxfp4", "mxfp4", torch.randn(2, 128).to(BF16), codec.encode(get_format("mxfp4"), torch.randn(8, 128)), None
        )


@pytest.mark.parametrize(
    ("name", "k", "dtype", "says"),
    [
        ("nvfp4", 128, BF16, "not nvfp4"),
        ("xx-mxfp4", 128, BF16, "not xx-mxfp4"),
        ("mxfp4-quest", 96, BF16, "multiple of 128 long, got 4 x 96"),
        ("mxfp4-quest", 128, torch.float16, "computes bfloat16"),
        ("hadamard16+mxfp4-quest", 128, BF16, "mixes 32 values or more"),
        ("hadamard32-inverse+mxfp4-quest", 128, BF16, "one bf16 matrix"),
        ("wush32+mxfp4-quest", 128, BF16, "one bf16 matrix"),
        ("mxfp4-quest", 128, BF16, "willing, lower priority"),
    ],
)
def test_codes_that_it_makes_and_reasons(
    monkeypatch: pytest.MonkeyPatch, name: str, k: int, dtype: torch.dtype, says: str
) -> None:
    install(monkeypatch, Package())
    fmt: Format = get_format(name)
    assert says in verdict(CodecRequest("quantize", fmt, CPU, dtype, 4, k))


def test_codes_of_qutlass_are_made_only_where_it_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    double = Package()
    install(monkeypatch, double)
    x = torch.randn(4, 128).to(BF16)
    free = codec.encode(get_format("mxfp4-quest"), x)
    assert not double.calls
    with backend("qutlass", role="gemm"):  # the other role
        again = codec.encode(get_format("mxfp4-quest"), x)
    assert not double.calls and torch.equal(free.codes, again.codes)
