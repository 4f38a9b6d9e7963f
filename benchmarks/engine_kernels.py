"""vLLM's own CUDA kernels against aoquant's contracts, bit for bit, on one GPU.

    python benchmarks/engine_kernels.py build/vllm_kernels.so.xz [--out DIR]

`engine_library.py` makes that file of vLLM's wheel. A minute, and on the first run another for PTX. Writes
`benchmarks/results/engine_kernels_<gpu>.txt`.

Quantisers are given the same bf16 rows, and codes and scales are compared. GEMMs of weights are first given the rows of
an identity, which returns the operand that the kernel multiplies: there is the rounding of (q - zp) * s to see, without
any sum. Then random rows: the share of outputs that are the bits of the exact product, rounded once, and of aoquant's
own layer, and the SQNR in dB of the kernel against the exact product; sums of another order leave about 55 dB. Exact
products are float64 sums of the operands that a contract names. A kernel that does not run says why in its row.
Sources for layouts: vLLM 0.32 `_custom_ops.py`, `marlin_utils.py`, `marlin_utils_fp4.py`, `machete.py`.
"""

from __future__ import annotations

import argparse
import lzma
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from engine_layouts import Weight, machete, marlin, marlin_fp4
from record_golden import versions
from torch import Tensor, nn

from aoquant import PackedTensor, PackedWeightConfig, get_format, quantize_
from aoquant.report.measure import sqnr

BF16, CUDA, FP8 = torch.bfloat16, "cuda", torch.float8_e4m3fn
SHAPES = ((4096, 4096), (14336, 4096))  # N, K
ROWS = (1, 16, 64, 512, 2048)
Ops = torch._ops._OpNamespace


def percent(a: Tensor, b: Tensor) -> str:
    """The share of equal elements, to the bit for floats of one dtype."""
    return f"{(a == b.view(a.shape)).double().mean().item():9.4%}"


def rows(m: int, k: int) -> Tensor:
    """Activations of many sizes, with a row of zeros among many."""
    x = torch.randn(m, k, device=CUDA) * torch.randn(m, 1, device=CUDA).exp()
    if m > 1:
        x[m // 2] = 0
    return x.to(BF16)


def quantisers(ops: Ops) -> Iterator[tuple[str, str, Callable[[], str]]]:
    """(kernel, format, what comes out)."""
    x = rows(512, 4096)
    m, k = x.shape

    def against(name: str, codes: Tensor, scale: Tensor) -> str:
        e = get_format(name).encode(x)
        assert e.scale is not None
        return f"codes {percent(codes.view(torch.uint8), e.codes.view(torch.uint8))}  scales {percent(scale, e.scale)}"

    def fp8_row(name: str) -> str:
        q, s = torch.empty_like(x, dtype=FP8), torch.empty(m, 1, device=CUDA)
        ops.dynamic_per_token_scaled_fp8_quant(q, x, s, None)
        return against(name, q, s)

    def fp8_tensor(name: str) -> str:
        q, s = torch.empty_like(x, dtype=FP8), torch.zeros(1, device=CUDA)
        ops.dynamic_scaled_fp8_quant(q, x, s)
        return against(name, q, s)

    def fp8_static(name: str) -> str:
        q, s = torch.empty_like(x, dtype=FP8), torch.full((1,), 0.02, device=CUDA)
        ops.static_scaled_fp8_quant(q, x, s, None)
        return against(name, q, s)

    def fp8_groups(name: str) -> str:
        q, s = torch.empty_like(x, dtype=FP8), torch.empty(m, k // 128, device=CUDA)
        ops.per_token_group_fp8_quant(x, q, s, 128, 1e-10, -448.0, 448.0, False, False, False)
        return against(name, q, s)

    def int8_row(name: str) -> str:
        q, s = torch.empty_like(x, dtype=torch.int8), torch.empty(m, 1, device=CUDA)
        ops.dynamic_scaled_int8_quant(q, x, s, None)
        return against(name, q, s)

    def int8_static(name: str) -> str:
        q, s = torch.empty_like(x, dtype=torch.int8), torch.full((1,), 0.02, device=CUDA)
        ops.static_scaled_int8_quant(q, x, s, None)
        return against(name, q, s)

    def fp4(name: str) -> str:
        q, s = ops.scaled_fp4_quant(x, torch.full((1,), 256.0, device=CUDA), False)
        return against(name, q, s.view(FP8))

    for kernel, names, call in (
        ("dynamic_per_token_scaled_fp8_quant", ("fp8-row-vllm", "fp8-row-vllm-reciprocal", "fp8-row"), fp8_row),
        ("dynamic_scaled_fp8_quant", ("fp8-tensor",), fp8_tensor),
        ("static_scaled_fp8_quant", ("fp8-tensor-static:0.02",), fp8_static),
        ("per_token_group_fp8_quant, 128", ("fp8-1x128",), fp8_groups),
        ("dynamic_scaled_int8_quant", ("int8-row-vllm", "int8-row"), int8_row),
        ("static_scaled_int8_quant", ("int8-tensor-static:0.02",), int8_static),
        ("scaled_fp4_quant", ("nvfp4-static:0.00390625",), fp4),
    ):
        for name in names:
            yield kernel, name, lambda call=call, name=name: call(name)


def packed(n: int, k: int, config: PackedWeightConfig) -> nn.Linear:
    """A converted layer of random weights."""
    layer = nn.Linear(k, n, bias=False, dtype=BF16, device=CUDA)
    model = nn.Sequential(layer)
    nn.init.normal_(layer.weight, std=0.02)
    quantize_(model, config)
    return model[0]  # type: ignore[return-value]


def judged(y: Tensor, exact: Tensor, ours: Tensor) -> str:
    """Of one GEMM: y, the exact product (float64) and aoquant's."""
    return f"exact {percent(y, exact.to(BF16))}  aoquant {percent(y, ours)}  {sqnr(exact.to(BF16), y):6.1f} dB"


def weight_only(ops: Ops, make: Callable[[Ops, PackedTensor], Weight], name: str, n: int, k: int) -> Iterator[str]:
    """A kernel of bf16 activations: its operand, then products. The contract is "dequantize" but for NVFP4."""
    contract = "aoquant" if name.startswith("nvfp4") else "dequantize"
    layer = packed(n, k, PackedWeightConfig(name, contract=contract))
    weight = layer.weight
    assert isinstance(weight, PackedTensor)
    kernel = make(ops, weight)
    values = weight.dequantize(BF16)
    eye = torch.eye(k, device=CUDA, dtype=BF16)
    operand = torch.cat([kernel.multiply(some) for some in eye.split(512)]).t()
    yield f"operand {percent(operand, values)} of {n} x {k}"
    w = weight.weight_format.decode(weight.encoded, torch.float32) if contract == "aoquant" else values
    for m in ROWS:
        x = rows(m, k)
        with torch.no_grad():
            yield f"M {m:<5} {judged(kernel.multiply(x), x.double() @ w.double().t(), layer(x))}"


def cutlass(ops: Ops, config: PackedWeightConfig, n: int, k: int) -> Iterator[str]:
    """CUTLASS's GEMM of 8-bit codes with a scale per row of both operands, given the codes that the layer has."""
    layer = packed(n, k, config)
    weight = layer.weight
    assert isinstance(weight, PackedTensor) and weight.scale is not None and weight.recipe.fprop_input is not None
    for m in ROWS:
        x = rows(m, k)
        e = weight.recipe.fprop_input.encode(x)
        assert e.scale is not None
        y = torch.empty(m, n, dtype=BF16, device=CUDA)
        ops.cutlass_scaled_mm(y, e.codes, weight.qdata.t(), e.scale, weight.scale.t().contiguous(), None)
        sums = e.codes.double() @ weight.qdata.double().t()
        exact = sums * e.scale.double() * weight.scale.double().t()
        with torch.no_grad():
            yield f"M {m:<5} {judged(y, exact, layer(x))}"


def table(ops: Ops) -> Iterator[str]:
    """The lines of the report."""
    yield f"{'quantiser':36}{'format':28}equal"
    for kernel, name, call in quantisers(ops):
        yield f"{kernel:36}{name:28}{attempt(call)}"
    groups: list[tuple[str, str, Callable[[int, int], Iterator[str]]]] = []
    for name in ("intx4-g128", "intx4-g64", "intx4-g32", "intx4-g128-asym", "intx8-g128"):
        groups.append(("Marlin", name, lambda n, k, name=name: weight_only(ops, marlin, name, n, k)))
    for name in ("intx4-g128", "intx4-g64", "intx4-g128-asym"):
        groups.append(("Machete", name, lambda n, k, name=name: weight_only(ops, machete, name, n, k)))
    for name in ("mxfp4-even", "nvfp4-static:0.0009765625"):
        groups.append(("Marlin", name, lambda n, k, name=name: weight_only(ops, marlin_fp4, name, n, k)))
    for weight, x in (("fp8-row", "fp8-row-vllm"), ("int8-row", "int8-row-vllm")):
        config = PackedWeightConfig(weight, x)
        groups.append(("CUTLASS", f"{weight}, {x}", lambda n, k, config=config: cutlass(ops, config, n, k)))
    for kernel, name, lines in groups:
        for n, k in SHAPES:
            yield f"\n{kernel}, {name}, {n} x {k}"
            try:
                yield from lines(n, k)
            except (RuntimeError, ValueError, AssertionError) as error:
                yield f"does not run: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


def attempt(call: Callable[[], str]) -> str:
    try:
        return call()
    except (RuntimeError, ValueError, AssertionError) as error:
        return f"does not run: {str(error).splitlines()[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args()
    torch.manual_seed(0)
    facts = versions(torch.device(CUDA)) | {"kernels": "vLLM 0.32.0, _C_stable_libtorch.abi3.so"}
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "_")
    given.out.mkdir(parents=True, exist_ok=True)
    out, lines = given.out / f"engine_kernels_{gpu}.txt", [*(f"{k:12}{v}" for k, v in facts.items()), ""]
    with tempfile.NamedTemporaryFile(suffix=".so") as library:
        library.write(lzma.decompress(given.library.read_bytes()))
        library.flush()
        try:
            torch.ops.load_library(library.name)
        except OSError as error:
            lines.append(f"the library does not load: {error}")
    if lines[-1] == "":
        for line in table(torch.ops._C):
            print(line, flush=True)
            lines.append(line)
    else:
        print(lines[-1])
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
