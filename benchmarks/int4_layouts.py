"""Every int4 layout on a GPU: record what torchao and MSLK really convert to, probe the kernels, compare prepared with
converted.

    python benchmarks/int4_layouts.py [--out DIR]

Needs torch, torchao, safetensors, one Hopper GPU and `mslk-cuda`. Takes a minute or two. Writes
`test/golden/int4/<gpu>.safetensors`, which `test/formats/test_int4_golden.py` checks on every CPU, and
`benchmarks/results/int4_<gpu>.txt`; with `--out`, both go to DIR.

1. bytes: the packed tensors of torchao's own `quantize_` equal ours, and their codes and scales equal our CPU encoding.
2. operands: a kernel times the identity matrix is its operand tile.
3. epilogues: products of one-hot rows, which no order of additions can change, against the candidate formulas.
4. layers: prepared(x) against torchao's layer at several M, by the kernel that deploys and by PyTorch's own GEMMs.

Report lines: OK; DIFF, counted, no failure; FAIL, an exception or other bytes than promised, which makes the exit
code 1.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchao.quantization as ao
from record_golden import ROOT, Outcome, Report, verdict, versions

from support.golden_inputs import golden_input, normal, weights  # isort: skip  # record_golden puts it on the path
from torch import Tensor, nn
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.quantize_.common import KernelPreference
from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm, IntxUnpackedToInt8Tensor

from aoquant import QATConfig, backend, get_format, quantize_
from aoquant.formats import Float8Mslk, TinyGemm
from aoquant.formats.elements import fma
from aoquant.ops.gemm import mslk
from aoquant.report.measure import sqnr
from aoquant.targets import resolve
from aoquant.tools import doctor as checks

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
CUDA = torch.device("cuda")
MS = (1, 16, 64, 128, 512, 2048)
SHAPES = ((1024, 2048), (4096, 4096), (4096, 14336), (512, 14336))
BOUND = 50.0


def _fp8(preference: KernelPreference, fast: bool = True) -> Any:
    config = ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow(), kernel_preference=preference)
    config.mm_config = config.mm_config._replace(use_fast_accum=fast)
    return config


CONFIGS: dict[str, tuple[Any, tuple[torch.dtype, ...]]] = {
    **{f"plain g{g}": (ao.Int4WeightOnlyConfig(group_size=g), (BF16, F32)) for g in (64, 128)},
    **{
        f"preshuffled g{g}": (ao.Int4WeightOnlyConfig(group_size=g, int4_packing_format="preshuffled"), (BF16, F32))
        for g in (64, 128)
    },
    **{
        f"tile packed g{g}": (ao.Int4WeightOnlyConfig(group_size=g, int4_packing_format="tile_packed_to_4d"), (BF16,))
        for g in (32, 64, 128, 256)
    },
    "tile packed ntile 16 g128": (
        ao.Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d", int4_tile_packed_ntile=16),
        (BF16,),
    ),
    "fp8 preshuffled": (ao.Float8DynamicActivationInt4WeightConfig(int4_packing_format="preshuffled"), (BF16, F32)),
    "fp8 plain": (ao.Float8DynamicActivationInt4WeightConfig(int4_packing_format="plain"), (BF16, F32)),
    "fp8 mslk": (_fp8(KernelPreference.MSLK), (BF16,)),
    "fp8 mslk precise": (_fp8(KernelPreference.MSLK, fast=False), (BF16,)),
}
HQQ = ao.Int4WeightOnlyConfig(
    group_size=64, int4_packing_format="tile_packed_to_4d", int4_choose_qparams_algorithm="hqq"
)


def put(store: dict[str, Tensor], key: str, value: Tensor) -> None:
    one_byte_float = value.is_floating_point() and value.element_size() == 1
    store[key] = (value.view(torch.uint8) if one_byte_float else value).detach().cpu().contiguous().clone()


def layer(w: Tensor, bias: Tensor | None = None) -> nn.Sequential:
    linear = nn.Linear(w.shape[1], w.shape[0], bias is not None, dtype=w.dtype, device=CUDA)
    with torch.no_grad():
        linear.weight.copy_(w)
        if bias is not None:
            linear.bias.copy_(bias)
    return nn.Sequential(linear)


def torchao_layer(config: Any, model: nn.Sequential) -> nn.Sequential:
    model = copy.deepcopy(model)
    torchao_quantize_(model, config)
    return model


def fields(t: Any) -> Iterator[tuple[str, Tensor]]:
    for name in t.__tensor_flatten__()[0]:
        yield name, getattr(t, name)


def different(mine: Tensor, theirs: Tensor) -> dict[str, int]:
    """Bytes that differ in each field of two packed tensors."""
    found = {}
    for (name, a), (_, b) in zip(fields(mine), fields(theirs), strict=True):
        if a.shape != b.shape or a.dtype != b.dtype:
            found[f"{name} {tuple(a.shape)} {a.dtype} {tuple(b.shape)} {b.dtype}"] = a.numel()
        elif n := int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum()):
            found[name] = n
    return found


def record_bytes(r: Report, store: dict[str, Tensor]) -> None:
    r.text("\n# bytes: torchao's quantize_ on the GPU, ours on the GPU, ours encoded on the CPU")

    def body(name: str, config: Any, dtype: torch.dtype) -> Outcome:
        target = resolve(config)
        format = target.recipe.fprop_weight
        # int4's inputs for float8 too: 512 columns
        x = golden_input("int4-", dtype)
        theirs = torchao_layer(config, layer(x.to(CUDA)))[0].weight.data
        on_cpu = format.encode(x)
        e = type(on_cpu)(*(None if t is None else t.to(CUDA) for t in on_cpu[:4]), on_cpu.k)
        found = different(target.build(e, x.to(CUDA)), theirs)
        key = f"{format.name}/{'bf16' if dtype == BF16 else 'f32'}"
        for field, value in zip(("codes", "scale", "zero", "outer"), on_cpu[:4], strict=True):
            if value is not None and not found:
                put(store, f"{key}/{field}", value)
        if format.name not in ("int4-g64", "int4-g128"):
            for field, value in fields(theirs):
                put(store, f"{key}/packed_{field}", value)
        return verdict(found, x.numel())

    for name, (config, dtypes) in CONFIGS.items():
        for dtype in dtypes:
            r.case(f"{name} {dtype}", body, name, config, dtype)

    def rows() -> Outcome:
        x = torch.cat((golden_input("int4-", BF16), normal(64, 512, BF16)))
        found = {}
        for dtype in (BF16, F32, torch.float16):
            data = x.to(dtype).clamp(-6e4, 6e4)
            codes, scale = torch.ops.triton.quantize_fp8_row(data.to(CUDA))
            e = Float8Mslk().encode(data)
            assert e.scale is not None
            found[f"codes {dtype}"] = int((codes.cpu().view(torch.uint8) != e.codes.view(torch.uint8)).sum())
            found[f"scales {dtype}"] = int((scale.cpu().reshape(-1, 1) != e.scale).sum())
        return verdict({k: n for k, n in found.items() if n}, 3 * x.numel())

    r.case("quantize_fp8_row", rows)

    def hqq(k: int) -> Outcome:
        w = weights(64, k, BF16, 41).to(CUDA)
        return verdict(different(_converted(HQQ, w), torchao_layer(HQQ, layer(w))[0].weight.data), w.numel())

    def hqq_devices() -> Outcome:
        w, found = weights(64, 1024, BF16, 41), {}
        for name in ("int4-tinygemm-hqq-g64", "intx4-g32-hqq"):
            a, b = get_format(name).encode(w), get_format(name).encode(w.to(CUDA))
            found[name] = int((a.codes != b.codes.cpu()).sum())
        return "OK", f"bytes of codes that differ between CPU and GPU: {found}"

    def hqq_intx(dtype: torch.dtype) -> Outcome:
        w, found = weights(64, 1024, dtype, 41).to(CUDA), {}
        for bits in (2, 4, 8):
            theirs = IntxUnpackedToInt8Tensor.from_hp(
                w,
                (1, 32),
                getattr(torch, f"int{bits}"),
                intx_choose_qparams_algorithm=IntxChooseQParamsAlgorithm.HQQ_SCALE_ONLY,
            )
            format: Any = get_format(f"intx{bits}-g32-hqq")
            e = format.encode(w)
            found[f"codes {bits}"] = int((format.integers(e) != theirs.qdata).sum())
            found[f"scales {bits}"] = int((e.scale != theirs.scale).sum())
        return verdict({k: n for k, n in found.items() if n}, 3 * w.numel())

    r.case("HQQ, tile packed, K 1024", hqq, 1024)
    r.case("HQQ, tile packed, K 4096", hqq, 4096)
    r.case("HQQ, devices", hqq_devices)
    for dtype in (BF16, F32):
        r.case(f"HQQ_SCALE_ONLY {dtype}", hqq_intx, dtype)


def _converted(config: Any, w: Tensor) -> Tensor:
    model = layer(w)
    quantize_(model, config)
    converted: Tensor = model[0].weight.data
    return converted


def record_operands(r: Report, store: dict[str, Tensor]) -> None:
    r.text("\n# operands: kernel(identity) against Format.operand on the CPU")

    def body(name: str, config: Any, dtype: torch.dtype, x: Tensor, keep: bool) -> Outcome:
        format = resolve(config).recipe.fprop_weight
        w = torchao_layer(config, layer(x.to(CUDA)))[0].weight.data
        eye = torch.eye(x.shape[1], device=CUDA)
        one = torch.ones(x.shape[1], device=CUDA)
        if isinstance(format, TinyGemm):
            y = torch.nn.functional.linear(eye.to(BF16), w)
        elif name == "fp8 plain":
            y = mslk.operator("f8i4bf16_rowwise")(eye.to(E4M3), w.qdata, one, w.scale, w.zero_point)
        elif name == "fp8 preshuffled":
            rows = torch.ones_like(w.row_scale)
            y = mslk.operator("f8i4bf16_shuffled")(eye.to(E4M3), w.qdata, one, rows, w.group_scale)
        else:
            y = torch.nn.functional.linear(eye.to(BF16), w)
        operand = y.t().contiguous().cpu()
        mine = format.operand(format.encode(x), BF16)
        if keep:
            put(store, f"{format.name}/{'bf16' if dtype == BF16 else 'f32'}/operand", operand)
        return verdict({"operand": n} if (n := int((operand != mine).sum())) else {}, x.numel())

    for name, (config, dtypes) in CONFIGS.items():
        if "mslk" in name:
            continue
        for dtype in dtypes:
            keep = "g64" not in name and "g32" not in name and "ntile" not in name and "plain g" not in name
            r.case(f"{name} {dtype}", body, name, config, dtype, golden_input("int4-", dtype), keep)
            r.case(f"{name} {dtype}, 512 x 512", body, name, config, dtype, weights(512, 512, dtype, 21), False)


EPILOGUES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "x * (w * acc)": lambda x, w, acc: x * (w * acc),
    "w * (x * acc)": lambda x, w, acc: w * (x * acc),
    "(x * w) * acc": lambda x, w, acc: (x * w) * acc,
}
BIASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rn(rn(v) + b)": lambda v, b: (v.bfloat16() + b).bfloat16(),
    "rn(v + b)": lambda v, b: (v + b.float()).bfloat16(),
}


def probe_epilogues(r: Report) -> None:
    r.text("\n# epilogues: one-hot rows, so that acc is one product; elements that differ from each formula")
    k, n = 512, 256
    x_MK = torch.zeros(k, k, device=CUDA)
    x_MK.diagonal().copy_(normal(1, k, F32, 51)[0].to(CUDA))
    x = x_MK.to(E4M3)
    w = (normal(n, k, F32, 52).to(CUDA) * 30).to(E4M3)
    xs = normal(1, k, F32, 53)[0].abs().to(CUDA) + 0.01
    ws = normal(1, n, F32, 54)[0].abs().to(CUDA) + 0.01
    acc = x.float().diagonal().unsqueeze(1) * w.float().t()

    def mslk_fp8(fast: bool, bias: Tensor | None) -> Outcome:
        y = mslk.operator("f8f8bf16_rowwise")(x, w, xs.unsqueeze(1), ws.unsqueeze(1), bias=bias, use_fast_accum=fast)
        found = {}
        for name, formula in EPILOGUES.items():
            v = formula(xs.unsqueeze(1), ws.unsqueeze(0), acc)
            if bias is None:
                found[name] = int((v.bfloat16() != y).sum())
            else:
                found |= {f"{name}, {b}": int((add(v, bias) != y).sum()) for b, add in BIASES.items()}
        if bias is not None:
            pairs = {
                "fma(w, x * acc, b)": (ws, xs.unsqueeze(1) * acc),
                "fma(x, w * acc, b)": (xs.unsqueeze(1), ws * acc),
            }
            found |= {n: int((fma(a, v, bias.float()).bfloat16() != y).sum()) for n, (a, v) in pairs.items()}
        exact = "w * (x * acc)" if bias is None else "w * (x * acc), rn(rn(v) + b)"
        if bias is not None and bias.dtype == F32:
            exact = "fma(w, x * acc, b)"
        return ("OK" if found[exact] == 0 else "FAIL"), str({n: c for n, c in found.items() if c < 100})

    for fast in (True, False):
        r.case(f"f8f8bf16_rowwise fast={fast}", mslk_fp8, fast, None)
        for dtype in (BF16, F32):
            bias = normal(1, n, dtype, 55)[0].to(CUDA) * 20
            r.case(f"f8f8bf16_rowwise fast={fast} bias {dtype}", mslk_fp8, fast, bias)

    def int4_fp8(plain: bool) -> Outcome:
        format = get_format("int4-e4m3-g128" if plain else "int4-e4m3-row-g128")
        source = weights(n, k, BF16, 56).to(CUDA) * (300 if plain else 1)
        e = format.encode(source)
        config = CONFIGS["fp8 plain" if plain else "fp8 preshuffled"][0]
        weight = _converted(config, source)
        acc_MN = x.float().diagonal().unsqueeze(1) * format.operand(e, F32).t()
        if plain:
            y = mslk.operator("f8i4bf16_rowwise")(x, weight.qdata, xs, weight.scale, weight.zero_point)
            found = {"x * acc": int(((xs.unsqueeze(1) * acc_MN).bfloat16() != y).sum())}
            return ("FAIL" if found["x * acc"] else "OK"), str(found)
        y = mslk.operator("f8i4bf16_shuffled")(x, weight.qdata, xs, weight.row_scale, weight.group_scale)
        rows = weight.row_scale.unsqueeze(0)
        found = {m: int((f(xs.unsqueeze(1), rows, acc_MN).bfloat16() != y).sum()) for m, f in EPILOGUES.items()}
        return ("FAIL" if found["w * (x * acc)"] else "OK"), str(found)

    for plain in (True, False):
        r.case(f"f8i4bf16 {'rowwise' if plain else 'shuffled'}", int4_fp8, plain)


def record_layers(r: Report, store: dict[str, Tensor]) -> None:
    r.text(f"\n# layers: prepared against torchao's own, bf16 with bias; dB or equal at M = {', '.join(map(str, MS))}")

    def small(name: str, config: Any) -> Outcome:
        w, x = weights(32, 512, BF16, 61), normal(16, 512, BF16, 62)
        bias = normal(1, 32, BF16, 63)[0]
        y = torchao_layer(config, layer(w.to(CUDA), bias.to(CUDA)))(x.to(CUDA))
        put(store, f"gemm/{resolve(config).recipe.fprop_weight.name}/{resolve(config).recipe.contract}", y)
        return "OK", f"recorded; {y.numel()} values"

    def body(config: Any, n: int, k: int, dtype: torch.dtype) -> Outcome:
        torch.manual_seed(0)
        w = (torch.randn(n, k) / k**0.5).to(dtype).to(CUDA)
        model = layer(w, torch.randn(n).to(dtype))
        theirs = torchao_layer(config, model)
        quantize_(model, QATConfig(config))
        mine = copy.deepcopy(model)
        quantize_(mine, QATConfig(config, step="convert"))
        assert not different(mine[0].weight.data, theirs[0].weight.data), "torchao's quantize_ makes another tensor"
        lines: dict[str, list[str]] = {}
        worst: dict[str, float] = {}
        contract = model[0].prepared.recipe.contract
        names = [
            "free",
            *(b for b in ("torch.mm", "torch._scaled_mm.operands", "reference") if _can(b, contract, dtype)),
        ]
        with torch.no_grad():
            for m, b in itertools.product(MS, names):
                if b == "reference" and m * n * k > 1 << 34:
                    continue
                x = torch.randn(m, k, dtype=BF16, device=CUDA)
                if b == "free":
                    y = model(x)
                else:
                    with backend(b):
                        y = model(x)
                db = sqnr(theirs(x), y)
                lines.setdefault(b, []).append("equal" if db == float("inf") else f"{db:.1f}")
                worst[b] = min(worst.get(b, db), db)
        ok = worst["free"] == float("inf") and min(worst.values()) > BOUND
        return ("OK" if ok else "FAIL"), "; ".join(f"{b}: {' '.join(v)}" for b, v in lines.items())

    for name, (config, _) in CONFIGS.items():
        r.case(f"record {name}", small, name, config)
    for (n, k), (name, (config, _)) in itertools.product(SHAPES, CONFIGS.items()):
        r.case(f"{name}, {n} x {k}", body, config, n, k, BF16)
    r.case("HQQ tile packed, 1024 x 2048", body, HQQ, 1024, 2048, BF16)


def _can(name: str, contract: str, dtype: torch.dtype) -> bool:
    if name == "torch.mm":
        return contract == "bias_after"
    return name == "reference" or contract.startswith("fp8")


def check_training(r: Report) -> None:
    r.text("\n# training: cosine of dW and dx to the float layer's; what the doctor says")

    def body(config: Any) -> Outcome:
        w = weights(256, 1024, BF16, 71).to(CUDA)
        x, g = normal(128, 1024, BF16, 72).to(CUDA), normal(128, 256, BF16, 73).to(CUDA)
        grads = []
        for prepare in (False, True):
            model = layer(w, torch.zeros(256))
            if prepare:
                quantize_(model, QATConfig(config))
            leaf = x.clone().requires_grad_()
            model(leaf).backward(g)
            assert leaf.grad is not None
            grads.append((model[0].weight.grad, leaf.grad))
        cosines = [
            float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0))
            for a, b in zip(*grads, strict=True)
        ]
        return ("OK" if min(cosines) > 0.9 else "FAIL"), " ".join(f"{c:.4f}" for c in cosines)

    for name, (config, _) in {**CONFIGS, "HQQ tile packed": (HQQ, ())}.items():
        r.case(name, body, config)
    for row in checks.recipes():
        if row[0].startswith("torchao"):
            r.line("OK" if row[3] == "bit-equal" or "CPU" in row[2] else "DIFF", row[0], "; ".join(row[1:]))


def main() -> int:
    """Run everything; 1 if any line says FAIL."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write both files here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    start, r, store = time.perf_counter(), Report(), {}
    meta = versions(CUDA)
    for key, value in meta.items():
        r.text(f"{key:12}{value}")
    for step in (
        lambda: record_bytes(r, store),
        lambda: record_operands(r, store),
        lambda: probe_epilogues(r),
        lambda: record_layers(r, store),
        lambda: check_training(r),
    ):
        try:
            step()
        except Exception as error:
            r.line("FAIL", "a whole part", f"{type(error).__name__}: {error}")
    size = sum(t.numel() * t.element_size() for t in store.values()) / 1000
    r.text(f"\n{len(store)} golden tensors, {size:.0f} kB; {r.failed} failures; {time.perf_counter() - start:.0f} s")

    from safetensors.torch import save_file

    gpu = meta["gpu"].removeprefix("NVIDIA ").lower().replace(" ", "-")
    golden, results = args.out or ROOT / "test/golden/int4", args.out or ROOT / "benchmarks/results"
    for folder in (golden, results):
        folder.mkdir(parents=True, exist_ok=True)
    save_file(store, golden / f"{gpu}.safetensors", metadata=meta)
    (results / f"int4_{gpu}.txt").write_text("\n".join(r.lines) + "\n")
    return int(r.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
