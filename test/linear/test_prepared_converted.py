"""prepared(x) == converted(x), and == the layer that torchao makes by itself, at tolerance 0.

Every config, dtype, kind of number and shape of input; see `linear_cases.py`. Where torchao's own layer fails (empty
batches, rows of zeros, strided inputs) the test says so and holds aoquant's to what it should have been.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.bits import same_bytes
from support.linear_cases import (
    AOQUANT_CASES,
    BF16,
    BY_NAME,
    F32,
    FP8_BLOCKS,
    INT4,
    KINDS,
    NVFP4,
    NVFP4_NONE,
    TORCHAO_CASES,
    Case,
    assert_equal,
    converted,
    cuda_division,
    data,
    inputs,
    layer,
    prepared,
    torchao_converted,
    with_dtypes,
    with_kinds,
)
from support.specified_kernels import blockwise_fp8_gemm, fp4_scaled_mm
from torch import Tensor, nn
from torchao.prototype.mx_formats import NVFP4DynamicActivationNVFP4WeightConfig
from torchao.quantization import Float8Tensor
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows.float8 import float8_tensor

from aoquant import PackedTensor
from aoquant.formats import layout

NOT_CONTIGUOUS = ("transposed", "strided", "sliced", "sliced3d", "permuted", "expanded")
ONE_OF_EACH_PATH = ("1d", "2d", "3d", "empty", "strided", "sliced3d", "permuted")
# torchao: MXTensor.to_mx asserts contiguity; F.linear of a permuted 3-D input calls ops that its wrappers do not
# implement
TORCHAO_STRIDES = {"MXTensor": NOT_CONTIGUOUS, "NVFP4Tensor": ("permuted",)}


def deployed(layer: nn.Linear, x: Tensor, shape: str) -> Tensor | None:
    """The deployed layer's output; None where torchao's tensor cannot take the input, which is asserted, not
    assumed.
    """
    w = layer.weight.data
    kind = type(w).__name__
    crashes = shape in TORCHAO_STRIDES.get(kind, ())
    if kind == "Float8Tensor" and w.block_size == [128, 128]:
        crashes = x.dim() == 1
    if not crashes:
        return layer(x)
    with pytest.raises((AssertionError, NotImplementedError, TypeError, IndexError, ZeroDivisionError)):
        layer(x)
    return None


def check_equal(qat: nn.Linear, other: nn.Linear, xs: dict[str, Tensor]) -> None:
    """The prepared layer equals a deployed one on every input, or what that one should have returned. Without a bias:
    on one input of each path through F.linear.
    """
    dynamic = qat.prepared.recipe.fprop_input is not None and not isinstance(other.weight, PackedTensor)
    for shape, x in xs.items():
        if qat.bias is None and shape not in ONE_OF_EACH_PATH:
            continue
        y = qat(x)
        assert y.shape == (*x.shape[:-1], qat.out_features) and y.dtype == x.dtype
        assert y.isfinite().all(), f"{shape}: not finite"
        z = deployed(other, x, shape)
        if z is None:
            continue
        if (
            dynamic
            and isinstance(other.weight.data, Float8Tensor)
            and qat.prepared.recipe.fprop_input.format.low is None
        ):
            y, z = _without_nan_rows(qat, x, y, z)
        assert_equal(y, z, shape)


def _without_nan_rows(qat: nn.Linear, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """torchao quantises float8 activations of zeros to 0 / 0: NaN at run time. Ours there is the bias."""
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    fmt = qat.prepared.recipe.fprop_input
    zero = (rows == 0).unflatten(-1, (-1, fmt.block or rows.shape[-1])).all(-1)  # rows, or blocks of rows
    empty, nan = zero.all(-1), zero.any(-1)
    if fmt.per == "tensor":
        empty = nan = empty.all().expand_as(empty)
    y, z = (t.reshape(len(rows), qat.out_features) for t in (y, z))
    assert z[nan].isnan().all(), "torchao repaired its rows and blocks of zeros: compare them too"
    assert (y[empty] == (0 if qat.bias is None else qat.bias)).all()
    return y[~nan], z[~nan]


@pytest.mark.parametrize(
    ("case", "dtype", "kind"), [*with_kinds(TORCHAO_CASES, ("mixed",)), *with_kinds(AOQUANT_CASES)]
)
def test_prepared_equals_converted(case: Case, dtype: torch.dtype, kind: str) -> None:
    """Mixed numbers from 1-D to 4-D, empty, and with every kind of stride, in the first dtype without a bias too; other
    numbers with a bias, on one input of each path through F.linear. All of it is run below (slow). The other kinds of
    numbers in torchao's configs: further below, where the converted layer is torchao's own, byte for byte.
    """
    for bias in (True, False) if kind == "mixed" and dtype == case.dtypes[0] else (True,):
        qat = prepared(case, layer(case, dtype, bias=bias, kind=kind))
        xs = inputs(kind, case.k, dtype)
        check_equal(
            qat, converted(case, qat), xs if kind == "mixed" else {shape: xs[shape] for shape in ONE_OF_EACH_PATH}
        )


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype", "kind"), with_kinds((*TORCHAO_CASES, *AOQUANT_CASES)))
def test_every_input_of_every_kind(case: Case, dtype: torch.dtype, kind: str) -> None:
    for bias in (True, False):
        qat = prepared(case, layer(case, dtype, bias=bias, kind=kind))
        check_equal(qat, converted(case, qat), inputs(kind, case.k, dtype))


@pytest.mark.parametrize(("case", "dtype", "kind"), with_kinds(TORCHAO_CASES))
def test_prepared_equals_what_torchao_makes_itself(case: Case, dtype: torch.dtype, kind: str) -> None:
    """Same outputs, and byte for byte the same tensors in the checkpoint.

    Where torchao divides float32 by a constant (float32 weights, and NVFP4 always) its CPU and its GPU differ by an
    ulp; ours is the GPU's.
    """
    for bias in (True, False):
        linear = layer(case, dtype, bias=bias, kind=kind)
        theirs = torchao_converted(case, linear, cuda=_made_on_a_gpu(case, dtype))
        mine = converted(case, qat := prepared(case, linear))
        xs = inputs(kind, case.k, dtype)
        if _torchao_weight_is_nan(theirs.weight.data):
            assert mine.weight.dequantize().isfinite().all()
            check_equal(qat, mine, xs)
            continue
        _same_tensors(mine.weight.data, theirs.weight.data)
        check_equal(qat, theirs, xs)


def _made_on_a_gpu(case: Case, dtype: torch.dtype) -> bool:
    """Where the two kinds of division differ, ours is the GPU's, except for a layout that is made on CPUs alone."""
    return (dtype == F32 or case.name.startswith("ao.nvfp4")) and "opaque" not in case.name


def _torchao_weight_is_nan(w: Tensor) -> bool:
    """torchao makes rows of zeros NaN in float8, and a tensor of zeros NaN in NVFP4."""
    if isinstance(w, Float8Tensor):
        return bool((w.scale == 0).any())
    return type(w).__name__ == "NVFP4Tensor" and w.per_tensor_scale is not None and bool(w.per_tensor_scale == 0)


def _same_tensors(mine: Tensor, theirs: Tensor) -> None:
    assert type(mine) is type(theirs) and mine.shape == theirs.shape and mine.dtype == theirs.dtype
    names, attributes = mine.__tensor_flatten__()
    assert names == theirs.__tensor_flatten__()[0]
    for name in names:
        assert same_bytes(getattr(mine, name), getattr(theirs, name)), f"{name} differs"
    for name, value in theirs.__tensor_flatten__()[1].items():
        assert attributes[name] == value, f"{name}: {attributes[name]} is not {value}"


@pytest.mark.parametrize("name", ["ao.fp8-row", "ao.fp8-tensor", "ao.nvfp4-weight-dynamic"])
def test_zero_weights_are_nan_in_torchao_and_zero_here(name: str) -> None:
    """Padding rows and pruned layers: torchao divides 0 by 0."""
    case = BY_NAME[name]
    linear = layer(case, BF16, kind="zero")
    x = data("normal", 3, case.k, BF16)
    assert torchao_converted(case, linear)(x).isnan().any()
    assert_equal(converted(case, prepared(case, linear))(x), linear.bias.expand(3, -1))


@pytest.mark.parametrize(("case", "dtype"), with_dtypes((*TORCHAO_CASES, *AOQUANT_CASES)))
def test_weights_that_are_not_contiguous(case: Case, dtype: torch.dtype) -> None:
    """A transposed weight gives what its contiguous copy gives, on one input of each path through F.linear."""
    plain = layer(case, dtype)
    strided = layer(case, dtype)
    strided.weight = nn.Parameter(plain.weight.detach().t().contiguous().t())
    assert not strided.weight.is_contiguous()
    qat, want = prepared(case, strided), prepared(case, plain)
    deployed = converted(case, qat)
    xs = inputs("normal", case.k, dtype)
    for shape in ("1d", "2d", "3d"):
        y = want(xs[shape])
        assert_equal(qat(xs[shape]), y, shape)
        assert_equal(deployed(xs[shape]), y, shape)


@pytest.mark.parametrize(("case", "dtype"), with_dtypes((*TORCHAO_CASES, *AOQUANT_CASES)))
def test_after_optimizer_steps(case: Case, dtype: torch.dtype) -> None:
    """Training moves the weight and prepared follows it: convert after three steps, and differ from before them."""
    qat = prepared(case, layer(case, dtype))
    x = data("normal", 6, case.k, dtype, 1)
    before = qat(x).detach()
    optimizer = torch.optim.AdamW(qat.parameters(), lr=0.05, eps=1e-3)  # 1e-8 is 0 in float16
    for _ in range(3):
        optimizer.zero_grad()
        qat(x).float().square().mean().backward()
        optimizer.step()
    after = qat(x)
    assert not torch.equal(before, after)
    assert_equal(after, converted(case, qat)(x))


@pytest.mark.parametrize("shape", ["permuted", "sliced3d"])
def test_the_layout_of_an_input_is_part_of_the_contract(shape: str) -> None:
    """F.linear rounds the product and the sum with the bias of a 3-D input that is not contiguous; quantising makes it
    dense first.
    """
    case = BY_NAME["ao.int8act-intx4-g32"]
    qat = prepared(case, layer(case, BF16))
    x = inputs("normal", case.k, BF16)[shape]
    y = qat(x)
    assert_equal(y, converted(case, qat)(x))
    assert torch.equal(y, qat(x.contiguous())) == (shape == "sliced3d")


@pytest.mark.parametrize("k", [2, 7, 53])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    "name", ["ao.intx3-axis", "ao.int8act-int8-row", "intx3-row", "intx8-row", "int8-tensor-act", "fp8-row-act"]
)
def test_ragged_shapes(name: str, n: int, k: int) -> None:
    case = BY_NAME[name]
    for dtype in case.dtypes:
        qat = prepared(case, layer(case, dtype, n=n, k=k))
        check_equal(qat, converted(case, qat), inputs("normal", k, dtype))


# Kernels that need a GPU: torchao's layer runs for real, over a kernel written from the specification


@pytest.fixture
def mslk_int4() -> Iterator[None]:
    """`torch.ops.mslk.bf16i4bf16_rowwise` as spec/int4.md section 2 has it: one rounding of q * s + z, float32 sums,
    one rounding.
    """
    library = torch.library.Library("mslk", "FRAGMENT")
    library.define("bf16i4bf16_rowwise(Tensor x, Tensor q, Tensor s, Tensor z) -> Tensor")

    def kernel(x: Tensor, packed: Tensor, s_GN: Tensor, z_GN: Tensor) -> Tensor:
        low, high = (packed << 4) >> 4, packed >> 4  # int8: the shift keeps the sign
        q_NK = torch.stack((low, high), -1).flatten(1).double()
        group = q_NK.shape[1] // s_GN.shape[0]
        s_NK, z_NK = (t.t().double().repeat_interleave(group, 1) for t in (s_GN, z_GN))
        w_NK = _round_to_bf16(q_NK * s_NK + z_NK)
        return (x.float() @ w_NK.float().t()).bfloat16()

    library.impl("bf16i4bf16_rowwise", kernel, "CPU")
    yield
    library._destroy()


def _round_to_bf16(x: Tensor) -> Tensor:
    """float64 to the nearest bfloat16 in one rounding, half to even, for values in its normal range."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 256).round(), exponent - 8).bfloat16()


@pytest.mark.parametrize("kind", KINDS)
def test_int4_plain_equals_torchao_over_the_specified_kernel(mslk_int4: None, kind: str) -> None:
    for bias in (True, False):
        qat = prepared(INT4, layer(INT4, BF16, bias=bias, kind=kind))
        check_equal(qat, converted(INT4, qat), inputs(kind, INT4.k, BF16))


def test_int4_tensor_holds_the_bytes_of_the_format() -> None:
    qat = prepared(INT4, layer(INT4, BF16))
    w, e = converted(INT4, qat).weight.data, qat.prepared.recipe.fprop_weight.encode(qat.weight)
    assert type(w).__name__ == "Int4Tensor" and w.dtype == BF16 and w.block_size == [1, 64]
    assert same_bytes(w.qdata.view(torch.uint8), e.codes)
    assert same_bytes(w.scale.t(), e.scale) and same_bytes(w.zero_point.t(), e.zero)
    assert w.scale.shape == (INT4.k // 64, INT4.n) and w.scale.is_contiguous()


@pytest.mark.parametrize("kind", ["normal", "mixed", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS[1:-1])])
def test_fp8_blocks_equal_torchao_over_the_specified_kernel(kind: str) -> None:
    """Bytes of the checkpoint too. The kernel itself: test/gpu/test_fp8_blocks.py."""
    for bias in (True, False):
        linear = layer(FP8_BLOCKS, BF16, bias=bias, kind=kind)
        qat = prepared(FP8_BLOCKS, linear)
        mine, theirs = converted(FP8_BLOCKS, qat), torchao_converted(FP8_BLOCKS, linear)
        xs = inputs(kind, FP8_BLOCKS.k, BF16)
        with mock.patch.object(float8_tensor, "blockwise_fp8_gemm", blockwise_fp8_gemm):
            check_equal(qat, mine, xs)
            if _torchao_weight_is_nan(theirs.weight.data):
                continue
            theirs.weight.kernel_preference = theirs.weight.act_quant_kwargs.kernel_preference = KernelPreference.TORCH
            _same_tensors(mine.weight.data, theirs.weight.data)
            check_equal(qat, theirs, xs)


def test_fp8_blocks_against_exact_sums() -> None:
    """Float64 has every product and sum of a block; what remains is float32's rounding of the scaled blocks."""
    case, n = BY_NAME["fp8-block-act"], 130  # the second tile is short
    qat = prepared(case, layer(case, F32, n=n))
    x = data("normal", 7, case.k, F32, 1)
    recipe = qat.prepared.recipe
    x_hat, w_hat = (f.decode(f.encode(t), F32) for f, t in ((recipe.fprop_input, x), (recipe.fprop_weight, qat.weight)))
    codes, scale = (t.double() for t in recipe.fprop_weight.encode(qat.weight.detach())[:2])
    w_exact = codes * scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    codes, scale = (t.double() for t in recipe.fprop_input.encode(x)[:2])
    y = (codes * scale.repeat_interleave(128, 1)) @ w_exact.t() + qat.bias.double()
    error = (qat(x).double() - y).norm() / y.norm()
    rounded = (x_hat.bfloat16().double() @ w_hat.bfloat16().double().t() + qat.bias.double() - y).norm() / y.norm()
    assert error < 3e-7
    assert rounded > 1e-3  # what a bf16 GEMM of decoded operands would have lost


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "zero"])
@pytest.mark.parametrize(("case", "dtype"), with_dtypes((NVFP4, NVFP4_NONE)))
def test_nvfp4_equals_torchao_over_the_specified_kernel(case: Case, dtype: torch.dtype, kind: str) -> None:
    """With a GPU's divisions; torchao refuses strided inputs."""
    for bias in (True, False):
        qat = prepared(case, layer(case, dtype, bias=bias, kind=kind))
        deployed = converted(case, qat)
        with mock.patch.object(torch, "_scaled_mm", fp4_scaled_mm), cuda_division():
            for shape, x in inputs(kind, case.k, dtype).items():
                y = qat(x)
                assert y.isfinite().all()
                if shape in NOT_CONTIGUOUS:
                    with pytest.raises((AssertionError, NotImplementedError, RuntimeError)):
                        deployed(x)
                else:
                    assert_equal(y, deployed(x), shape)


def test_nvfp4_zero_input_is_nan_in_torchao_and_the_bias_here() -> None:
    qat = prepared(NVFP4, layer(NVFP4, BF16))
    x = torch.zeros(3, NVFP4.k, dtype=BF16)
    with mock.patch.object(torch, "_scaled_mm", fp4_scaled_mm):
        assert converted(NVFP4, qat)(x).isnan().any()
    assert_equal(qat(x), qat.bias.expand(3, -1))


def test_nvfp4_is_stamped_with_the_quantiser_that_prepare_computed() -> None:
    """use_triton_kernel=True, torchao's default, means MSLK's quantiser, which has other codes for small blocks."""
    case = replace(NVFP4, config=NVFP4DynamicActivationNVFP4WeightConfig())
    assert case.config.use_triton_kernel
    w = converted(case, prepared(case, layer(case, BF16))).weight
    assert not w.use_triton_kernel and not w.act_quant_kwargs.use_triton_kernel


@pytest.mark.parametrize("case", [NVFP4, NVFP4_NONE], ids=repr)
def test_nvfp4_tensor_holds_the_bytes_of_the_format(case: Case) -> None:
    qat = prepared(case, layer(case, BF16))
    w, e = converted(case, qat).weight.data, qat.prepared.recipe.fprop_weight.encode(qat.weight)
    assert type(w).__name__ == "NVFP4Tensor" and same_bytes(w.qdata, e.codes)
    assert same_bytes(layout.unswizzle_128x4(w.scale.flatten(), case.n, case.k // 16), e.scale)
    assert (w.per_tensor_scale is None) == (e.outer is None)
    assert e.outer is None or torch.equal(w.per_tensor_scale, e.outer[0, 0])
