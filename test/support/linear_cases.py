"""What the tests of the linear layer share: every config in small, inputs and weights of every awkward kind, and
comparisons.

A case is one PTQ config with the shapes and dtypes that its deployed layer takes. `layer` makes an nn.Linear for it,
`prepared` and `converted` are what aoquant makes of a copy, `torchao_converted` is what torchao makes of the same
weight by itself.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8.inference import Float8MMConfig
from torchao.prototype.mx_formats import (
    MXDynamicActivationMXWeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    NVFP4WeightOnlyConfig,
)
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.parq.quant.config_torchao import StretchedIntxWeightConfig
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    quant_api,
)
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.quant_primitives import MappingType
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows import Int4ChooseQParamsAlgorithm, IntxChooseQParamsAlgorithm

from aoquant import (
    FP8WeightConfig,
    GridFlipFP4WeightConfig,
    Hadamard,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    PackedWeightConfig,
    QATConfig,
    ops,
    quantize_,
)
from aoquant.linear.prepared import QATLinear
from aoquant.linear.recipe import LinearRecipe

from .torchao_oracle import cuda_division

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ALL = (BF16, F16, F32)


def dtype_name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", F16: "f16", F32: "f32"}[dtype]


@dataclass(frozen=True)
class Case:
    """A PTQ config and the layers it is tried on."""

    name: str
    config: Any
    n: int = 24
    k: int = 64
    dtypes: tuple[torch.dtype, ...] = ALL
    gpu_gate: bool = False  # torchao refuses to convert without a GPU, though its kernel runs on a CPU
    variant: bool = False  # of a case that is always run: everything but "mixed" data is slow

    @property
    def recipe(self) -> LinearRecipe:
        return prepared(self, layer(self, self.dtypes[0])).prepared.recipe

    def __repr__(self) -> str:
        return self.name


def _name(prefix: str, *parts: Any) -> str:
    return "-".join([prefix, *(str(p) for p in parts if p != "")])


def _torchao_cases() -> Iterator[Case]:
    sym, asym, noclip = MappingType.SYMMETRIC, MappingType.ASYMMETRIC, MappingType.SYMMETRIC_NO_CLIPPING_ERR
    for bits in range(2, 9):
        dtype = getattr(torch, f"int{bits}")
        for granularity, g in ((PerGroup(32), "g32"), (PerAxis(0), "axis")):
            k = 96 if g == "g32" else 52
            for mapping, m in ((sym, ""), (asym, "asym")):
                config: Any = IntxWeightOnlyConfig(dtype, granularity, mapping)
                yield Case(_name(f"ao.intx{bits}", g, m), config, 5, k)
            config = Int8DynamicActivationIntxWeightConfig(dtype, granularity)
            yield Case(_name(f"ao.int8act-intx{bits}", g), config, 5, k)
    config = Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32), asym)
    yield Case("ao.int8act-intx4-g32-asym", config, 5, 96)
    yield from _intx_options(asym, noclip)
    hqq = IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY
    for granularity, g in ((PerGroup(32), "g32"), (PerAxis(0), "axis")):
        config = IntxWeightOnlyConfig(torch.int4, granularity, intx_choose_qparams_algorithm=hqq)
        yield Case(f"ao.intx4-{g}-hqq", config, 5, 96)
    for algorithm, name in ((Int4ChooseQParamsAlgorithm.TINYGEMM, ""), (Int4ChooseQParamsAlgorithm.HQQ, "hqq")):
        config = PrototypeInt4WeightOnlyConfig(32, algorithm, set_inductor_config=False)
        yield Case(_name("ao.int4-opaque-g32", name), config, 16, 96)
    for granularity, g in ((PerRow(), "row"), (PerTensor(), "tensor"), (PerGroup(32), "g32")):
        k = 96 if g == "g32" else 52
        yield Case(f"ao.int8-{g}", Int8WeightOnlyConfig(granularity=granularity, version=2), 5, k)
    for granularity, g in ((PerRow(), "row"), (PerTensor(), "tensor")):
        for mapping, m in ((sym, ""), (asym, "asym")):
            config = Int8DynamicActivationInt8WeightConfig(granularity=granularity, act_mapping_type=mapping, version=2)
            yield Case(_name("ao.int8act-int8", g, m), config, 5, 52)
    for granularity, g in ((PerRow(), "row"), (PerTensor(), "tensor")):
        yield Case(f"ao.fp8-{g}", Float8WeightOnlyConfig(granularity=granularity), 5, 52)
        config = Float8DynamicActivationFloat8WeightConfig(
            granularity=granularity, kernel_preference=KernelPreference.TORCH
        )
        dtypes = (BF16,) if g == "row" else ALL
        yield Case(f"ao.fp8act-fp8-{g}", config, 32, 48, dtypes, gpu_gate=True)
    for dtype, element in (
        (torch.float4_e2m1fn_x2, "mxfp4"),
        (torch.float8_e4m3fn, "mxfp8"),
        (torch.float8_e5m2, "mxfp8-e5m2"),
    ):
        for rule in ScaleCalculationMode:
            config = MXDynamicActivationMXWeightConfig(
                weight_dtype=dtype,
                activation_dtype=dtype,
                kernel_preference=KernelPreference.EMULATED,
                scaling_mode=rule,
            )
            if element != "mxfp8-e5m2" or rule == ScaleCalculationMode.RCEIL:
                yield Case(f"ao.{element}-{rule.value.lower()}", config, 5, 96, (BF16,))
    for dynamic, name in ((True, "dynamic"), (False, "none")):
        config = NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=dynamic)
        yield Case(f"ao.nvfp4-weight-{name}", config, 32, 48, (BF16, F32))


def _intx_options(asym: MappingType, noclip: MappingType) -> Iterator[Case]:
    """One bit, no clipping, scale dtypes and stretched grids."""
    yield Case("ao.intx1-g32-asym", IntxWeightOnlyConfig(torch.int1, PerGroup(32), asym), 5, 96, variant=True)
    for bits, dtypes in ((2, (BF16,)), (4, ALL), (8, (F32,))):
        config: Any = IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), PerGroup(32), noclip)
        yield Case(f"ao.intx{bits}-g32-noclip", config, 5, 96, dtypes, variant=True)
    for dtype, dtypes in ((BF16, (BF16, F32)), (F16, (BF16,)), (F32, (BF16, F16))):
        config = IntxWeightOnlyConfig(torch.int4, PerGroup(32), asym, scale_dtype=dtype)
        yield Case(f"ao.intx4-g32-asym-s{dtype_name(dtype)}", config, 5, 96, dtypes, variant=True)
    config = Int8DynamicActivationIntxWeightConfig(torch.int4, PerAxis(0), noclip, weight_scale_dtype=F32)
    yield Case("ao.int8act-intx4-axis-noclip-sf32", config, 5, 52, (BF16,), variant=True)
    for bits, dtypes in ((1, (BF16,)), (2, ALL), (4, (F16,)), (7, (BF16,))):
        limit = 2.0 ** (bits - 1) - 0.5
        granularity, g = (PerAxis(0), "axis") if bits == 4 else (PerGroup(32), "g32")
        config = StretchedIntxWeightConfig(granularity, b=bits, quant_min=-limit, quant_max=limit)
        yield Case(f"ao.int8act-stretched{bits}-{g}", config, 5, 96, dtypes, variant=True)
    config = StretchedIntxWeightConfig(b=3, quant_min=-3.5, quant_max=3.5, activation_quantization=None)
    yield Case("ao.stretched3-axis", config, 5, 96, (BF16, F32), variant=True)


def _eight_bit_options() -> Iterator[Case]:
    """Reduced range, mixed granularities, groups, and bounds of the activations' absmax."""
    for mapping, m, dtypes in ((MappingType.SYMMETRIC, "", (BF16,)), (MappingType.ASYMMETRIC, "asym", (BF16, F32))):
        config: Any = Int8DynamicActivationInt8WeightConfig(mapping, reduce_range=True)
        yield Case(_name("ao.int8act-int8-row", m, "reduced"), config, 5, 52, dtypes, variant=True)
    for pair, g in (([PerTensor(), PerRow()], "tensor-row"), ([PerRow(), PerTensor()], "row-tensor")):
        config = Int8DynamicActivationInt8WeightConfig(granularity=pair)
        yield Case(f"ao.int8act-int8-{g}", config, 5, 52, (BF16,), variant=True)
    config = Float8WeightOnlyConfig(granularity=PerGroup(32))
    yield Case("ao.fp8-g32", config, 5, 96, variant=True)
    config = Float8WeightOnlyConfig(torch.float8_e5m2, granularity=PerGroup(32))
    yield Case("ao.fp8-e5m2-g32", config, 5, 96, (BF16,), variant=True)
    for low, high, granularity, g in (
        (0.5, None, PerRow(), "row-lb"),
        (None, 2.0, PerRow(), "row-ub"),
        (1e-12, 2.0, PerTensor(), "tensor-lb-ub"),
    ):
        config = Float8DynamicActivationFloat8WeightConfig(
            granularity=granularity,
            mm_config=Float8MMConfig(pad_inner_dim=True),
            activation_value_lb=low,
            activation_value_ub=high,
            kernel_preference=KernelPreference.TORCH,
        )
        yield Case(f"ao.fp8act-fp8-{g}", config, 32, 48, (BF16,), gpu_gate=True, variant=True)


def _aoquant_cases() -> Iterator[Case]:
    for group in (32, 64):
        yield Case(f"int4-g{group}", Int4WeightConfig(group), 5, 192)
    yield Case("int4-g48", Int4WeightConfig(48), 5, 96)
    yield Case("int4-int8act", Int4WeightConfig(32, activation="int8-row"), 5, 96)
    yield Case("int4-fp8act", Int4WeightConfig(32, activation="fp8-row"), 5, 96)
    for bits in range(2, 9):
        yield Case(f"intx{bits}-g32", IntxWeightConfig(bits, 32), 5, 96)
        yield Case(f"intx{bits}-row", IntxWeightConfig(bits, None), 5, 53)
    yield Case("intx4-int8act", IntxWeightConfig(4, 32, activation="intx8-row-asym"), 5, 96)
    yield Case("intx1-g32-asym", IntxWeightConfig(1, 32, mapping="asymmetric"), 5, 96, (BF16,), variant=True)
    yield Case("intx4-row-asym", IntxWeightConfig(4, None, mapping="asymmetric"), 5, 53, (BF16, F32), variant=True)
    yield Case("intx3-g32-noclip", IntxWeightConfig(3, 32, mapping="noclip"), 5, 96, (F16,), variant=True)
    config: Any = PackedWeightConfig("stretched2-g32", "intx8-row-asym")
    yield Case("stretched2-g32-int8act", config, 5, 96, (BF16, F32), variant=True)
    yield Case("fp8-block", FP8WeightConfig(granularity="block", activation=None), 24, 128, (BF16, F32), variant=True)
    yield Case("fp8-block-act", FP8WeightConfig(granularity="block"), 24, 256, variant=True)
    config = FP8WeightConfig(granularity="block", activation="fp8-row")
    yield Case("fp8-block-rowact", config, 24, 128, (BF16,), variant=True)
    yield Case("fp8-1x32-act", PackedWeightConfig("fp8-1x32", "fp8-1x32"), 5, 96, variant=True)
    for activation, dtypes in (("int8-row-asym", ALL), ("fp8-row", (BF16,)), ("mxfp4", (F32,)), ("nvfp4", (BF16,))):
        config = PackedWeightConfig("high-precision", activation)
        yield Case(f"high-{activation}-act", config, 5, 96, dtypes, variant=True)
    yield Case("mxfp8-mxfp4act", MXFP8WeightConfig(activation="mxfp4"), 5, 96, (BF16,), variant=True)
    for granularity in ("row", "tensor"):
        yield Case(f"int8-{granularity}", Int8WeightConfig(granularity), 5, 53)
        activation = f"int8-{granularity}"
        yield Case(f"int8-{granularity}-act", Int8WeightConfig(granularity, activation=activation), 5, 53)
        for element in ("e4m3", "e5m2"):
            fp8 = "fp8" if element == "e4m3" else "fp8-e5m2"
            yield Case(f"{fp8}-{granularity}", FP8WeightConfig(element, granularity, activation=None), 5, 53)
            config = FP8WeightConfig(element, granularity, activation=f"{fp8}-{granularity}")
            yield Case(f"{fp8}-{granularity}-act", config, 5, 53)
    yield Case("int8-row-asymact", Int8WeightConfig(activation="int8-row-asym"), 5, 53)
    for rule in ("rceil", "floor", "ceil", "even"):
        yield Case(f"mxfp4-{rule}", MXFP4WeightConfig(rule, activation=None), 5, 96)
        yield Case(f"mxfp8-{rule}", MXFP8WeightConfig("e4m3", rule, activation=None), 5, 96)
    yield Case("mxfp4-act", MXFP4WeightConfig(), 5, 96)
    yield Case("mxfp4-mxfp8act", MXFP4WeightConfig(activation="mxfp8"), 5, 96)
    yield Case("mxfp8-act", MXFP8WeightConfig(), 5, 96)
    yield Case("mxfp8-e5m2-act", MXFP8WeightConfig("e5m2", activation="mxfp8-e5m2"), 5, 96)
    for outer, pts in (("dynamic", None), ("none", None), ("static", 0.001)):
        yield Case(f"nvfp4-{outer}", NVFP4WeightConfig(outer, pts, activation=None), 5, 48)
    yield Case("nvfp4-act", NVFP4WeightConfig(), 5, 48)
    yield Case("nvfp4-none-act", NVFP4WeightConfig("none", activation="nvfp4-none"), 5, 48)
    yield Case("nvfp4-static-act", NVFP4WeightConfig("static", 0.001, activation="nvfp4-static:0.01"), 5, 48)
    four = NVFP4WeightConfig(rule="four_over_six", activation=None)
    yield Case("fouroversix", four, 5, 48)
    yield Case("fouroversix-tiles", replace(four, metric="absmax", tile=16), 21, 48)
    yield Case("fouroversix-act", replace(four, activation="fouroversix"), 5, 48)
    for effort in ("base", "sided", "search"):
        yield Case(f"gridflip-{effort}", GridFlipFP4WeightConfig(effort, activation=None), 5, 48)
    yield Case("gridflip-act", GridFlipFP4WeightConfig(), 5, 48)
    yield Case("gridflip-options-act", GridFlipFP4WeightConfig("base", 0.2, True, "fouroversix", 16), 21, 64)
    yield Case("nvfp4-fp8act", NVFP4WeightConfig(activation="fp8-row"), 5, 48)
    yield Case("nvfp4-h16", NVFP4WeightConfig(transform=Hadamard(16)), 5, 64)
    yield Case("nvfp4-h64-signs", NVFP4WeightConfig(transform=Hadamard(64, 0x9E3779B97F4A7C15)), 5, 192)
    yield Case("nvfp4-h16-weight", NVFP4WeightConfig(activation=None, transform=Hadamard(16)), 5, 64)
    yield Case("mxfp4-h32", MXFP4WeightConfig(transform=Hadamard(32)), 5, 96)
    yield Case("mxfp8-h16", MXFP8WeightConfig(transform=Hadamard(16)), 5, 96, (BF16,), variant=True)
    config = PackedWeightConfig("hadamard32+int4-g64", "int8-row-asym")
    yield Case("int4-h32-int8act", config, 5, 192, (BF16, F32), variant=True)
    yield Case("mxfp4-h128", MXFP4WeightConfig(transform=Hadamard(128, (1 << 127) | 0xBEEF)), 24, 256, variant=True)
    yield Case("fp8-h64", PackedWeightConfig("hadamard64+fp8-row", "fp8-row"), 24, 256, variant=True)
    for rule, numerics in (("quest", "ao"), ("absmax", "xx"), ("absmax", "qutlass")):
        yield Case(f"mxfp4-{rule}-{numerics}", MXFP4WeightConfig(rule, numerics=numerics), 5, 96, variant=True)
    yield Case("nvfp4-search", NVFP4WeightConfig(rule="search"), 5, 48, variant=True)
    for numerics in ("te", "xx", "qutlass"):
        yield Case(f"nvfp4-{numerics}", NVFP4WeightConfig(numerics=numerics), 5, 48, variant=True)
    yield Case("nvfp4-xx-static", NVFP4WeightConfig("static", numerics="xx"), 5, 48, variant=True)
    yield Case("nvfp4-te-16x16", NVFP4WeightConfig(numerics="te", tile=16), 21, 48, variant=True)


TORCHAO_CASES = (*_torchao_cases(), *_eight_bit_options())
AOQUANT_CASES = tuple(_aoquant_cases())
# Their deployed kernels need a GPU; the tests run torchao's layer over a kernel written from the specification.
INT4 = Case("ao.int4-g64", Int4WeightOnlyConfig(group_size=64), 24, 128, (BF16,))
NVFP4 = Case("ao.nvfp4", NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False), 32, 48, (BF16, F32))
NVFP4_NONE = Case(
    "ao.nvfp4-none",
    NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False, use_dynamic_per_tensor_scale=False),
    32,
    48,
    (BF16, F32),
)
FP8_BLOCKS = Case(
    "ao.fp8act-fp8-block",
    Float8DynamicActivationFloat8WeightConfig(granularity=[PerBlock([1, 128]), PerBlock([128, 128])]),
    128,
    256,
    (BF16,),
    gpu_gate=True,
)
BY_NAME = {c.name: c for c in (*TORCHAO_CASES, *AOQUANT_CASES, INT4, NVFP4, NVFP4_NONE, FP8_BLOCKS)}


def with_dtypes(cases: tuple[Case, ...]) -> list[Any]:
    """(case, dtype) parameters with readable ids. Dtypes after the first are slow, and cases that are like another."""
    return [
        pytest.param(
            c,
            d,
            id=f"{c.name}-{dtype_name(d)}",
            marks=[pytest.mark.slow] if d != c.dtypes[0] or like_another(c) else [],
        )
        for c in cases
        for d in c.dtypes
    ]


KINDS = ("normal", "outlier", "zero", "constant", "onehot", "mixed")
_LIKE_ANOTHER = re.compile(
    r"intx[3567]|mxfp\d-(floor|ceil|even)|e5m2|hqq"
)  # widths and rules whose neighbours are always run
_WIDE_SCALE = re.compile(r"tensor|nvfp4|gridflip|fouroversix")  # of a tensor, or of tiles


def with_kinds(cases: tuple[Case, ...], kinds: tuple[str, ...] = KINDS) -> list[Any]:
    """(case, dtype, kind of data) parameters. "mixed" holds the other kinds row by row, and its product every pair of
    them: it is run in the first dtype and in float32, of a case that is like another in the first alone. The other
    kinds are run in the first dtype, where a row among others cannot show them: "zero", which makes scales of a whole
    tensor zero, and every kind where a scale is of more than a row. What is not run here is slow.
    """
    return [
        pytest.param(
            c,
            d,
            kind,
            id=f"{c.name}-{dtype_name(d)}-{kind}",
            marks=[pytest.mark.slow] if kind not in _always(c, d) else [],
        )
        for c in cases
        for d in c.dtypes
        for kind in kinds
    ]


def like_another(case: Case) -> bool:
    return case.variant or bool(_LIKE_ANOTHER.search(case.name))


def _always(case: Case, dtype: torch.dtype) -> tuple[str, ...]:
    """The kinds that are run in every commit's tests."""
    if like_another(case):
        return ("mixed",) if dtype == case.dtypes[0] else ()
    if dtype != case.dtypes[0]:
        return ("mixed",) if dtype == F32 else ()
    return KINDS if _WIDE_SCALE.search(case.name) else ("zero", "mixed")


def data(kind: str, rows: int, k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """(rows, k): one awkward kind of number everywhere, or every kind in turn ("mixed")."""
    g = torch.Generator().manual_seed(seed)
    if kind == "mixed":
        return (
            torch.cat([data(KINDS[r % 5], 1, k, dtype, seed + r) for r in range(rows)]) if rows else torch.empty(0, k)
        )
    x = torch.randn(rows, k, generator=g)
    if kind == "outlier":  # the largest e4m3 value beside what every format rounds to zero
        x = torch.where(torch.arange(k) % 16 == 3, 448.0, 1e-8) * x.sign()
    elif kind == "zero":
        x = torch.zeros(rows, k)
    elif kind == "constant":
        x = torch.full((rows, k), -0.3)
    elif kind == "onehot":
        x = torch.where(torch.arange(k) == torch.arange(rows).unsqueeze(1) % k, x, 0.0)
    return x.to(dtype)


def inputs(kind: str, k: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs of width k by the name of their shape."""
    scale = 1 / 64 if dtype == F16 and kind in ("outlier", "mixed") else 1.0  # 448 * 448 is no float16
    return shaped(data(kind, 6, k, dtype, 1) * scale, data(kind, 6, 2 * k, dtype, 2) * scale)


def shaped(rows: Tensor, wide: Tensor) -> dict[str, Tensor]:
    """Views of rows (6, k), or of wide (6, 2 k), by the name of their shape or strides."""
    k = rows.shape[1]
    return {
        "1d": rows[0],
        "1row": rows[:1],
        "2d": rows,
        "3d": rows.view(2, 3, k),
        "4d": rows.view(1, 3, 2, k),
        "empty": rows[:0],
        "empty3d": rows[:0].view(2, 0, k),
        "transposed": rows.t().contiguous().t(),
        "strided": wide[:, ::2],
        "sliced": wide[:, 1 : k + 1],
        "sliced3d": wide.view(2, 3, 2 * k)[..., 1 : k + 1],
        "permuted": rows.view(2, 3, k).transpose(0, 1),
        "expanded": rows[:1].expand(4, k),
    }


def layer(
    case: Case, dtype: torch.dtype, *, bias: bool = True, kind: str = "normal", n: int = 0, k: int = 0
) -> nn.Linear:
    """An nn.Linear of `case`'s shape with weights of one kind."""
    n, k = n or case.n, k or case.k
    linear = nn.Linear(k, n, bias=bias, dtype=dtype)
    with torch.no_grad():
        linear.weight.copy_(data(kind, n, k, dtype))
        if bias:
            linear.bias.copy_(data("normal", 1, n, dtype, 7)[0])
    return linear


def prepared(case: Case, linear: nn.Linear, **options: Any) -> QATLinear:
    """A prepared copy of `linear`."""
    model = nn.ModuleDict({"linear": copy.deepcopy(linear)})
    quantize_(model, QATConfig(case.config, **options))
    qat = model["linear"]
    assert isinstance(qat, QATLinear)
    return qat


def converted(case: Case, linear: nn.Linear) -> nn.Linear:
    """A converted copy of the prepared `linear`."""
    assert isinstance(linear, QATLinear)
    model = nn.ModuleDict({"linear": copy.deepcopy(linear)})
    quantize_(model, QATConfig(case.config, step="convert"))
    assert isinstance(model["linear"], nn.Linear) and not isinstance(model["linear"], QATLinear)
    return model["linear"]


def torchao_converted(case: Case, linear: nn.Linear, *, cuda: bool = False) -> nn.Linear:
    """What torchao's own quantize_ makes of a copy of `linear`; cuda: with the divisions of PyTorch's CUDA kernels."""
    model = nn.ModuleDict({"linear": copy.deepcopy(linear)})
    with ExitStack() as stack:
        if case.gpu_gate:
            stack.enter_context(mock.patch.object(quant_api, "is_sm_at_least_89", return_value=True))
            stack.enter_context(mock.patch.object(quant_api, "_check_hardware_support"))
        if cuda:
            stack.enter_context(cuda_division())
        torchao_quantize_(model, case.config, filter_fn=lambda m, _: isinstance(m, nn.Linear))
    return model["linear"]


def assert_equal(got: Tensor, want: Tensor, what: str = "") -> None:
    """torch.equal with the same dtype; NaN never equals."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype} and {want.dtype}"
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} and {tuple(want.shape)}"
    if not torch.equal(got, want):
        off = (got != want) | got.isnan() | want.isnan()
        error = (got.double() - want.double()).abs().nan_to_num(float("inf")).max()
        raise AssertionError(f"{what}: {int(off.sum())} of {off.numel()} elements differ, by up to {error:.3g}")


@contextmanager
def counting(*names: str) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Calls of aoquant's ops inside the block: name -> the op's arguments by their names."""
    calls: dict[str, list[dict[str, Any]]] = {n: [] for n in names}

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            namespace, _, name = func._schema.name.partition("::")
            if namespace == "aoquant" and name in calls:
                arguments = getattr(ops, name).arguments
                calls[name].append(vars(arguments.named(arguments.read(*args))))
            return func(*args, **(kwargs or {}))

    with Mode():
        yield calls


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
