"""int4's other numerics, against oracles that share no code with them: rational arithmetic, float64, torchao, PyTorch's
operator.

`test_integer.py` has MSLK's asymmetric int4; here are its bf16 scales, the two fp8 kinds, tinygemm's, and HQQ.
"""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from support.golden_inputs import DATA, data_set
from support.rational import rounded
from support.tinygemm_cases import cpu_case, linear
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from aoquant.formats import Encoded, Int4, Int4Float8, Int4Float8Row, TinyGemm, as_operand, get_format, hqq
from aoquant.ops.call import Call
from aoquant.ops.gemm import torch_int4
from aoquant.ops.gemm.torch_int4 import pack_cpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = [BF16, F16, F32]
E4M3 = ml_dtypes.float8_e4m3fn


def codes_of(e: Encoded) -> Tensor:
    """int8 codes -8..7 out of two's complement nibbles."""
    nibbles = torch.stack((e.codes & 15, e.codes >> 4), -1).flatten(1).to(torch.int8)
    return torch.where(nibbles > 7, nibbles - 16, nibbles)


def e4m3(x: np.ndarray) -> np.ndarray:
    """Saturating, by ml_dtypes; float64 in and out."""
    return np.clip(x, -448, 448).astype(E4M3).astype(np.float64)


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("data", ["weights", "special"])
def test_preshuffled_int4_has_bf16_scales_whatever_the_weight_is(data: str) -> None:
    x = data_set(data, 24, 128, F32)
    mine, plain = Int4(64, "bfloat16").encode(x), Int4(64).encode(x)
    assert torch.equal(mine.codes, plain.codes)
    for got, unrounded in ((mine.scale, plain.scale), (mine.zero, plain.zero)):
        assert got is not None and unrounded is not None
        want = [[float(rounded(Fraction(v), BF16)) for v in row] for row in unrounded.tolist()]
        assert got.dtype == BF16 and got.tolist() == want
    # the operand rounds q * s + z once, from bf16 scales
    operand = Int4(64, "bfloat16").operand(mine, BF16)
    assert mine.scale is not None and mine.zero is not None
    for r in range(0, 24, 5):
        for c in range(0, 128, 7):
            s, z = (Fraction(t[r, c // 64].item()) for t in (mine.scale, mine.zero))
            assert operand[r, c].item() == float(rounded(int(codes_of(mine)[r, c]) * s + z, BF16))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("data", ["weights", "heavy", "special"])
def test_fp8_plain_in_numpy(data: str, dtype: torch.dtype) -> None:
    """s = max(absmax, 1e-6) / 8, clamped codes, s in the weight's dtype; operand e4m3(rn(q s))."""
    x = data_set(data, 24, 256, dtype)
    e = Int4Float8(128).encode(x)
    w = x.float().numpy().reshape(24, 2, 128)
    scale = np.maximum(np.abs(w).max(-1, keepdims=True), np.float32(1e-6)) / np.float32(8)
    q = np.clip(np.rint(w / scale), -8, 7)
    assert e.zero is None and e.outer is None and e.scale is not None
    assert torch.equal(codes_of(e), torch.from_numpy(q.astype(np.int8).reshape(24, 256)))
    assert torch.equal(e.scale, torch.from_numpy(scale[..., 0]).to(dtype))
    product = q.astype(np.float64) * e.scale.double().numpy()[..., None]
    inner = bf16(product) if dtype == BF16 else product.astype(np.float32).astype(np.float64)
    assert torch.equal(Int4Float8(128).operand(e, F32).double(), torch.from_numpy(e4m3(inner).reshape(24, 256)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("data", ["weights", "heavy", "special"])
def test_fp8_preshuffled_in_numpy(data: str, dtype: torch.dtype) -> None:
    """fp8 rows first, then int4 of the fp8 codes in code units, scales in e4m3; operand e4m3(q s), row scale
    outside.
    """
    x = data_set(data, 24, 256, dtype)
    fmt = Int4Float8Row(128)
    e = fmt.encode(x)
    w = x.float().numpy()
    row = np.maximum(np.abs(w).max(1, keepdims=True), np.float32(1 / 512)) / np.float32(448)
    rows = e4m3(w / row).astype(np.float32).reshape(24, 2, 128)
    scale = np.maximum(np.abs(rows).max(-1, keepdims=True), np.float32(1e-6)) / np.float32(8)
    q = np.clip(np.rint(rows / scale), -8, 7)
    stored = scale[..., 0].astype(E4M3)
    assert e.scale is not None and e.outer is not None and e.zero is None
    assert torch.equal(codes_of(e), torch.from_numpy(q.astype(np.int8).reshape(24, 256)))
    assert torch.equal(e.scale.view(torch.uint8), torch.from_numpy(stored.view(np.uint8)))
    assert torch.equal(e.outer, torch.from_numpy(row))
    operand = e4m3(q.astype(np.float64) * stored.astype(np.float64)[..., None]).reshape(24, 256)
    assert torch.equal(fmt.operand(e, BF16).double(), torch.from_numpy(operand))
    assert torch.equal(fmt.decode(e, F32), torch.from_numpy(operand.astype(np.float32) * row))


def test_saturated_is_the_largest_positive_value_of_a_symmetric_group() -> None:
    x = torch.full((1, 128), 0.5, dtype=BF16)
    x[0, 3], x[0, 9] = 8.0, -8.0
    for name in ("int4-e4m3-g128", "int4-e4m3-row-g128"):
        fmt = get_format(name)
        assert fmt.saturated(x, fmt.encode(x)).nonzero().tolist() == [[0, 3]]


# MSLK's fp8 rows


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mslk_rows_in_numpy(dtype: torch.dtype) -> None:
    x = torch.cat(
        (
            data_set("normal", 24, 256, dtype),
            data_set("special", 24, 256, dtype),
            data_set("bits_in_rows", 24, 256, dtype),
        )
    )
    fmt = get_format("fp8-row-mslk")
    e = fmt.encode(x)
    w = x.float().numpy()
    scale = np.maximum(np.abs(w).max(1, keepdims=True), np.float32(1 / 512)) / np.float32(448)
    codes = np.clip(w / scale, np.float32(-448), np.float32(448)).astype(E4M3).view(np.uint8)
    assert e.scale is not None
    assert torch.equal(e.scale, torch.from_numpy(scale))
    assert torch.equal(e.codes.view(torch.uint8), torch.from_numpy(codes))
    # not vacuous: a multiplication by 1/448, CUDA's division by a number, gives other scales
    assert (
        dtype != F32
        or (scale != np.maximum(np.abs(w).max(1, keepdims=True), np.float32(1 / 512)) * np.float32(1 / 448)).any()
    )


def test_mslk_rows_of_zeros_are_zeros_and_small_rows_are_floored() -> None:
    fmt = get_format("fp8-row-mslk")
    x = torch.zeros(3, 64, dtype=BF16)
    x[1, 0], x[2, 0] = 2.0**-10, 1.0
    e = fmt.encode(x)
    assert torch.equal(fmt.decode(e, BF16), x)
    assert fmt.floored(e).flatten().tolist() == [False, True, False]
    assert e.scale is not None
    assert e.scale.flatten().tolist() == [float(np.float32(1 / 512) / np.float32(448))] * 2 + [
        float(np.float32(1) / np.float32(448))
    ]


# tinygemm: torchao's quantiser, and the operator itself


class Peak(TorchDispatchMode):
    """Bytes of the storages that operations made and somebody holds, at the worst moment."""

    def __init__(self) -> None:
        super().__init__()
        self.made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        given -= {t.untyped_storage().data_ptr() for t in self.made}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in given:
                self.made[t] = None
        alive = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.made}
        self.bytes = max(self.bytes, sum(alive.values()))
        return out


@pytest.mark.parametrize(
    "name", ["int4-tinygemm-hqq-g64", pytest.param("int4-tinygemm-cpu-hqq-g32", marks=pytest.mark.slow)]
)
def test_hqq_in_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bytes some rows at a time, with one intermediate of the whole matrix, |w - v|, beside three of some
    rows.
    """
    x = torch.cat([DATA[kind](64, 512, BF16, 9) for kind in ("heavy", "normal", "weights")])
    whole = get_format(name).encode(x)
    monkeypatch.setattr(hqq, "TILE", 4096)
    with Peak() as peak:
        tiled = get_format(name).encode(x)
    for a, b in zip(whole[:3], tiled[:3], strict=True):
        assert a is not None and b is not None and torch.equal(a, b)
    lost = x.numel() * (4 if "cpu" in name else 2)  # |w - v| in the dtype of the iterations
    assert lost < peak.bytes < 1.5 * lost, peak.bytes / lost


def hqq_by_definition(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """(scale, zero point) of the groups, and after how many iterations the error fell no more; a loop that breaks."""
    w = x.unflatten(1, (-1, group)).flatten(0, 1)
    low, high = w.amin(1, keepdim=True).float(), w.amax(1, keepdim=True).float()
    r = ((high - low).reciprocal() * 15).clamp(max=2e4)
    w, r, b = w.to(dtype), r.to(dtype), (-low * r).round().to(dtype)
    beta, best, iterations = 10.0, 1e4, 0
    while iterations < 20:
        iterations += 1
        q = (w * r + b).round().clamp(0, 15)
        error = w - (q - b) / r
        shrunk = error.sign() * torch.relu(error.abs() - error.abs().pow(-0.3) * (1 / beta))
        b = (q - (w - shrunk) * r).mean(1, keepdim=True)
        beta *= 1.01
        size = float(error.abs().mean())
        if size >= best:
            break
        best = size
    scale = r.reciprocal()
    return scale.to(x.dtype), ((8 - b.float()) * scale.float()).to(dtype).to(x.dtype), iterations


@pytest.mark.parametrize(("name", "inner"), [("int4-tinygemm-hqq-g32", F16), ("int4-tinygemm-cpu-hqq-g32", F32)])
def test_hqq_stops_for_good_when_the_error_falls_no_more(name: str, inner: torch.dtype) -> None:
    """At equal errors too, which float16 has; and an error that falls again later does not start it anew."""
    found = set()
    for x in (torch.randn(8, 256), DATA["normal"](24, 256, BF16, 1), DATA["heavy"](24, 256, BF16, 1)):
        scale, zero, iterations = hqq_by_definition(x, 32, inner)
        found.add(iterations)
        e = get_format(name).encode(x)
        assert e.scale is not None and e.zero is not None
        assert torch.equal(e.scale.flatten(), scale.flatten())
        assert torch.equal(e.zero.flatten(), zero.flatten()), iterations
    assert len(found) > 1 and min(found) < 20


def test_hqq_stops_after_one_iteration_where_the_mean_error_is_above_ten_thousand() -> None:
    x = torch.randn(4, 64)
    x[0, :32] *= 1.6e6
    scale, zero, iterations = hqq_by_definition(x, 32, F32)
    e = get_format("int4-tinygemm-cpu-hqq-g32").encode(x)
    assert iterations == 1 and e.scale is not None and e.zero is not None
    assert torch.equal(e.scale.flatten(), scale.flatten()) and torch.equal(e.zero.flatten(), zero.flatten())


def test_hqq_scale_only_saturates_half_a_step_beyond_the_largest_code() -> None:
    x = torch.randn(4, 64) ** 3
    x[2] *= -1
    fmt = get_format("intx4-g32-hqq")
    e = fmt.encode(x)
    assert e.scale is not None
    codes = x / e.scale.repeat_interleave(32, 1)
    assert torch.equal(fmt.saturated(x, e), (codes < -8.5) | (codes > 7.5)) and 0 < fmt.saturated(x, e).sum() < 32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_tinygemm_cpu_bytes_are_torchaos(group: int, dtype: torch.dtype) -> None:
    from torchao.prototype.quantization.int4 import Int4OpaqueTensor
    from torchao.quantization.quantize_.workflows import Int4ChooseQParamsAlgorithm as Algorithm

    for data in ("weights", "heavy", "special"):
        x = torch.cat((data_set(data, 24, 256, dtype), data_set("normal", 24, 256, dtype)))
        for fmt, algorithm in (
            (TinyGemm(group, device="cpu"), Algorithm.TINYGEMM),
            (TinyGemm(group, device="cpu", hqq=True), Algorithm.HQQ),
        ):
            theirs = Int4OpaqueTensor.from_hp(x, [1, group], algorithm)
            packed, scales = pack_cpu(fmt, fmt.encode(x))
            assert torch.equal(packed, theirs.qdata), (data, algorithm)
            assert scales.dtype == theirs.scale_and_zero.dtype
            assert torch.equal(scales.nan_to_num(), theirs.scale_and_zero.nan_to_num()), (data, algorithm)


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_tinygemm_cuda_is_torchaos_with_cudas_division(group: int) -> None:
    from support.torchao_oracle import cuda_division
    from torchao.quantization.quant_primitives import (
        MappingType,
        _choose_qparams_affine_tinygemm,
        _quantize_affine_tinygemm,
    )

    for data in ("weights", "heavy", "special"):
        x = data_set(data, 24, 512, BF16)
        with cuda_division():
            scale, zero = _choose_qparams_affine_tinygemm(
                x, MappingType.ASYMMETRIC, (1, group), torch.int32, 0, 15, scale_dtype=BF16, zero_point_dtype=BF16
            )
            q = _quantize_affine_tinygemm(x, (1, group), scale, zero, torch.int32, 0, 15)
        e = TinyGemm(group).encode(x)
        assert e.scale is not None and e.zero is not None
        assert torch.equal(codes_of(e).int() + 8, q), data
        assert torch.equal(e.scale, scale) and torch.equal(e.zero, zero), data
        # the operand rounds (q - 8) s + z once
        exact = (q.double() - 8) * scale.double().repeat_interleave(group, 1) + zero.double().repeat_interleave(
            group, 1
        )
        normal = exact.abs() > 1e-30
        mantissa, exponent = torch.frexp(exact[normal])
        want = torch.ldexp((mantissa * 256).round(), exponent - 8)
        assert torch.equal(TinyGemm(group).operand(e, F32).double()[normal], want), data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference_is_the_operator_to_the_last_bit(dtype: torch.dtype) -> None:
    """One chain of fused multiply-adds in k's order, over an operand that no 16-bit rounding touched."""
    x, e, fmt = cpu_case(dtype)
    bias = torch.randn(80).to(dtype)
    for b in (None, bias):
        real = linear("torch._weight_int4pack_mm_for_cpu", x, e, fmt, b)
        assert torch.equal(linear("reference", x, e, fmt, b), real)


def operands(e: Encoded, fmt: TinyGemm, capability: str, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    return fmt.operand(e, F32)


def test_operand_rules_in_rational_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 on AVX512, bf16 on AVX2, and float32 with and without fused multiply-adds; they differ, and each is its
    definition.
    """
    for dtype in (BF16, F32):
        _, e, fmt = cpu_case(dtype, n=8, size=2.0**-20 if dtype == BF16 else 0.1)
        got = {c: operands(e, fmt, c, monkeypatch) for c in ("AVX512", "AVX2", "DEFAULT")}
        assert e.scale is not None and e.zero is not None
        q = codes_of(e)
        for r in range(8):
            for c in range(0, 128, 3):
                s, z, code = Fraction(e.scale[r, c // 32].item()), Fraction(e.zero[r, c // 32].item()), int(q[r, c])
                fused = rounded(code * s + z, F32)
                folded = rounded((code + 8) * s + rounded(z - 8 * s, F32), F32)
                twice = rounded(rounded(code * s, F32) + z, F32)
                assert got["AVX512"][r, c].item() == float(fused)
                assert got["AVX2"][r, c].item() == float(folded if dtype == BF16 else fused)
                assert got["DEFAULT"][r, c].item() == float(twice)
        assert torch.equal(got["AVX512"], got["AVX2"]) == (dtype == F32)
        assert torch.equal(got["AVX512"], got["DEFAULT"]) == (dtype == BF16)  # there the product is exact


SUBPROCESS = """
import sys, torch
sys.path[:0] = [p for p in sys.argv[2].split(":") if p]
from support.tinygemm_cases import cpu_case, linear
assert torch.backends.cpu.get_cpu_capability() == sys.argv[1].upper(), torch.backends.cpu.get_cpu_capability()
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    x, e, fmt = cpu_case(dtype)
    real = linear("torch._weight_int4pack_mm_for_cpu", x, e, fmt)
    print(dtype, int((linear("reference", x, e, fmt) != real).sum()), real.float().numpy().tobytes().hex()[:2000])
"""


def outputs_under(capability: str) -> dict[str, tuple[int, str]]:
    """dtype -> (elements in which the reference differs from the operator, the operator's output) in another
    process.
    """
    run = subprocess.run(
        [sys.executable, "-c", SUBPROCESS, capability, ":".join(sys.path)],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "MSLK_PYTHON_ONLY": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [line.split() for line in run.stdout.splitlines() if line.startswith("torch.")]
    return {dtype: (int(count), out) for dtype, count, out in rows}


@pytest.mark.slow
def test_another_instruction_set_is_followed() -> None:
    """ATEN_CPU_CAPABILITY=avx2 selects the operator's other rule, and the reference goes with it."""
    here = torch.backends.cpu.get_cpu_capability()
    there = outputs_under("avx2")
    assert {dtype: count for dtype, (count, _) in there.items()} == {str(d): 0 for d in DTYPES}
    for dtype in DTYPES:
        x, e, fmt = cpu_case(dtype)
        mine = linear("torch._weight_int4pack_mm_for_cpu", x, e, fmt).float().numpy().tobytes().hex()[:2000]
        # not vacuous: in bf16 the two rules give other outputs, in other dtypes the same
        assert (mine == there[str(dtype)][1]) == (dtype != BF16 or here != "AVX512"), dtype


@pytest.mark.slow
def test_without_vector_instructions() -> None:
    assert {dtype: count for dtype, (count, _) in outputs_under("default").items()} == {str(d): 0 for d in DTYPES}


# HQQ


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_hqq_scale_only_bytes_are_torchaos(bits: int, dtype: torch.dtype) -> None:
    from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm, IntxUnpackedToInt8Tensor

    for data in ("weights", "special"):
        x = data_set(data, 24, 256, dtype)
        for name, block in ((f"intx{bits}-g32-hqq", 32), (f"intx{bits}-row-hqq", 256)):
            theirs = IntxUnpackedToInt8Tensor.from_hp(
                x,
                (1, block),
                getattr(torch, f"int{bits}"),
                intx_choose_qparams_algorithm=IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY,
            )
            fmt = get_format(name)
            e = fmt.encode(x)
            assert torch.equal(fmt.integers(e), theirs.qdata), (data, name)  # type: ignore[attr-defined]
            assert e.scale is not None and e.scale.dtype == theirs.scale.dtype
            assert torch.equal(e.scale, theirs.scale), (data, name)


def test_hqq_lowers_the_error_and_traces() -> None:
    x = DATA["heavy"](32, 256, BF16, 9)
    for fitted, plain in (("int4-tinygemm-cpu-hqq-g64", "int4-tinygemm-cpu-g64"), ("intx4-g32-hqq", "intx4-g32")):
        error = [(get_format(n).fake_quantize(x) - x).float().abs().pow(0.7).mean() for n in (fitted, plain)]
        assert error[0] < error[1]
        e = get_format(fitted).encode(x.to("meta"))
        assert e.codes.shape == (32, 128) and e.scale is not None and e.scale.shape[0] == 32


def test_what_the_cuda_operator_gets_is_padded_with_zeros_to_its_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """N to a multiple of 8, or of what is asked for, K to one of 1024; the operator itself needs a GPU, so here it is
    left out.
    """
    monkeypatch.setattr(torch_int4._aten, "_convert_weight_to_int4pack", lambda pairs, tiles: pairs, raising=False)
    fmt = TinyGemm(64)
    e = fmt.encode(DATA["weights"](13, 192, BF16, 1))
    for given, n in (((), 16), ((16,), 16), ((32,), 32)):
        pairs, scales = torch_int4.pack_cuda(fmt, e, *given)
        assert pairs.shape == (n, 512) and scales.shape == (16, n, 2)
        q = torch.stack((pairs >> 4, pairs & 15), -1).flatten(1).int() - 8
        s, z = (t.t().repeat_interleave(64, 1).double() for t in scales.double().unbind(-1))
        values = q * s + z
        assert torch.equal(values[:13, :192].bfloat16(), fmt.decode(e, BF16))
        values[:13, :192] = 0
        assert (values == 0).all()


def test_what_the_cuda_operator_gives_is_cut_to_the_weights_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """13 of 16, fewer than the bytes of a row; a stand-in multiplies."""
    fmt = TinyGemm(64)
    w, x, bias = DATA["weights"](13, 192, BF16, 1), DATA["normal"](5, 192, BF16, 2), DATA["normal"](1, 13, BF16, 3)[0]
    e = fmt.encode(w)
    wanted = torch_int4.cuda_reference(Call("tinygemm_cuda", x, None, e, as_operand(fmt), bias, [5], BF16))

    def multiply(x_MK: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
        values = fmt.operand(e, F32)
        padded = torch.zeros(16, x_MK.shape[1])
        padded[:13, :192] = values
        return (x_MK.float() @ padded.t()).bfloat16()

    monkeypatch.setattr(torch_int4, "pack_cuda", lambda *args: (None, None))
    monkeypatch.setattr(torch_int4._aten, "_weight_int4pack_mm", multiply, raising=False)
    got = torch_int4._cuda(Call("tinygemm_cuda", x, None, e, as_operand(fmt), bias, [5], BF16))
    assert got.shape == (5, 13)
    torch.testing.assert_close(got, wanted, rtol=2**-7, atol=1e-5)  # sums of another order


def test_the_cpu_operator_takes_inputs_of_any_layout() -> None:
    fmt = TinyGemm(64, device="cpu")
    e, x = fmt.encode(DATA["weights"](16, 192, BF16, 1)), DATA["normal"](5, 192, BF16, 2)
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    calls = [Call("tinygemm_cpu", t, None, e, as_operand(fmt), None, [5], BF16) for t in (x, strided)]
    assert torch.equal(*(torch_int4._cpu(c) for c in calls))
