"""csrc/cpu's kernels: their numbers are the formats', their sums have one order, which is written out here in plain
PyTorch, and prepared and packed layers have the same bits through them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.bits import compare, same
from support.cpu_library import cpu_builder, with_library
from support.gemm import with_values
from torch import Tensor, nn

import aoquant
from aoquant import QATConfig, get_format, quantize_
from aoquant.formats import Encoded, Format
from aoquant.formats.elements import fma
from aoquant.ops import Request, codec, explain, native_cpu, router
from aoquant.ops.gemm import cpu
from aoquant.recipes import get_recipe

BF16, F32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")
FORMATS = ("int4-g128", "int4-g32", "intx4-g32", "intx4-g64-asym", "intx4-g32-noclip", "int8-row", "int8-tensor")
RECIPES = ("int4-g128", "int8-int4", "int8", "int8-weight")


@pytest.fixture(autouse=True, scope="module")
def library() -> Iterator[Path]:
    yield from with_library()


def product(f: Format, w: Encoded, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return cpu._product(f, w, x.dtype)(x, None, bias)


def ordered(f: Format, w: Encoded, x: Tensor, bias: Tensor | None) -> Tensor:
    """y (M, N): 32 lanes, each a chain of fused multiply-adds in K's order, added in a tree."""
    w_NC32, x_MC32 = (t.float().unflatten(1, (-1, 32)) for t in (f.operand(w, x.dtype), x))
    if f.bits == 4:  # even k's, then odd ones
        w_NC32, x_MC32 = (t.unflatten(2, (16, 2)).transpose(2, 3).flatten(2) for t in (w_NC32, x_MC32))
    lanes = torch.zeros(len(x), len(w_NC32), 32)
    for c in range(w_NC32.shape[1]):
        lanes = fma(x_MC32[:, None, c].expand_as(lanes), w_NC32[None, :, c].expand_as(lanes), lanes)
    sums = lanes[..., :16] + lanes[..., 16:]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    y, alpha = sums.squeeze(-1), f.alpha(w)
    y = y if alpha is None else y * alpha.t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", FORMATS)
def test_sums_have_one_order_for_every_number_of_rows(name: str, dtype: torch.dtype) -> None:
    """K of 20 or 5 groups, N that fills no tile; 15 rows meet every tile of rows."""
    f, k = get_format(name), 640
    w = f.encode(torch.randn(37, k, dtype=dtype) * torch.logspace(-3, 3, 37).unsqueeze(1).to(dtype))
    x, bias = torch.randn(15, k, dtype=dtype), torch.randn(37, dtype=dtype)
    want = ordered(f, w, x, bias)
    assert torch.equal(product(f, w, x, bias), want)
    for rows in (1, 2, 3, 4, 7, 8):
        assert torch.equal(product(f, w, x[:rows], bias), want[:rows])
    assert torch.equal(product(f, w, x[3:4], bias), want[3:4])
    assert torch.equal(product(f, w, x, bias.double()), product(f, w, x, bias.float()))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", FORMATS)
def test_values_are_the_formats(name: str, dtype: torch.dtype) -> None:
    """Every code under every kind of scale: zeros that a sum in float32 loses, midpoints, NaN, Inf, subnormals."""
    f = get_format(name)
    w = f.encode(torch.randn(64, 640, dtype=dtype))
    if w.scale is not None and f.bits == 4:
        spread = torch.logspace(-38, 38, w.scale.numel(), dtype=torch.float64).view_as(w.scale)
        scale = (spread * torch.rand(w.scale.shape)).to(dtype)
        scale.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), 0.0, 1.0]).to(dtype)
        zero = w.zero
        if zero is not None and zero.is_floating_point():
            zero = (spread[torch.randperm(64)] * torch.randn(w.scale.shape)).to(dtype)
            zero[:, 0] = (scale[:, 0].double() * 2.0 ** -torch.arange(10, 26).repeat(4)).to(dtype)  # near midpoints
            zero.view(-1)[4:7] = torch.tensor([float("nan"), -float("inf"), 0.0]).to(dtype)
        w = w._replace(scale=scale, zero=zero)
    found = codec.decode(f, w, dtype, operand=True)
    assert same(found, f.operand(w, dtype))
    for out in (F32, BF16):
        assert same(codec.decode(f, w, dtype, operand=True, out=out), f.operand(w, dtype).to(out))
    assert same(codec.decode(f, w, dtype), f.decode(w, dtype))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("name", ["int8-row", "int8-row-asym", "int4-g128", "int4-g32"])
def test_matrices_are_encoded_as_the_format_does(name: str, dtype: torch.dtype) -> None:
    """Codes alone, and with values: the operand in passing, and decoded values beside the codes."""
    f, k = get_format(name), 203 if name.startswith("int8") else 256
    x = torch.randn(300, k, dtype=dtype) * torch.logspace(-44, 38, 300, dtype=torch.float64).unsqueeze(1).to(dtype)
    x[0], x[1, 7], x[2, 9], x[3, 3] = 0, float("nan"), float("inf"), -float("inf")
    x[4:50], x[50:100], x[100] = x[4:50].abs(), -x[50:100].abs(), 3.5
    x[101, ::2], x[102] = 1.0, torch.arange(k) % 31 / 2  # halves of a step
    want = f.encode(x)
    for given in (x, x.t().contiguous().t()):
        compare(codec.encode(f, given), want)
    made, kept = with_values(f, x, dtype, operand=True), with_values(f, x, dtype, keep=True)
    other = F32 if dtype == BF16 else BF16
    assert same(with_values(f, x, other, operand=True).values, f.operand(want, other))
    assert made.encoded is None and same(made.values, f.operand(want, dtype)) and same(made.alpha, f.alpha(want))
    assert kept.encoded is not None and same(kept.values, f.decode(want, dtype))
    compare(kept.encoded, want)


@pytest.mark.parametrize("rows", [1, 4, 7, 8, 40])
@pytest.mark.parametrize("k", [96, 4096])
def test_integer_sums_are_exact(k: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Extreme codes: sums that float32 cannot hold, which are rounded once."""
    f, x_codes = get_format("int8-row"), torch.randint(-128, 128, (rows, k), dtype=torch.int8)
    w = f.encode(torch.randn(37, k))
    w.codes[:5], x_codes[0] = -128, -128
    w.codes[5:9, ::2] = 127
    alpha, bias = torch.rand(rows, 1), torch.randn(37)
    exact = (x_codes.double() @ w.codes.double().t()).float()
    assert w.scale is not None
    want = (exact * alpha * w.scale.t() + bias).to(BF16)
    assert torch.equal(cpu._integer_product(f, w, BF16)(x_codes, alpha, bias), want)
    call = native_cpu.operator("integer_mm")
    assert torch.equal(call(x_codes, w.codes, alpha, w.scale, bias, True), want)
    assert torch.equal(cpu._torch_product(f, w, BF16)(x_codes, alpha, bias), want)
    monkeypatch.setattr(native_cpu, "torch_multiplies_integers", lambda: False)
    assert torch.equal(cpu._torch_product(f, w, BF16)(x_codes, alpha, bias), want)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_prepared_equals_packed(name: str, bias: bool) -> None:
    """Eager and compiled, few rows and many; against plain PyTorch within the sums' order."""
    torch.manual_seed(0)
    prepared = nn.Sequential(nn.Linear(256, 72, bias=bias, dtype=BF16)).eval()
    quantize_(prepared, QATConfig(get_recipe(name).make()))
    inputs = [torch.randn(*lead, 256, dtype=BF16) for lead in ((1,), (2, 3), (8,), (64,), (65,), (2, 70))]
    with torch.no_grad():
        want = [prepared(x) for x in inputs]
        with aoquant.backend("reference"):
            plain = [prepared(x) for x in inputs]
        packed = prepared
        quantize_(packed, QATConfig(get_recipe(name).make(), step="convert"))
        compiled = torch.compile(packed, backend="aot_eager")
        for x, y, reference in zip(inputs, want, plain, strict=True):
            assert torch.equal(packed(x), y) and torch.equal(compiled(x), y)
            assert (y.float() - reference.float()).abs().max() <= reference.float().abs().max() * 2**-7
            x_grad = x.clone().requires_grad_()
            with torch.enable_grad():
                assert torch.equal(packed(x_grad), y)


def kernels(name: str) -> list[tuple[str | None, int]]:
    """(backend, the last M that it takes; 0: all above) of a packed layer. Ranges that differ in the reasons of other
    backends alone are one.
    """
    layer = nn.Sequential(nn.Linear(256, 64, dtype=BF16))
    quantize_(layer, get_recipe(name).make())
    routes = aoquant.explain(layer[0]).routes
    assert all(r.backend == "cpu" for r in routes if r.step != "multiply")
    last = {r.backend: r.last or 0 for r in routes if r.step == "multiply"}
    return list(last.items())


def test_explain_names_the_kernels_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("int4-g128", "int8-int4", "int8-weight"):
        assert kernels(name) == [("cpu-decode", 64), ("cpu-blocks", 0)]
    for quick, found in ((False, [("cpu-integers", 0)]), (True, [("cpu-integers", 7), ("torch-integers", 0)])):
        monkeypatch.setattr(native_cpu, "torch_multiplies_integers", lambda quick=quick: quick)
        router._routes.clear()
        assert kernels("int8") == found
    router._routes.clear()


def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(backend: str, w: str, x: str | None = None, dtype: torch.dtype = BF16, k: int = 256, **more: object) -> str:
        contract = str(more.get("contract", "aoquant"))
        scales = more.get("scales", dtype)
        assert scales is None or isinstance(scales, torch.dtype)
        x_format = None if x is None else get_format(x)
        m = more.get("m", 1)
        assert isinstance(m, int)
        return dict(explain(Request(contract, x_format, get_format(w), CPU, dtype, m, 64, k, scales)))[backend]

    assert why("cpu-decode", "int4-g128") == "runs" and why("cpu-integers", "int8-row", "int8-row") == "runs"
    assert "int8 by int8" in why("cpu-integers", "int8-row") and "int8 by int8" in why(
        "cpu-integers", "int8-row", "int8-row-asym"
    )
    assert "float16" in why("cpu-decode", "int8-row", dtype=torch.float16)
    assert "K = 250" in why("cpu-decode", "int8-row", k=250) and "groups of 16" in why("cpu-decode", "intx4-g16")
    assert "nvfp4" in why("cpu-decode", "nvfp4") and "int4-e4m3" in why("cpu-decode", "int4-e4m3-g128")
    assert "in one type" in why("cpu-decode", "int4-g128", scales=F32)
    assert "bias_after" in why("cpu-decode", "int4-g128", contract="bias_after")
    assert "65536" in why("cpu-integers", "int8-row", "int8-row", k=1 << 17)
    assert "up to 64 rows of x" in why("cpu-decode", "int4-g128", m=65)
    assert why("cpu-integers", "int8-row", "int8-row", k=250).endswith("got K = 250")
    for quick, said in (
        (True, "slower than cpu-integers below 8 rows"),
        (False, "slower than cpu-integers on this CPU"),
    ):
        monkeypatch.setattr(native_cpu, "torch_multiplies_integers", lambda quick=quick: quick)
        assert said in why("torch-integers", "int8-row", "int8-row")
    monkeypatch.setattr(native_cpu, "LIBRARY", Path("absent.so"))
    assert "installed without its CPU library" in why("cpu-decode", "int4-g128")
    assert "installed without its CPU library" in why("cpu-integers", "int8-row", "int8-row")
    assert why("torch-integers", "int8-row", "int8-row") == "runs"


def test_scales_in_another_type_than_the_input_are_decoded_by_the_format() -> None:
    """A float32 model, packed, then cast: its scales stay float32."""
    layer = nn.Sequential(nn.Linear(256, 64))
    quantize_(layer, get_recipe("int8-int4").make())
    layer.bfloat16()
    x = torch.randn(3, 256, dtype=BF16)
    with torch.no_grad():
        with aoquant.backend("reference"):
            want = layer(x)
        assert (layer(x).float() - want.float()).abs().max() <= want.float().abs().max() * 2**-7


def test_codes_written_in_place_are_seen() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 64, dtype=BF16)) for _ in range(2)]
    for layer in layers:
        quantize_(layer, get_recipe("int4-g128").make())
    x = torch.randn(2, 256, dtype=BF16)
    with torch.no_grad():
        before = layers[0](x)
        layers[0].load_state_dict(layers[1].state_dict())
        assert torch.equal(layers[0](x), layers[1](x)) and not torch.equal(layers[0](x), before)


@pytest.mark.parametrize("name", ["int4-g128", "int8"])
def test_two_threads_generate_the_tokens_of_one(name: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_key_value_heads=1, **shape)).bfloat16().eval()
    quantize_(model, get_recipe(name).make())
    prompts = [torch.randint(1, 96, (1, n)) for n in (3, 9)]

    def made(which: int) -> list[list[int]]:
        ids = prompts[which]
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "min_new_tokens": 8, "pad_token_id": 0}
        return [model.generate(ids, max_new_tokens=8, **options).tolist() for _ in range(3)]

    want, found = [made(0), made(1)], {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: made(i)})) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == want


_AT_A_LEVEL = """
import sys, torch
torch.ops.load_library(sys.argv[1])
given, o = torch.load(sys.argv[2]), torch.ops.aoquant_cpu
assert o.level() == 1, o.level()
made = [o.decode_mm(x, *w) for x, *w in given["multiplied"]] + [o.decode(*w) for w in given["decoded"]]
made += [t for x in given["encoded"] for t in o.encode_int8_rows(x, True, True) + o.encode_int4(x, 64)]
made += [o.integer_mm(*p) for p in given["integers"]]
torch.save(made, sys.argv[3])
"""


@pytest.mark.parametrize("lower", ["AVX2", pytest.param("portable", marks=pytest.mark.slow)])
def test_every_level_of_instructions_has_the_same_bits(
    library: Path, lower: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels without AVX-512, in a process whose PyTorch does without it too; and those for a CPU that is no
    x86, compiled for this one.
    """
    if lower == "portable":
        monkeypatch.setattr(cpu_builder, "levels", lambda: cpu_builder._X86 | {"baseline": ()})
        library = tmp_path / "_native_cpu.so"
        cpu_builder.build(torch, library, tmp_path / "objects")
    o, given = torch.ops.aoquant_cpu, {"multiplied": [], "decoded": [], "encoded": [], "integers": []}  # type: ignore[var-annotated]
    for dtype in (BF16, F32):
        x = torch.randn(15, 640, dtype=dtype)
        given["encoded"].append(x)
        for name in FORMATS:
            f = get_format(name)
            w = f.encode(torch.randn(37, 640, dtype=dtype))
            told = native_cpu.told(f, w, dtype)
            assert told is not None
            rest = told.kind, told.group
            parts = told.codes, told.scale, told.zero
            given["decoded"].append((*parts, *rest, dtype == BF16))
            given["multiplied"].append((x, *parts, None, f.alpha(w), None, *rest))
    codes = torch.randint(-128, 128, (37, 352), dtype=torch.int8)
    given["integers"].append((codes[:9].contiguous(), codes, None, None, None, False))
    here = [o.decode_mm(x, *w) for x, *w in given["multiplied"]] + [o.decode(*w) for w in given["decoded"]]
    here += [t for x in given["encoded"] for t in o.encode_int8_rows(x, True, True) + o.encode_int4(x, 64)]
    here += [o.integer_mm(*p) for p in given["integers"]]
    torch.save(given, tmp_path / "given")
    subprocess.run(
        [sys.executable, "-c", _AT_A_LEVEL, str(library), str(tmp_path / "given"), str(tmp_path / "made")],
        env=os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}, check=True, timeout=120,
    )  # fmt: skip
    there = torch.load(tmp_path / "made")
    assert len(here) == len(there) and all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_reasons_not_to_build(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "isolated from torch" in (cpu_builder.why_not(None, "g++") or "")
    assert "no C++ compiler" in (cpu_builder.why_not(torch, None) or "")
    assert cpu_builder.why_not(torch, "g++") is None
    monkeypatch.setenv("AOQUANT_BUILD_CSRC", "0")
    assert not cpu_builder.wanted(torch) and "not built (AOQUANT_BUILD_CSRC=0)" in capsys.readouterr().out
