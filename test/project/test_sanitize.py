"""benchmarks/sanitize.py, as far as it goes without a GPU: it names every kernel of csrc, its cases call every operator
as the sources define it, and it reads what the tools write.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.csrc import schemas
from torch import nn

from aoquant.ops import native

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import sanitize  # noqa: E402
import sanitize_worker  # noqa: E402

TYPES = {"Tensor": torch.Tensor, "int": int, "float": float, "bool": bool}


def test_every_kernel_of_the_sources_is_in_the_table() -> None:
    sources = [*sanitize.CSRC.glob("*.cu"), *sanitize.CSRC.glob("*.cuh")]
    assert len(sanitize.defined()) == sum(len(re.findall("__global__ void", s.read_text())) for s in sources)
    assert {"decode::tiles", "encode_kernel", "rows::encode_kernel", "whole::kernel"} <= sanitize.defined()


def test_every_kernel_was_checked_or_is_named_as_not_checked() -> None:
    """The program and the page name each kernel that is newer than benchmarks/results/sanitize.csv."""
    with (sanitize.HERE / "results" / "sanitize.csv").open(encoding="utf-8", newline="") as file:
        checked = {row["kernel"] for row in csv.DictReader(file) if row["errors"] and int(row["launches"])}
    unchecked = sanitize.defined() - checked
    assert unchecked == set(sanitize.NOT_CHECKED)
    page = (ROOT / "docs" / "evidence" / "cuda-kernels.md").read_text(encoding="utf-8")
    assert [name for name in unchecked if f"`{name.rpartition('::')[2]}`" not in page] == []


MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 16 bytes
=========     at void aoquant::decode::rows_kernel<(int)1>(aoquant::DecodeArgs)+0x1230 in decode_rows.cuh:132
=========     by thread (1,0,0) in block (0,0,0)
=========         Host Frame: launch in _native.so
=========
========= Program hit unspecified launch failure
=========     Saved host backtrace up to driver entry point
========= Target application returned an error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at void aoquant::decode::tiles<(int)1>(CUtensorMap)+0x12
=========     and Read access at void aoquant::decode::tiles<(int)1>(CUtensorMap)+0x13 [16 hazards]
=========
========= Warning: Race reported between Write access at void aoquant::fitted::kernel<float, (int)16>(p)+0x1
=========     and Write access at void aoquant::fitted::kernel<float, (int)16>(p)+0x2 [1 hazards]
=========
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""


def test_reports_are_counted_by_kernel() -> None:
    assert sanitize.reports(MEMCHECK) == Counter({"decode::rows_kernel": 1, sanitize.ELSEWHERE: 1})
    assert sanitize.reports(RACECHECK) == Counter({"decode::tiles": 1, "fitted::kernel": 1})
    clean = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
    assert not sanitize.reports(clean) and not sanitize.reports("")


def test_cases_of_triton_are_formats_products_and_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU where every format has its kernels."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t)
    monkeypatch.setattr(sanitize_worker, "explain", lambda request: [("triton", "runs")])
    monkeypatch.setattr(sanitize_worker, "encoded", lambda f, x, decodes: f.encode(x))
    monkeypatch.setattr(nn.Module, "cuda", lambda m: m)
    ran = []
    for case in sanitize_worker.cases(["bf16"], triton=True):
        if " m=130" in case.name or " 130x" in case.name or " f32 " in case.name:
            continue
        case.run()
        ran.append(case.name.split()[0])
    assert {"q4_0", "intx3-g24", "nvfp4", "ggml", "layer"} <= set(ran) and ran.count("layer") > 30


@pytest.mark.slow
def test_cases_call_every_operator_as_it_is_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of x from each range, W's on each side of the bounds of the launchers."""
    called: Counter[str] = Counter()
    products: set[tuple[int, int, int]] = set()
    wide: set[tuple[bool, int]] = set()  # by `wide_takes` of csrc/expert_wide.cuh, and format

    def fits(given: Any, wanted: str) -> bool:
        if wanted.endswith("[]"):
            return type(given) is list and all(fits(v, wanted[:-2]) for v in given)
        if wanted.startswith("Optional["):
            return given is None or fits(given, wanted[len("Optional[") : -1])
        if wanted.startswith("List["):
            return type(given) is list and all(fits(v, wanted[len("List[") : -1]) for v in given)
        return type(given) is TYPES[wanted]

    def operator(name: str) -> Any:
        def run(*given: Any) -> Any:
            arguments = schemas()[name].arguments
            assert len(given) == len(arguments), name
            for value, argument in zip(given, arguments, strict=True):
                assert fits(value, str(argument.type)), (name, argument.name, value)
            called[name] += 1
            if name == "experts_mm":
                x, ends, codes, *_, many = given
                experts = ends.numel()
                wide.add((many and len(x) > 128 * experts and len(codes) // experts % 4 == 0, given[-2] & 15))
            if name == "decode_mm":
                products.add((given[0].shape[0], given[1].shape[0], given[-5]))
            return native._FAKES[name](*given) if name == "finite_absmax" else None

        return run

    small = [(n, sanitize_worker.SHORT, rows) for n, _, rows in sanitize_worker.SHAPES]
    monkeypatch.setattr(sanitize_worker, "SHAPES", small)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda t: t)
    monkeypatch.setattr(native, "operator", operator)
    for case in sanitize_worker.cases(["bf16", "f16"]):
        case.run()
    assert called.keys() == schemas().keys()
    assert wide == {(taken, format) for taken in (False, True) for format in range(4)}
    only = [case.name for case in sanitize_worker.cases(["bf16"], "wide")]
    assert len(only) == 12 and all("experts_mm" in name for name in only)
    for format in range(5):
        for n in (200, 2100, 5000, 8500, 14336):
            rows = {m for m, of, how in products if (of, how) == (n, format)}
            assert {1, 9, 16} <= rows or {1, 4, 5, 16} <= rows, (format, n)
            if n < 8300:
                assert {17, 32, 33, 64, 65, 128, 256} <= rows, (format, n)
