"""The process that benchmarks/sanitize.py starts under compute-sanitizer: every kernel of csrc, or Triton's, on small
tensors.

    python benchmarks/sanitize_worker.py [--triton] [--types bf16 f16] [--only TEXT] [--trace FILE]

Cases call csrc's operators themselves. Shapes reach every branch of the launchers: each range of rows of x, N on each
side of the bounds in csrc/decode_plan.cuh, K that steps of 128 divide and that they do not, rings of shared memory that
are filled once and many times, W's that are siblings, and tensors that end in the middle of a block. Codes and scales
of packed weights are random bytes: a sanitizer looks at addresses.

With `--triton`, cases are encoders and decoders of every format that has them, in rows that fill no tile, llama.cpp's
product, and a layer of every recipe: forward and backward of the prepared one, forward of the packed one.

Each case is a line of output before it runs, so the last line names the case that a kernel died in. `--trace` writes
the names of all kernels that were launched, by torch's profiler, as JSON; it is for a run without a sanitizer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import aoquant
from aoquant import QATConfig, backend, explain, get_format, list_formats, list_recipes, ops, quantize_
from aoquant.calibrate import uncalibrated
from aoquant.formats import Encoded, Format, as_operand
from aoquant.ops import CodecRequest, codec, native
from aoquant.ops.gemm.few_rows import alpha_of, kind, plan_of
from aoquant.ops.linear_plan import CUDA_FORMATS, ROW_FORMATS
from aoquant.ops.quantized import Ask

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
DTYPES = TYPES | {"f32": torch.float32}
OUTS = {"none": 0, "bf16": 1, "f16": 2, "f32": 3}  # `Out` of csrc/grids.cuh
ROWS = (1, 3, 4, 5, 16, 17, 32, 33, 64, 65, 128, 200, 256)
SHORT, LONG = 160, 4128
# (N, K, rows of x): both sides of each bound of N
SHAPES: tuple[tuple[int, int, Sequence[int]], ...] = (
    (200, LONG, ROWS),
    (2100, LONG, ROWS[::2]),
    (2100, SHORT, ROWS),
    (5000, SHORT, ROWS),
    (8500, SHORT, ROWS),
    # of decode_rows.cuh, up to 16 rows
    (2100, 16032, (1, 2, 9, 16)),
    (8300, 4064, (1, 8, 9, 16)),
    (14336, 2368, (1, 8, 9, 16)),
)
# ends of experts: one without rows, and rows for products of each width of expert_wide.cuh; (N, K) with scales that
# pass through each of its two ways, and more tiles than blocks
WIDE_ENDS, WIDE_SHAPES = (0, 340, 530, 816, 856), ((200, 1184), (200, 512), (3000, SHORT))
SMALL = ((1, 16), (3, 48), (33, 176), (64, 512))  # matrices to encode
# formats that are made for engines are in no list; integers of other widths
UNLISTED = ("q4_0", "q4_1", "q8_0", "q8_0-x86", "int8-row-vllm", "int8-row-vllm-reciprocal", "nvfp4-pow2")
UNLISTED += ("intx3-g24", "intx5-g32", "intx6-g32-asym", "intx7-tensor")
NO_LAYER = ("experts", "no-attention", "torchao-")  # recipes of other layers, or of another library's kernels


class Case(NamedTuple):
    """A call of an operator, and its name."""

    name: str
    run: Callable[[], Any]


class Weight(NamedTuple):
    """A packed weight, and the dtype of the x that it is multiplied with."""

    format: Format
    w: Encoded
    dtype: torch.dtype

    def x(self, m: int) -> Tensor:
        return matrix(m, self.w.k, self.dtype)

    def plan(self, encoder: str | None) -> int:
        return plan_of(self.format, self.w, self.dtype, encoder)


def call(name: str, *arguments: Any) -> Any:
    return native.operator(name)(*arguments)


def matrix(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, k).to(dtype).cuda()


def packed(name: str, n: int, k: int, dtype: torch.dtype) -> Weight:
    """A weight (n, k) of random codes and positive scales."""
    f = get_format(name)
    how, blocks = kind(f), (-(-n // f.tile_rows), k // (f.block or 1))
    codes = torch.randint(0, 126, (n, k if how == "fp8" else k // 2), dtype=torch.uint8).cuda()
    scale, outer = torch.randint(40, 70, blocks, dtype=torch.uint8).cuda(), torch.ones(1, 1).cuda()
    made = {
        "fp8": lambda: Encoded(codes.view(torch.float8_e4m3fn), torch.ones(n, 1).cuda(), None, None, k),
        "int4": lambda: Encoded(codes, scale.to(dtype), scale.to(dtype), None, k),
        "e8m0": lambda: Encoded(codes, scale.view(torch.float8_e8m0fnu), None, None, k),
    }.get(str(how), lambda: Encoded(codes, scale.view(torch.float8_e4m3fn), None, outer, k))
    return Weight(f, made(), dtype)


def weights(types: Sequence[str], names: Sequence[str], n: int, k: int) -> Iterator[tuple[str, Weight]]:
    """With e8m0 scales csrc multiplies bfloat16 alone."""
    for t, name in product(types, names):
        if (name, t) != ("mxfp4", "f16"):
            yield f"{name} {t} {n}x{k}", packed(name, n, k, TYPES[t])


def multiply(weight: Weight, m: int) -> None:
    """decode_mm, with one alpha for all rows of x or one for each, and each kind of bias."""
    f, w, dtype = weight
    how, n = kind(f), w.codes.shape[0]
    assert how is not None
    alpha_x = torch.ones(m if m % 2 else 1, 1).cuda()
    bias = [None, torch.zeros(n), torch.zeros(n, dtype=dtype)][m % 3]
    constants = CUDA_FORMATS[how], f.block or 1, f.tile_rows, *f.shifts
    given = None if bias is None else bias.cuda()
    call("decode_mm", weight.x(m), w.codes, w.scale, w.zero, alpha_x, alpha_of(f, w), given, *constants)


def linear(weight: Weight, m: int, encoder: str | None) -> None:
    f, w, _ = weight
    call("linear", weight.x(m), w.codes, w.scale, w.zero, alpha_of(f, w), None, weight.plan(encoder))


def siblings(weight: Weight, m: int, encoder: str | None) -> None:
    f, w, _ = weight
    parts = (w.codes, w.scale, w.zero, alpha_of(f, w), None, weight.plan(encoder))
    call("siblings", weight.x(m), *([part] * 3 for part in parts))


def experts(weight: Weight, ends: Sequence[int], rows: int, many: bool) -> None:
    """A stack of experts, and rows of x behind the last one's."""
    f, w, _ = weight
    alpha_w = None if alpha_of(f, w) is None else torch.ones(w.codes.shape[0], 1).cuda()
    given = torch.ones(rows, 1).cuda(), alpha_w, weight.plan(None), many
    call("experts_mm", weight.x(rows), torch.tensor(ends, dtype=torch.int32).cuda(), w.codes, w.scale, w.zero, *given)


def decode_values(weight: Weight) -> None:
    call("decode_values", weight.w.codes, weight.w.scale, weight.w.zero, weight.plan(None))


def grids(x: Tensor, effort: int, metric: int, tile: int, out: int) -> None:
    amax = call("finite_absmax", x)
    call("encode_grids", x, amax, 0.0, effort, metric, tile, 0.25, True, out, False)


def of_weights(types: Sequence[str]) -> Iterator[Case]:
    """Products of few rows, by themselves, with their encoding, and several at once; W's values."""
    for n, k, rows in SHAPES:
        for name, weight in weights(types, ("int4-g32", "nvfp4", "mxfp4", "gridflip", "fp8-row"), n, k):
            for m in rows:
                yield Case(f"decode_mm {name} m={m}", partial(multiply, weight, m))
                if k == SHORT and m in (1, 4, 16):
                    yield Case(f"siblings {name} m={m}", partial(siblings, weight, m, None))
    for name, weight in weights(types[:1], ("gridflip-16x16", "int4-g128"), 200, 512):
        for m in ROWS:
            yield Case(f"decode_mm {name} m={m}", partial(multiply, weight, m))
    for encoder, of in (
        ("nvfp4-row", "nvfp4"),
        ("fp8-row", "fp8-row"),
        ("mxfp4", "mxfp4"),
        ("nvfp4-row", "int4-g128"),
        ("mxfp4", "int4-g128"),
        ("fouroversix-row", "nvfp4"),
    ):
        for (n, k), m in product(((200, 512), (2100, 2048), (8500, 256)), (1, 2, 4, 8, 16, 20, 40, 100)):
            for name, weight in weights(types, (of,), n, k):
                yield Case(f"linear {name} m={m}, encoded", partial(linear, weight, m, encoder))
                yield Case(f"siblings {name} m={m}, encoded", partial(siblings, weight, m, encoder))
    for n, k in ((3, 96), (2100, SHORT)):
        for name, weight in weights(types, ("int4-g32", "nvfp4", "mxfp4", "gridflip-16x16", "fp8-row"), n, k):
            yield Case(f"decode_values {name}", partial(decode_values, weight))


def of_experts() -> Iterator[Case]:
    """Few rows of each expert, of small and large weights, and many, in slots of 128 and of up to 256."""
    formats = ("int4-g32", "nvfp4", "mxfp4", "gridflip")

    def spread(count: int, rows: int) -> list[int]:
        return [(rows - 1) * i // count for i in range(count)]

    for (count, n, k), rows in product(((5, 200, SHORT), (2, 2100, 16032), (2, 8300, 4064)), (5, 40)):
        for name, weight in weights(("bf16",), formats, count * n, k):
            yield Case(f"experts_mm {name} rows={rows}", partial(experts, weight, spread(count, rows), rows, False))
            if k == SHORT:
                many = partial(experts, weight, spread(count, 10 * rows), 10 * rows, True)
                yield Case(f"experts_mm {name} rows={10 * rows}, many", many)
    for n, k in WIDE_SHAPES:
        for name, weight in weights(("bf16",), formats, len(WIDE_ENDS) * n, k):
            wide = partial(experts, weight, WIDE_ENDS, WIDE_ENDS[-1] + 1, True)
            yield Case(f"experts_mm {name} rows={WIDE_ENDS[-1] + 1}, wide", wide)


def of_rows(types: Sequence[str]) -> Iterator[Case]:
    """Operands of formats whose rows are encoded one by one."""
    for t, (m, k) in product(types, ((1, 16), (1, 2048), (3, 160), (5, 20000), (300, 48))):
        x = matrix(m, k, TYPES[t])
        for format, decoded in product(ROW_FORMATS.values(), (False, True)):
            if format == ROW_FORMATS["mxfp4"] and k % 32:
                continue
            yield Case(f"encode_rows {format} {decoded} {t} {m}x{k}", partial(call, "encode_rows", x, format, decoded))


def of_blocks(types: Sequence[str]) -> Iterator[Case]:
    """Contests of scales, the search, and one scale for a whole tensor."""
    for t, (rows, k) in product([*types, "f32"], SMALL):
        x, name = matrix(rows, k, DTYPES[t]), f"{t} {rows}x{k}"
        for effort, (metric, tile) in product(range(4), ((0, 1), (1, 1), (2, 16))):
            how = effort, metric, tile, OUTS[("none", t)[effort % 2]]
            yield Case(f"encode_grids {how} {name}", partial(grids, x, *how))
        yield Case(f"outer_scale {name}", partial(call, "outer_scale", x, 0.5, 1.0))
        for outer in (torch.ones(1, 1), torch.empty(0)):
            yield Case(f"encode_search {name}", partial(call, "encode_search", x, outer.cuda(), OUTS[t], True))
    # the last is more than blocks of threads keep in shared memory
    for t in [*types, "f32"]:
        for rows, k in (*SMALL, (450 if t == "f32" else 900, 16384)):
            x = matrix(rows, k, DTYPES[t])
            for of in (0, 1):  # `Kind` of csrc/encode_tensor.cuh
                run = partial(call, "encode_tensor", x, of, True, OUTS[t], False)
                yield Case(f"encode_tensor {of} {t} {rows}x{k}", run)


def of_transforms(types: Sequence[str]) -> Iterator[Case]:
    """Fitted transforms of blocks, and codes of what they make."""
    for (size, k), t, rows in product(((16, 176), (32, 96), (64, 192), (128, 256)), [*types, "f32"], (3, 40)):
        x, w, name = matrix(rows, k, DTYPES[t]), torch.randn(k // size, size, size).cuda(), f"{size} {t} {rows}x{k}"
        for back in (False, True):
            run = partial(call, "transform_fitted", x, w, back, OUTS[t])
            yield Case(f"transform_fitted {back} {name}", run)
        for block, known in ((16, -1.0), (16, 0.0), (16, 0.5), (32, 0.0)):
            if k % block == 0:
                run = partial(call, "encode_fitted", x, w, block, known)
                yield Case(f"encode_fitted {block} {known} {name}", run)


def encoded(f: Format, x: Tensor, decodes: bool) -> None:
    """Codes and scales, the values in the same pass, and the values of the codes."""
    with backend("triton"):
        e = codec.encode(f, x)
        codec.quantize(as_operand(f), x, Ask(False, x.dtype))
        if decodes:
            codec.decode(f, e, x.dtype)


def of_formats(types: Sequence[str]) -> Iterator[Case]:
    """Formats with Triton kernels; rows of one block, of several, and more than a tile of rows."""
    for name, t, (m, blocks) in product((*list_formats(), *UNLISTED), [*types, "f32"], ((1, 1), (3, 3), (130, 5))):
        f = get_format(name)
        k = blocks * (f.block or 48)

        def runs(role: str, f: Format = f, t: str = t, m: int = m, k: int = k) -> bool:
            said = dict(explain(CodecRequest(role, as_operand(f), torch.device("cuda"), DTYPES[t], m, k)))
            return said["triton"] in ("runs", "willing, lower priority")

        if runs("quantize"):
            yield Case(f"{name} {t} {m}x{k}", partial(encoded, f, matrix(m, k, DTYPES[t]), runs("decode")))


def of_ggml(types: Sequence[str]) -> Iterator[Case]:
    """llama.cpp's product, N and rows of x that fill no tile."""
    for (m, n, k), name, t in product(((1, 48, 64), (7, 200, 1024), (130, 72, 544)), ("q4_0", "q4_1", "q8_0"), types):
        of_x, of_w = get_format("q8_0-x86"), get_format(name)
        x, w = of_x.encode(matrix(m, k, torch.float32)), of_w.encode(matrix(n, k, torch.float32))
        given = None, as_operand(of_x), as_operand(of_w), "ggml", [m], TYPES[t], None, None
        yield Case(f"ggml {name} {t} {m}x{n}x{k}", partial(ops.matmul, x, w, *given))


def layer(recipe: str, m: int) -> None:
    """A prepared layer forward and backward, and its packed one."""
    model = nn.Sequential(nn.Linear(384, 200)).bfloat16().cuda()
    quantize_(model, aoquant.get_recipe(recipe).prepare())
    x = matrix(m, 384, torch.bfloat16).requires_grad_()
    if uncalibrated(model):
        aoquant.calibrate(model, [x.detach()])
    model(x).sum().backward()
    quantize_(model, QATConfig(step="convert"))
    with torch.no_grad():
        model(x)


def of_layers() -> Iterator[Case]:
    """A layer of each recipe, for few rows and for more than a tile."""
    for recipe, m in product((r.name for r in list_recipes() if not r.kv_cache), (3, 130)):
        if not any(other in recipe for other in NO_LAYER):
            yield Case(f"layer {recipe} m={m}", partial(layer, recipe, m))


def cases(types: Sequence[str], only: str = "", triton: bool = False) -> Iterator[Case]:
    """Every case whose name has `only` in it; its tensors are made when its turn comes."""
    torch.manual_seed(0)
    parts: tuple[Iterator[Case], ...]
    if triton:
        parts = of_formats(types), of_ggml(types), of_layers()
    else:
        parts = (*(part(types) for part in (of_rows, of_blocks, of_transforms, of_weights)), of_experts())
    yield from (case for part in parts for case in part if only in case.name)


def main() -> None:
    """Run them, or trace them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=TYPES, default=["bf16"])
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--triton", action="store_true")
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    profiler: Any = (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) if args.trace else nullcontext()
    )
    with profiler:
        for case in cases(args.types, args.only, args.triton):
            print(case.name, flush=True)
            case.run()
            torch.cuda.synchronize()
    if args.trace:
        args.trace.write_text(json.dumps([e.name for e in profiler.events()]))
    print("finished", flush=True)


if __name__ == "__main__":
    main()
