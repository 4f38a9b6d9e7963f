"""Our CPU encoding reproduces what torchao and MSLK converted to on a GPU, byte for byte.

The files come from `python benchmarks/record_golden.py` on the GPU that they are named after; their metadata says which
versions made them.
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.golden_inputs import golden_input
from support.torchao_oracle import Theirs, differing, ours

from aoquant.formats import Affine, Format, Int4, get_format

FOLDER = Path(__file__).resolve().parent.parent / "golden"
FILES = sorted(FOLDER.glob("*.safetensors"))
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def load(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """ "format/dtype" -> field -> tensor."""
    cases: dict[str, dict[str, torch.Tensor]] = {}
    with safe_open(path, "pt") as file:
        for key in file.keys():  # noqa: SIM118
            case, _, field = key.rpartition("/")
            cases.setdefault(case, {})[field] = file.get_tensor(key)
    return cases


CASES = [
    pytest.param(case, fields, id=f"{path.stem}: {case}")
    for path in FILES
    for case, fields in load(path).items()
    if not case.startswith("kernel/")
]
absent = pytest.param("", {}, marks=pytest.mark.skip(f"no *.safetensors in {FOLDER}: run benchmarks/record_golden.py"))


def as_stored(fmt: Format, fields: dict[str, torch.Tensor], x: torch.Tensor) -> Theirs:
    """One-byte floats are recorded as bytes; give them the dtype that the format stores."""
    e = fmt.encode(x[:1])
    expected = ours(fmt, e)._asdict()
    return Theirs(*(None if f not in fields else fields[f].view(expected[f].dtype) for f in Theirs._fields))


@pytest.mark.parametrize(("case", "fields"), CASES or [absent])
def test_bytes_recorded_on_a_gpu(case: str, fields: dict[str, torch.Tensor]) -> None:
    name, label = case.split("/")
    fmt, dtype = get_format(name), DTYPES[label]
    x = golden_input(name, dtype)
    e = fmt.encode(x)
    assert differing(fmt, ours(fmt, e), as_stored(fmt, fields, x)) == {}
    if "raw_scale" in fields:  # before they are rounded to the weight's dtype
        raw = fmt.encode(x.float())
        assert torch.equal(fields["raw_scale"], raw.scale)
        assert torch.equal(fields["raw_zero"], raw.zero)
    if "operand" in fields:  # what MSLK's kernel puts in front of the tensor core
        assert isinstance(fmt, Int4)
        assert torch.equal(fields["operand"], fmt.operand(e, torch.bfloat16))


@pytest.mark.parametrize("path", FILES or [pytest.param("", marks=absent.marks)], ids=str)
def test_golden_file_covers_the_formats(path: Path) -> None:
    cases = {case.split("/")[0] for case in load(path)}
    assert {"int4-g128", "nvfp4", "mxfp4", "mxfp8", "fp8-row", "int8-row", "intx4-g32"} <= cases
    assert path.stat().st_size < 400_000
    with safe_open(path, "pt") as file:
        assert {"gpu", "torch", "torchao", "mslk", "triton", "cuda", "command", "date"} <= set(file.metadata())
    assert isinstance(get_format("intx4-g32"), Affine)
