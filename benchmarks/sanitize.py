"""compute-sanitizer over every kernel of csrc, or over Triton's: addresses out of bounds, and races in shared memory.

    python benchmarks/sanitize.py [--triton] [--tools memcheck racecheck] [--types bf16 f16] [--only TEXT]
        [--limit SECONDS] [--out DIR]

Needs compute-sanitizer and, for csrc's kernels, a Hopper GPU and csrc. sanitize_worker.py launches the kernels, first
under torch's profiler, which says which of them ran, then once under each tool. A tensor is an allocation of its own
there, with a gap behind it, so that a byte beyond its end is an error. The exit code is 1 where a tool found something,
a run did not end, or a kernel of csrc's sources was not launched.

Prints a table and writes benchmarks/results/sanitize.csv; the tools' own words go to DIR/sanitize_TOOL.log.

    launches, forms  how often a kernel was launched, and how many instances of its template
    errors           reports of the tool that name it. "" where the run did not end: the note says in which case

`--only` runs the cases whose names have TEXT in them, where the time is too short for all. `--triton` checks
every kernel that its cases launch, PyTorch's too, and writes rows of aoquant's. In the file a run replaces the rows of
the kernels that it launched, for the tools that it ran, and leaves the others; a run of all kernels of csrc replaces
all of theirs. Each row has its own command.

Versions of compute-sanitizer differ: before 2026.3 racecheck reports races that are none where barriers count bytes of
the copy engine (its release notes), which `tiles`, `tiles_once` and encode_tensor.cuh's `kernel` wait for.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Container
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from record_golden import versions

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent / "csrc"
TRITON = HERE.parent / "aoquant" / "ops" / "triton"
WORKER = HERE / "sanitize_worker.py"
TOOLS = {"memcheck": ["--padding", "256"], "racecheck": [], "synccheck": [], "initcheck": []}
ELSEWHERE = "elsewhere"  # reports that name no kernel of ours
# as profilers and sanitizers write it: aoquant::(anonymous namespace)::kernel<...>(...)
NAME = re.compile(r"aoquant::(?:\(anonymous namespace\)::)?((?:\w+::)*\w+)\s*[<(+]")
# kernels that the run in results/sanitize.csv does not have: written after it. A new run empties this
NOT_CHECKED: tuple[str, ...] = ()
NAMESPACE = re.compile(r"namespace (?:aoquant::)?(\w+) \{")


class Run(NamedTuple):
    """What a tool said: reports by kernel, and why it is not the whole (""  where it is)."""

    errors: Counter[str]
    note: str


def defined() -> set[str]:
    """The kernels of the sources, with the namespaces that they have inside aoquant."""
    found = set()
    for source in (*CSRC.glob("*.cu"), *CSRC.glob("*.cuh")):
        text = source.read_text()
        for match in re.finditer(r"__global__ void __launch_bounds__", text):
            name = re.search(r"\)\s+(\w+)\(", text[match.end() :])
            assert name is not None, source
            inside = [n for n in NAMESPACE.findall(text[: match.start()]) if n != "aoquant"]
            found.add("::".join([*inside[-1:], name[1]]))
    return found


@cache
def jitted() -> re.Pattern[str]:
    """Names of the functions that Triton compiles, kernels among them."""
    sources = [file.read_text() for file in TRITON.glob("*.py")]
    names = {name for text in sources for name in re.findall(r"@triton\.jit\n(?:@.*\n)*def (\w+)", text)}
    return re.compile(rf"(?:^|\bat )({'|'.join(sorted(names))})\b")


def named(text: str) -> str | None:
    """The kernel that a line names, as `defined` has it; Triton's behind "triton::"."""
    if match := NAME.search(text):
        return match[1]
    match = jitted().search(text.strip())
    return f"triton::{match[1]}" if match else None


def reports(log: str) -> Counter[str]:
    """Reports of a tool, by the kernel that they name first."""
    found: Counter[str] = Counter()
    current: list[str] = []
    for line in [*log.splitlines(), "========= end"]:
        said = line.removeprefix("=========")
        if said == line:
            continue
        if said[:2].strip() and not said.startswith("     "):  # a heading: the report before it is complete
            if current and not re.search(
                r"SUMMARY|COMPUTE-SANITIZER|Target application|This tool is deprecated", current[0]
            ):
                found[next((name for part in current if (name := named(part))), ELSEWHERE)] += 1
            current = []
        current.append(said)
    return found


def sanitized(tool: str, cases: list[str], limit: float, out: Path) -> Run:
    """Run the cases under a tool. cases: the worker's arguments that say which."""
    log = out / f"sanitize_{tool}.log"
    command = ["compute-sanitizer", "--tool", tool, *TOOLS[tool]]
    if "--triton" not in cases:
        command += ["--kernel-name", "kernel_substring=aoquant"]
    command += ["--report-api-errors", "no", "--print-limit", "0", "--log-file", str(log)]
    command += [sys.executable, str(WORKER), *cases]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)
        said, wrong = done.stdout, f"rc {done.returncode}: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired as late:
        said, wrong = (late.stdout or b"").decode(), f"{limit:.0f} s were over"
    lines = said.split("\n")[:-1] or ["none"]
    text = log.read_text() if log.exists() else ""
    return Run(reports(text), "" if lines[-1] == "finished" else f"ended in case {len(lines)}, {lines[-1]}; {wrong}")


def launched(cases: list[str]) -> list[str]:
    """Names of all kernels that the cases launch."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        command = [sys.executable, str(WORKER), *cases, "--trace", str(trace)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"the cases fail without a sanitizer:\n{done.stdout[-300:]}\n{done.stderr[-2000:]}")
        names: list[str] = json.loads(trace.read_text())
    return names


def kept(file: Path, rows: list[dict[str, str]], whole: Container[str] = ()) -> list[dict[str, str]]:
    """The file's rows of kernels and tools that `rows` have not. whole: tools that checked all kernels of csrc."""
    new = {(row["kernel"], row["tool"]) for row in rows}
    with file.open(encoding="utf-8", newline="") as opened:
        old = [row for row in csv.DictReader(opened) if (row["kernel"], row["tool"]) not in new]
    return [row for row in old if row["tool"] not in whole or row["kernel"].startswith("triton::")]


def main() -> int:
    """Print and write the table; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", action="store_true", help="Triton's kernels in place of csrc's")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--types", nargs="+", choices=("bf16", "f16"), default=["bf16"])
    parser.add_argument("--only", default="", metavar="TEXT", help="of the cases' names")
    parser.add_argument("--limit", type=float, default=250.0, help="seconds for a tool")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    if not torch.cuda.is_available() or (not args.triton and torch.cuda.get_device_capability() != (9, 0)):
        parser.error("needs a GPU, for the kernels of csrc a Hopper one")
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer, of the CUDA toolkit, is not on the PATH")
    args.out.mkdir(parents=True, exist_ok=True)
    cases = ["--types", *args.types, "--only", args.only, *(["--triton"] if args.triton else [])]
    names = launched(cases)
    launches = Counter(filter(None, map(named, names)))
    forms = Counter(filter(None, map(named, set(names))))
    runs = {tool: sanitized(tool, cases, args.limit, args.out) for tool in args.tools}
    said = subprocess.run(["compute-sanitizer", "--version"], capture_output=True, text=True, check=False).stdout
    where = versions(torch.device("cuda")) | {"sanitizer": said.strip().splitlines()[-1] if said else "?"}
    rows = []
    some = args.only or args.triton
    expected = set() if some else defined()
    ran = {k for k in launches if k.startswith("triton::")} if args.triton else launches.keys()
    for kernel in sorted(expected | ran | {k for run in runs.values() for k in run.errors}):
        for tool, run in runs.items():
            ended = "" if run.note and not run.errors[kernel] else str(run.errors[kernel])
            rows.append(
                {"kernel": kernel, "launches": str(launches[kernel]), "forms": str(forms[kernel]), "tool": tool,
                 "errors": ended, "note": run.note} | where
            )  # fmt: skip
            print(f"{kernel:24}{launches[kernel]:6}{forms[kernel]:5}  {tool:10}{ended or '-':>6}")
    for tool, run in runs.items():
        print(f"{tool}: {sum(run.errors.values())} reports{'; ' + run.note if run.note else ''}")
    table = args.out / "sanitize.csv"
    if table.exists():
        rows = sorted(
            [*kept(table, rows, () if some else args.tools), *rows], key=lambda row: (row["kernel"], row["tool"])
        )
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    if missing := sorted(expected - launches.keys()):
        print(f"not launched: {', '.join(missing)}")
    return int(bool(missing) or any(run.note or run.errors for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
