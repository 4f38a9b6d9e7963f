"""What holds a kernel back: Nsight Compute's counters beside the bytes that have to move.

    python benchmarks/ceilings.py [FORMAT ...] [--out DIR]

Needs a CUDA device and `ncu` with access to the counters. Encodes an 8192 x 4096 bf16 matrix in each format, by default
the three whose encoding is slowest against a copy in results/speed_encode.csv, and profiles every kernel of it with
cold caches. Writes benchmarks/results/ceilings_<gpu>.txt.

    us           time of the kernel, clocks as they are
    must, moved  MB that have to move, each value once, and that DRAM moved
    of copy      must / us against a copy of the same matrix
    dram, issue  % of the peak: DRAM throughput, issue slots of the schedulers
    alu fma xu   % of each pipe's peak
    warps        % of the most warps that could be resident
    regs, inst   registers of a thread; instructions of a thread for each value of the matrix
    stalls       what a warp waits for between two of its instructions, in issue cycles, the two longest
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from record_golden import versions

from aoquant import get_format
from aoquant.ops import codec

FORMATS = ("nvfp4", "fp8-tensor", "int4-g128")
ROWS, COLUMNS = 8192, 4096
STALLS = (
    "long_scoreboard",
    "short_scoreboard",
    "math_pipe_throttle",
    "wait",
    "barrier",
    "lg_throttle",
    "mio_throttle",
    "not_selected",
)
METRICS = {
    "us": "gpu__time_duration.sum",
    "read": "dram__bytes_read.sum",
    "write": "dram__bytes_write.sum",
    "dram": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "alu": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "fma": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "xu": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "registers": "launch__registers_per_thread",
    **{s: f"smsp__average_warps_issue_stalled_{s}_per_issue_active.ratio" for s in STALLS},
}


def child(names: list[str]) -> None:
    """What is profiled: for each format a copy and one encoding, after they were compiled."""
    x = torch.randn(ROWS, COLUMNS, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    for profiled in (False, True):
        if profiled:
            torch.cuda.profiler.start()
        for name in names:
            torch.neg(x, out=y)  # a copy that is a kernel: ncu does not see the copy engine
            codec.encode(get_format(name), x)
        torch.cuda.synchronize()
        if profiled:
            torch.cuda.profiler.stop()


def required(name: str) -> dict[str, float]:
    """MB that encoding has to read, and to write."""
    e = get_format(name).encode(torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="meta"))
    return {
        "read": 2e-6 * ROWS * COLUMNS,
        "write": 1e-6 * sum(t.numel() * t.element_size() for t in e[:4] if t is not None),
    }


def profile(names: list[str]) -> list[list[dict[str, str]]]:
    """For each format the counters of its kernels, the copy first."""
    command = [
        "ncu",
        "--clock-control",
        "none",
        "--profile-from-start",
        "off",
        "--csv",
        "--page",
        "raw",
        "--print-units",
        "base",
    ]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--child", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise SystemExit(f"ncu gave no counters:\n{done.stdout[-1500:]}\n{done.stderr[-500:]}")
    kernels: list[list[dict[str, str]]] = []
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if not row["ID"]:
            continue  # units
        if not kernels or row["Kernel Name"] == kernels[0][0]["Kernel Name"]:  # the copy
            kernels.append([])
        kernels[-1].append(row)
    return kernels


def line(format: str, row: dict[str, str], copy_us: float) -> str:
    value = {short: float(row[metric].replace(",", "")) for short, metric in METRICS.items() if row.get(metric)}
    us, moved = value["us"] / 1000, (value["read"] + value["write"]) / 1e6
    kernel = row["Kernel Name"].split("(")[0].split("<")[0][-28:]
    must = required(format) if format != "copy" else {"read": 2e-6 * ROWS * COLUMNS, "write": 2e-6 * ROWS * COLUMNS}
    need = must["read"] + (0.0 if "absmax" in kernel else must["write"])
    of_copy = need / us / (4e-6 * ROWS * COLUMNS / copy_us)
    stalls = sorted(((value[s], s) for s in STALLS if s in value), reverse=True)[:2]
    return (
        f"{format:12}{kernel:30}{us:7.1f}{need:8.1f}{moved:8.1f}{of_copy:8.2f}{value['dram']:7.1f}{value['issue']:7.1f}"
        f"{value['alu']:7.1f}{value['fma']:6.1f}{value['xu']:6.1f}{value['warps']:7.1f}{value['registers']:6.0f}"
        f"{value['instructions'] * 32 / (ROWS * COLUMNS):8.2f}  " + ", ".join(f"{s} {v:.1f}" for v, s in stalls)
    )


def main() -> int:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=FORMATS)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    if args.child:
        child(args.formats)
        return 0
    if shutil.which("ncu") is None:
        parser.error("ncu, Nsight Compute's command line, is not on the PATH")
    lines = [f"{key:12}{value}" for key, value in versions(torch.device("cuda")).items()]
    widths = {
        "format": -12,
        "kernel": -30,
        "us": 7,
        "must": 8,
        "moved": 8,
        "of copy": 8,
        "dram": 7,
        "issue": 7,
        "alu": 7,
        "fma": 6,
        "xu": 6,
    }
    widths |= {"warps": 7, "regs": 6, "inst": 8}
    heads = (name.rjust(w) if w > 0 else name.ljust(-w) for name, w in widths.items())
    lines += ["", "".join(heads) + "  stalls"]
    for name, (copy, *kernels) in zip(args.formats, profile(args.formats), strict=True):
        copy_us = float(copy[METRICS["us"]].replace(",", "")) / 1000
        if name == args.formats[0]:
            lines.append(line("copy", copy, copy_us))
        lines += [line(name, row, copy_us) for row in kernels]
    print("\n".join(lines))
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.get_device_name().removeprefix("NVIDIA ").lower().replace(" ", "-")
    (args.out / f"ceilings_{gpu}.txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
