"""Record what a GPU really converts to, and check that aoquant computes the same bytes on it as on the CPU.

    python benchmarks/record_golden.py [--device cuda|cpu] [--out DIR]

Needs torch, torchao, safetensors and one NVIDIA GPU; without MSLK (`mslk-cuda`) the int4 part is skipped, and said so.
Takes less than a minute. Writes `test/golden/<gpu>.safetensors`, which `test/formats/test_golden.py` checks on every
CPU, and `benchmarks/results/golden_<gpu>.txt`; with `--out`, both go to DIR. `--device cpu` is a dry run, written only
with `--out`, in which torchao is given CUDA's rule for dividing by a constant (see `test/support/torchao_oracle.py`).

Report lines: OK; DIFF, torchao differs from aoquant (counted, no failure); SKIP with the reason; FAIL, which makes the
exit code 1: an exception, other bytes on the device than on the CPU, or golden bytes that our CPU does not reproduce.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test")]
sys.path.append(str(ROOT / "eval"))
if not torch.cuda.is_available():
    os.environ.setdefault("MSLK_PYTHON_ONLY", "1")  # else mslk's import breaks torchao's

from checkout import commit  # noqa: E402
from support.golden_inputs import DATA, SCALED_MM, data_set, golden_input, weights  # noqa: E402
from support.torchao_oracle import Refused, Theirs, cuda_division, differing, ours, same, torchao_encode  # noqa: E402

from aoquant.formats import Affine, Encoded, Float8, Format, Int4, get_format, list_formats  # noqa: E402
from aoquant.formats.scales import divide  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}
# 6 15 448 57344 2688: the float formats and int4; (2^b - 1) / 2 and 2^b - 1: integers of b bits
DIVISORS = (
    6.0,
    15.0,
    448.0,
    57344.0,
    2688.0,
    *((2**b - 1) / 2 for b in range(2, 9)),
    *(2.0**b - 1 for b in range(2, 9)),
)
INT4 = tuple(f"int4-g{g}" for g in (64, 128))  # 32 is silently wrong in MSLK's kernel
GOLDEN = (
    *(f"mx{e}{rule}" for e in ("fp4", "fp8", "fp8-e5m2") for rule in ("", "-floor", "-ceil", "-even")),
    *("nvfp4", "nvfp4-none", "fp8-row", "fp8-tensor", "fp8-e5m2-row", "fp8-e5m2-tensor"),
    *("int8-row", "int8-tensor", "int8-g32", "int8-row-asym", "intx8-row-asym", "intx4-row", "intx8-row"),
    *(f"intx{b}-g32" for b in range(2, 9)),
)
EXTRA = ("int4-g512", "intx4-g128", "intx4-g64-asym", "intx4-row-asym", "nvfp4-static:0.0001")
Outcome = tuple[str, str]  # status, detail


class Report:
    """Lines on the screen and in the file; counts what failed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed = 0

    def text(self, text: str) -> None:
        self.lines.append(text)
        print(text, flush=True)

    def line(self, status: str, what: str, detail: str = "") -> None:
        self.failed += status == "FAIL"
        self.text(f"{status:5}{what:50} {detail}".rstrip())

    def case(self, what: str, body: Callable[..., Outcome], *args: object, **kwargs: object) -> None:
        """Run body; an exception is a FAIL line and no more."""
        try:
            status, detail = body(*args, **kwargs)
        except Refused as e:
            status, detail = "SKIP", str(e)
        except Exception as e:
            status, detail = "FAIL", f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        self.line(status, what, detail)


def verdict(found: dict[str, int], total: int, bad: str = "FAIL") -> Outcome:
    """OK, or `bad` with the counts."""
    detail = ", ".join(f"{n} {field}" for field, n in found.items()) + " differ; " if found else ""
    return (bad if found else "OK"), f"{detail}{total} values"


def versions(device: torch.device) -> dict[str, str]:
    """Where a result comes from: the head of a result file, the first columns of a table, the golden file's metadata.

    commit: "unknown" where there is no git, as in a copy of a checkout; AOQUANT_COMMIT names it there.
    """

    def version(name: str) -> str:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "absent"

    gpu = device.type == "cuda"
    ranks = os.environ.get("WORLD_SIZE") if "TORCHELASTIC_RUN_ID" in os.environ else None
    launcher = f"torchrun --nproc-per-node {ranks}" if ranks else "python"
    return {
        "gpu": torch.cuda.get_device_name() if gpu else "none (cpu)",
        "capability": ".".join(map(str, torch.cuda.get_device_capability())) if gpu else "none",
        "cuda": torch.version.cuda or "absent",
        "torch": torch.__version__,
        "torchao": version("torchao"),
        "mslk": version("mslk-cuda"),
        "triton": version("triton"),
        "python": sys.version.split()[0],
        "command": " ".join([launcher, *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit() or "unknown",
    }


def data(name: str, rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """A data set by name, or one of the odd shapes."""
    odd: dict[str, Callable[[], Tensor]] = {
        "transposed": lambda: data_set("normal", k, rows, dtype).t(),
        "zeros": lambda: torch.zeros(rows, k, dtype=dtype),
        "one row": lambda: data_set("weights", 1, k, dtype),
        "no rows": lambda: torch.zeros(0, k, dtype=dtype),
        "ragged K": lambda: data_set("normal", 7, 33, dtype),
    }
    return odd[name]() if name in odd else data_set(name, rows, k, dtype)


def dialect(device: torch.device) -> AbstractContextManager[object]:
    """torchao as on a GPU: as it is there, with CUDA's division rule in a dry run on the CPU."""
    return nullcontext() if device.type == "cuda" else cuda_division()


def check_division(r: Report, device: torch.device) -> None:
    """`x / c` on the device against `divide` on the CPU, on all 16-bit and 2^22 float32 patterns."""
    r.text("\n# tensor / constant on the device, against aoquant's reciprocal rule on the CPU")
    for label, dtype in DTYPES.items():

        def body(dtype: torch.dtype = dtype) -> Outcome:
            if dtype == torch.float32:
                x = DATA["bits"](2048, 2048, dtype).flatten()
            else:
                x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
                x = x[x.isfinite()]
            with dialect(device):
                quotients = {c: (x.to(device) / c).cpu() for c in DIVISORS}
            found = {f"/{c:g}": int((~same(divide(x, c), q)).sum()) for c, q in quotients.items()}
            true = {f"/{c:g}": int((~same(x / c, q)).sum()) for c, q in quotients.items()}
            status, detail = verdict({c: n for c, n in found.items() if n}, x.numel())
            return (
                status,
                f"{detail}; a true division would differ in { {c: n for c, n in true.items() if n} or 'none' }",
            )

        r.case(f"divide {label}", body)


def check_devices(r: Report, device: torch.device) -> None:
    """Every format, dtype and data set: encode, operand and decode on the device equal the CPU's, byte for byte."""
    r.text(f"\n# aoquant on {device} against the CPU: codes, scales, operand(bf16), decode(f32), decode(dtype)")

    def body(fmt: Format, on_device: Format) -> Outcome:
        found: dict[str, int] = {}
        total = 0
        for label, dtype in DTYPES.items():
            for name in (*DATA, "transposed", "zeros", "one row", "no rows", "ragged K"):
                x = data(name, 24, 512, dtype)
                if fmt.why_not(x.shape[1], dtype):
                    continue
                total += x.numel()
                here, there = fmt.encode(x), on_device.encode(x.to(device))
                pairs = dict(zip(Encoded._fields[:4], zip(here[:4], there[:4], strict=True), strict=False))
                pairs["operand"] = fmt.operand(here, torch.bfloat16), fmt.operand(there, torch.bfloat16)
                pairs["decode f32"] = fmt.decode(here, torch.float32), fmt.decode(there, torch.float32)
                pairs["decode"] = fmt.decode(here, dtype), fmt.decode(there, dtype)
                for field, (a, b) in pairs.items():
                    count = int((~same(a, b.cpu())).sum()) if a is not None and b is not None else int(a is not b)
                    if count:
                        found[f"{label}/{name}/{field}"] = count
        return verdict(found, total)

    for name in (*list_formats(), *EXTRA):
        r.case(name, body, get_format(name), get_format(name))
    if device.type == "cuda":
        for name in list_formats():
            if isinstance(fmt := get_format(name), Affine | Float8):
                r.case(f"{name}-native on the GPU, {name} on the CPU", body, fmt, get_format(f"{name}-native"))


def check_torchao(r: Report, device: torch.device) -> None:
    """torchao's own conversion on the device against ours there, on larger data; counted, not judged."""
    r.text(f"\n# torchao on {device} against aoquant on {device}")

    def body(fmt: Format, dtype: torch.dtype) -> Outcome:
        found: dict[str, int] = {}
        total = 0
        for name in ("normal", "weights", "heavy", "special", "bits", "bits_in_rows"):
            x = data(name, 240, 1024, dtype).to(device)
            with dialect(device):
                theirs = torchao_encode(fmt, x)
            total += x.numel()
            found |= {f"{name}/{field}": n for field, n in differing(fmt, ours(fmt, fmt.encode(x)), theirs).items()}
        return verdict(found, total, "DIFF")

    for name in (*list_formats(), "intx4-g128", "intx4-g64-asym"):
        for label, dtype in DTYPES.items():
            r.case(f"{name} {label}", body, get_format(name), dtype)


def put(store: dict[str, Tensor], key: str, t: Theirs) -> None:
    for field, value in zip(Theirs._fields, t, strict=True):
        if value is not None:
            if value.is_floating_point() and value.element_size() == 1:
                value = value.view(torch.uint8)  # bytes: not every safetensors knows every float8
            store[f"{key}/{field}"] = value.detach().cpu().contiguous().clone()


def record_formats(r: Report, device: torch.device, store: dict[str, Tensor]) -> None:
    """Golden bytes of torchao (with MSLK, for int4) on the device; each is checked against our CPU encoding at once."""
    r.text(f"\n# golden: torchao on {device} against aoquant on the CPU")

    def body(fmt: Format, label: str) -> Outcome:
        x = golden_input(fmt.name, DTYPES[label])
        with dialect(device):
            theirs = torchao_encode(fmt, x.to(device))
        put(store, f"{fmt.name}/{label}", theirs)
        return verdict(differing(fmt, ours(fmt, fmt.encode(x)), theirs), x.numel())

    for name in (*INT4, *GOLDEN):
        for label in ("bf16", "f32"):
            r.case(f"{name} {label}", body, get_format(name), label)


def record_mslk(r: Report, device: torch.device, store: dict[str, Tensor]) -> None:
    """MSLK's int4: raw float32 quantiser outputs, and the kernel's operand tile, read with an identity matrix."""
    r.text("\n# MSLK: int4 quantiser, int4 operand tile, fp8 rows")
    try:
        import mslk  # noqa: F401
        from mslk.quantize.shuffle import int4_row_quantize_zp
        from mslk.quantize.triton.fp8_quantize import quantize_fp8_row
    except Exception as e:
        r.line(
            "SKIP", "mslk", f"not importable ({type(e).__name__}: {e}): int4 golden bytes and tiles are NOT recorded"
        )
        return

    def raw(fmt: Int4, label: str) -> Outcome:
        x = golden_input(fmt.name, DTYPES[label])
        with dialect(device):
            codes, scale, zero = int4_row_quantize_zp(x.to(device), fmt.group)
        packed = ((codes[:, ::2] & 15) | (codes[:, 1::2] << 4)).view(torch.uint8)
        if label == "bf16":  # from float32 weights Int4Tensor stores scale and zero as they are
            store[f"{fmt.name}/{label}/raw_scale"] = scale.t().contiguous().cpu()
            store[f"{fmt.name}/{label}/raw_zero"] = zero.t().contiguous().cpu()
        return verdict(differing(fmt, ours(fmt, fmt.encode(x.float())), Theirs(packed, scale.t(), zero.t())), x.numel())

    def tile(fmt: Int4, x: Tensor, key: str | None) -> Outcome:
        if device.type != "cuda":
            raise Refused("the kernel needs a GPU")
        e = fmt.encode(x)
        assert e.scale is not None
        assert e.zero is not None
        scale, zero = (t.t().contiguous().to(device) for t in (e.scale, e.zero))
        eye = torch.eye(e.k, dtype=torch.bfloat16, device=device)
        y_KN = torch.ops.mslk.bf16i4bf16_rowwise(eye, e.codes.view(torch.int8).to(device), scale, zero)
        operand = y_KN.t().contiguous().cpu()
        if key:
            store[key] = operand
        # != takes -0.0 for 0.0: the identity's zeros add +0.0 to every sum
        return verdict(
            {"operand": n} if (n := int((operand != fmt.operand(e, torch.bfloat16)).sum())) else {}, x.numel()
        )

    for name in INT4:
        fmt = get_format(name)
        for label in ("bf16", "f32"):
            key = f"{name}/{label}/operand" if name == "int4-g128" else None
            r.case(f"int4_row_quantize_zp {name} {label}", raw, fmt, label)
            r.case(f"bf16i4bf16_rowwise(eye) {name} {label}", tile, fmt, golden_input(name, DTYPES[label]), key)
            r.case(f"same, 512 x 512 {name} {label}", tile, fmt, weights(512, 512, DTYPES[label], 21), None)

    def fp8_row() -> Outcome:
        if device.type != "cuda":
            raise Refused("the Triton kernel needs a GPU")
        x = golden_input("", torch.bfloat16)
        codes, scale = quantize_fp8_row(x.to(device))
        put(store, "kernel/mslk_quantize_fp8_row/bf16", Theirs(codes, scale.reshape(-1, 1)))
        return "OK", f"recorded; {x.numel()} values"

    r.case("quantize_fp8_row bf16", fp8_row)


def record_scaled_mm(r: Report, device: torch.device, store: dict[str, Tensor]) -> None:
    """`torch._scaled_mm` on aoquant's fp8 codes of the two `SCALED_MM` matrices, for the tests of the GEMM."""
    r.text("\n# torch._scaled_mm, against float64 on the same codes")

    def body(per: str, out: torch.dtype, fast: bool, key: str) -> Outcome:
        if per == "row" and out == torch.float32:
            raise Refused("row-wise scales give bf16 alone")
        fmt = get_format(f"fp8-{per}")
        x, w = (fmt.encode(make(torch.bfloat16)) for make in SCALED_MM)
        assert x.scale is not None
        assert w.scale is not None
        y = torch._scaled_mm(
            x.codes.to(device),
            w.codes.to(device).t(),
            scale_a=x.scale.to(device),
            scale_b=w.scale.t().to(device),
            out_dtype=out,
            use_fast_accum=fast,
        ).cpu()
        store[f"kernel/{key}/out"] = y
        exact = fmt.decode(x, torch.float64) @ fmt.decode(w, torch.float64).t()
        db = 10 * torch.log10(exact.square().sum() / (y.double() - exact).square().sum())
        return "OK", f"{db:.1f} dB"

    for per in ("row", "tensor"):
        for label in ("bf16", "f32"):
            for mode in ("exact", "fast"):
                key = f"scaled_mm_{per}_{mode}/{label}"
                r.case(key, body, per, DTYPES[label], mode == "fast", key)


def main() -> int:
    """Run everything; 1 if any line says FAIL."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="write both files here")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --device cpu is a dry run")

    start = time.perf_counter()
    device = torch.device(args.device)
    r, meta = Report(), versions(device)
    store: dict[str, Tensor] = {}
    for key, value in meta.items():
        r.text(f"{key:12}{value}")
    # what the file needs comes first
    for step in (record_formats, record_mslk, record_scaled_mm):
        step(r, device, store)
    for check in (check_division, check_torchao, check_devices):
        check(r, device)
    size = sum(t.numel() * t.element_size() for t in store.values()) / 1000
    r.text(f"\n{len(store)} golden tensors, {size:.0f} kB; {r.failed} failures; {time.perf_counter() - start:.0f} s")

    gpu = meta["gpu"].removeprefix("NVIDIA ").lower().replace(" ", "-") if device.type == "cuda" else "cpu"
    if device.type == "cuda" or args.out:
        from safetensors.torch import save_file

        golden_dir, report_dir = args.out or ROOT / "test/golden", args.out or ROOT / "benchmarks/results"
        for folder in (golden_dir, report_dir):
            folder.mkdir(parents=True, exist_ok=True)
        save_file(store, golden_dir / f"{gpu}.safetensors", metadata=meta)
        (report_dir / f"golden_{gpu}.txt").write_text("\n".join(r.lines) + "\n")
        print(f"wrote {golden_dir / f'{gpu}.safetensors'} and {report_dir / f'golden_{gpu}.txt'}")
    return int(r.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
