"""torchao's int4 configs: what prepare computes, what convert refuses, and what each kernel's limits are called."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
from fractions import Fraction
from typing import Any
from unittest import mock

import pytest
import torch
from support.rational import rounded
from torch import Tensor, nn
from torchao.prototype.quantization.int4 import Int8DynamicActivationInt4WeightConfig, PrototypeInt4WeightOnlyConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    Float8DynamicActivationInt4WeightConfig,
    Int4WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    PerRow,
    PerTensor,
)
from torchao.quantization.quantize_.common import KernelPreference

from aoquant import QATConfig, backend, quantize_
from aoquant.formats import AffineHQQ
from aoquant.targets import resolve

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def float8(granularity: Any = None, preference: KernelPreference = KernelPreference.MSLK) -> Any:
    return Float8DynamicActivationFloat8WeightConfig(granularity=granularity or PerRow(), kernel_preference=preference)


PRESHUFFLED = Int4WeightOnlyConfig(int4_packing_format="preshuffled")
TILES = Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d")
FP8_PRESHUFFLED = Float8DynamicActivationInt4WeightConfig()
FP8_PLAIN = Float8DynamicActivationInt4WeightConfig(int4_packing_format="plain")
OPAQUE = PrototypeInt4WeightOnlyConfig()
CONFIGS = {
    "preshuffled": (PRESHUFFLED, "int4-bf16-g128", "bias_after"),
    "tile packed": (TILES, "int4-tinygemm-g128", "tinygemm_cuda"),
    "fp8 preshuffled": (FP8_PRESHUFFLED, "int4-e4m3-row-g128", "fp8_bias_after"),
    "fp8 plain": (FP8_PLAIN, "int4-e4m3-g128", "fp8_bias_after"),
    "opaque": (OPAQUE, "int4-tinygemm-cpu-g128", "tinygemm_cpu"),
    "fp8 mslk": (float8(), "fp8-row-mslk", "fp8_mslk"),
}
each = pytest.mark.parametrize("name", CONFIGS)


def model(n: int = 32, k: int = 256, dtype: torch.dtype = BF16) -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"up": nn.Linear(k, n, dtype=dtype)})


@each
def test_recipe_and_gradients(name: str) -> None:
    """Trains on a machine without the kernel: gradients close to the float layer's, bias included; the second backward
    pass is equal.
    """
    config, weight, contract = CONFIGS[name]
    m = model()
    x, g = torch.randn(64, 256).to(BF16), torch.randn(64, 32).to(BF16)
    leaf = x.clone().requires_grad_()
    m["up"](leaf).backward(g)
    want = [m["up"].weight.grad, m["up"].bias.grad, leaf.grad]
    m.zero_grad()
    quantize_(m, QATConfig(config))
    recipe = m["up"].prepared.recipe
    assert (recipe.fprop_weight.name, recipe.contract) == (weight, contract)
    assert recipe.input_name == ("fp8-row-mslk" if "fp8" in name else "")
    leaf = x.clone().requires_grad_()
    m["up"](leaf).backward(g)
    got = [m["up"].weight.grad, m["up"].bias.grad, leaf.grad]
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        assert torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0) > 0.99
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("name", ["preshuffled", "tile packed", "fp8 preshuffled"])
def test_convert_says_what_is_missing_and_leaves_the_model(name: str) -> None:
    m = model()
    quantize_(m, QATConfig(CONFIGS[name][0]))
    before, x = copy.deepcopy(m.state_dict()), torch.randn(4, 256).to(BF16)
    y = m["up"](x)
    with pytest.raises(ValueError, match=r"up \(32, 256\): Int4\w+Tensor .*(GPU|CUDA)"):
        quantize_(m, QATConfig(step="convert"))
    assert torch.equal(m["up"](x), y)
    assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items())


@pytest.mark.parametrize("name", ["fp8 plain", "fp8 mslk"])
def test_plain_layouts_convert_anywhere(name: str) -> None:
    config, *_ = CONFIGS[name]
    m = model()
    quantize_(m, QATConfig(config))
    e = m["up"].prepared.recipe.fprop_weight.encode(m["up"].weight.detach())
    quantize_(m, QATConfig(step="convert"))
    w = m["up"].weight.data
    if name == "fp8 plain":
        assert type(w).__name__ == "Int4Tensor" and w.activation_dtype == torch.float8_e4m3fn
        assert torch.equal(w.qdata.view(torch.uint8), e.codes) and torch.equal(w.scale.t(), e.scale)
        assert w.zero_point.shape == w.scale.shape and not w.zero_point.any()
    else:
        assert w.kernel_preference == w.act_quant_kwargs.kernel_preference == KernelPreference.MSLK
        assert torch.equal(w.qdata.view(torch.uint8), e.codes.view(torch.uint8)) and torch.equal(w.scale, e.scale)


def test_converting_to_another_dialect_or_layout_raises() -> None:
    """fp8 rows in MSLK's dialect are stored in the recipe: PyTorch's dialect, and every other layout, are other
    layers.
    """
    pairs = [
        (float8(), float8(preference=KernelPreference.TORCH)),
        (float8(), float8(preference=KernelPreference.AUTO)),
        (float8(preference=KernelPreference.AUTO), float8()),
        (FP8_PLAIN, FP8_PRESHUFFLED),
        (PRESHUFFLED, Int4WeightOnlyConfig()),
        (TILES, OPAQUE),
    ]
    for prepared, other in pairs:
        m = model()
        quantize_(m, QATConfig(prepared))
        with pytest.raises(ValueError, match=r"up .*was prepared for"):
            quantize_(m, QATConfig(other, step="convert"))


def test_an_mslk_with_another_formula_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    installed, real = "1.1.0", importlib.metadata.version

    def version(package: str) -> str:
        if package == "mslk-cuda":
            return installed
        if package == "torchao":
            return real(package)
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", version)
    quantize_(model(), QATConfig(FP8_PLAIN))
    installed = "1.0.0"
    for config in (FP8_PRESHUFFLED, FP8_PLAIN, float8()):
        with pytest.raises(ValueError, match=r"mslk-cuda 1\.0\.0"):
            quantize_(model(), QATConfig(config))
    quantize_(model(), QATConfig(PRESHUFFLED))  # bf16 activations do not ask it


def int4(group: int = 128, packing: str = "plain", algorithm: str = "tinygemm", **options: Any) -> Any:
    return Int4WeightOnlyConfig(group, int4_packing_format=packing, int4_choose_qparams_algorithm=algorithm, **options)


REFUSALS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain int32": (int4(packing="plain_int32"), {}),
    "da8w4": (Int8DynamicActivationInt4WeightConfig(), {}),
    "plain with HQQ": (int4(algorithm="hqq"), {}),
    "preshuffled, groups of 32": (int4(32, "preshuffled"), {}),
    "preshuffled, one group of 32": (int4(32, "preshuffled"), {"k": 32}),
    "preshuffled, N": (PRESHUFFLED, {"n": 24}),
    "preshuffled, float16": (PRESHUFFLED, {"dtype": F16}),
    "tile packed, groups of 512": (int4(512, "tile_packed_to_4d"), {"k": 512}),
    "tile packed, float32": (TILES, {"dtype": F32}),
    "tile packed HQQ, padded": (int4(64, "tile_packed_to_4d", "hqq"), {}),
    "tile packed, ragged": (TILES, {"k": 320}),
    "fp8 plain, ragged": (FP8_PLAIN, {"k": 320}),
    "fp8 plain, N": (FP8_PLAIN, {"n": 20}),
    "fp8 plain, float16": (FP8_PLAIN, {"dtype": F16}),
    "fp8 preshuffled, N": (FP8_PRESHUFFLED, {"n": 24}),
    "opaque, groups of 256": (PrototypeInt4WeightOnlyConfig(256), {}),
    "opaque, N": (OPAQUE, {"n": 24}),
    "MSLK per tensor": (float8(PerTensor()), {}),
    "MSLK, float32": (float8(), {"dtype": F32}),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_layer(case: str) -> None:
    config, shape = REFUSALS[case]
    m = model(**shape)
    for given in (QATConfig(config), config):
        with pytest.raises(ValueError, match=rf"up \({shape.get('n', 32)}, {shape.get('k', 256)}\)"):
            quantize_(m, given)
    assert type(m["up"]) is nn.Linear


@pytest.mark.parametrize(
    ("name", "dtype"), [("preshuffled", F32), ("fp8 plain", F32), ("fp8 mslk", F16), ("opaque", F32)]
)
def test_activations_that_the_kernel_cannot_take(name: str, dtype: torch.dtype) -> None:
    m = model()
    quantize_(m, QATConfig(CONFIGS[name][0]))
    with pytest.raises(ValueError, match=f"bfloat16.*{dtype}"):
        m["up"](torch.randn(2, 256).to(dtype))


def test_layouts_and_backends_compute_one_product() -> None:
    """The two MSLK layouts of bf16 weights are one function; the opaque contract is one order of additions."""
    x = torch.randn(2, 3, 256).to(BF16)
    outputs = {}
    for name, config in (("shuffled", PRESHUFFLED), ("plain", Int4WeightOnlyConfig()), ("opaque", OPAQUE)):
        m = model()
        quantize_(m, QATConfig(config))
        outputs[name] = m["up"](x)
    assert torch.equal(outputs["shuffled"], outputs["plain"])
    with backend("reference"):
        assert torch.equal(m["up"](x), outputs["opaque"])


def test_tile_packed_takes_any_activation_and_rounds_it_to_bf16() -> None:
    m = model()
    quantize_(m, QATConfig(TILES))
    x = torch.randn(6, 256)
    y = m["up"](x)
    assert y.dtype == F32 and torch.equal(y, m["up"](x.to(BF16)).float())


def test_bias_is_rounded_on_its_own() -> None:
    """rn(rn(acc) + bias), not rn(acc + bias): with a layer without bias, and torch's own addition, as torchao has
    it.
    """
    for name in CONFIGS:
        m = model()
        x = torch.randn(64, 256).to(BF16)
        quantize_(m, QATConfig(CONFIGS[name][0]))
        y, bias = m["up"](x), m["up"].bias
        m["up"].bias = None
        assert torch.equal(y, m["up"](x) + bias), name


def test_mslks_fp8_gemm_fuses_a_float32_bias() -> None:
    """rn(fma(acc * x, w, bias)), read from the kernel with one-hot rows; against rational arithmetic."""
    m = model()
    m["up"].bias = nn.Parameter(torch.randn(32) * 1e-2)
    quantize_(m, QATConfig(float8()))
    recipe = m["up"].prepared.recipe
    x = torch.eye(256, dtype=BF16)[:4] * 0.3
    y = m["up"](x)
    ex, ew = recipe.fprop_input.encode(x), recipe.fprop_weight.encode(m["up"].weight.detach())
    acc, sx, sw = ex.codes.float() @ ew.codes.float().t(), ex.scale.flatten(), ew.scale.flatten()
    for r in range(4):
        for n in range(32):
            product = rounded(Fraction(acc[r, n].item()) * Fraction(sx[r].item()), F32) * Fraction(sw[n].item())
            want = rounded(rounded(product + Fraction(m["up"].bias[n].item()), F32), BF16)
            assert y[r, n].item() == float(want), (r, n)


def test_hqq_is_packed_on_the_device_that_trained() -> None:
    """Its codes follow a device's order of additions, so `device=` moves codes and does not make them anew."""
    layer = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16))
    quantize_(
        layer, QATConfig(IntxWeightOnlyConfig(torch.int4, PerGroup(32), intx_choose_qparams_algorithm="hqq_scale_only"))
    )
    seen = []
    real = AffineHQQ.encode

    def encode(self: AffineHQQ, x: Tensor, held: Any = None) -> Any:
        seen.append(x.device.type)
        return real(self, x, held)

    with mock.patch.object(AffineHQQ, "encode", encode):
        quantize_(layer, QATConfig(step="convert"), device="meta")
    assert set(seen) == {"cpu"}
    assert layer[0].weight.device.type == "meta"


def test_what_is_packed_on_a_gpu_says_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the packers, whose bytes are tested on GPUs: torchao reads the group from the tensor."""
    int4 = importlib.import_module("aoquant.targets.torchao_int4")
    monkeypatch.setattr(int4, "_can", lambda *args: None)
    monkeypatch.setattr(int4, "_shuffled", lambda codes, scale: (codes, scale))
    monkeypatch.setattr(int4.torch_int4, "pack_cuda", lambda format, e, rows: (e.codes, e.scale))
    w = torch.randn(32, 256, dtype=BF16)
    for name in ("preshuffled", "tile packed", "fp8 preshuffled"):
        target = resolve(CONFIGS[name][0])
        made: Any = target.build(target.recipe.fprop_weight.encode(w), w)
        assert type(made).__name__ == target.tensor
        assert list(made.block_size) == [1, 128] and tuple(made.shape) == (32, 256), name
