"""Parts of a matrix that draw by their place in the whole have the whole's bytes, however it is cut."""

from __future__ import annotations

import pytest
import torch

from aoquant.distributed.shards import extremes, measure
from aoquant.formats import Random, Scales, as_operand, get_operand
from aoquant.formats.random import Place, Span, of_rank

STATE = torch.tensor([0xFEDCBA98, 0x1234567, (3 << 32) + 41])
NAMES = (
    "mxfp4-sr",
    "nvfp4-sr",
    "ms-eden",
    "rht32+mxfp4-sr",
    "rht128+ms-eden",
    "te-hadamard16-sd7e8+nvfp4-sr",
    "rht16+mxfp8",
)


def parts(rows: int, columns: int) -> dict[str, list[Place]]:
    """Ways of cutting a matrix in two."""
    all_rows, all_columns = Span(0, rows), Span(0, columns)
    c, r = columns // 2, rows // 2
    run = columns // 4
    return {
        "columns": [Place(all_rows, Span(i * c, columns)) for i in range(2)],
        "rows": [Place(Span(i * r, rows), all_columns) for i in range(2)],
        "runs of columns": [Place(all_rows, Span(i * run, columns, run, 2 * run)) for i in range(2)],
        "runs of rows": [Place(Span(i * 3, rows, 3, 6), all_columns) for i in range(2)],
    }


def shapes(how: str, rows: int, columns: int) -> tuple[int, int]:
    return (rows // 2, columns) if how.endswith("rows") else (rows, columns // 2)


@pytest.mark.parametrize("name", NAMES)
def test_parts_have_the_bytes_of_the_whole(name: str) -> None:
    operand, (rows, columns) = as_operand(get_operand(name)), (12, 512)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    x[-1, -1] = 30  # in one part alone
    whole = operand.encode(x, random=Random(STATE, 2))
    for how, places in parts(rows, columns).items():
        r, c = shapes(how, rows, columns)
        taken = [x[p.rows.places(r, x.device)][:, p.columns.places(c, x.device)] for p in places]
        randoms = [Random(STATE, 2, p) for p in places]
        held: Scales | None = None
        if operand.reach == "tensor":
            values = [operand.rotated(t, n) for t, n in zip(taken, randoms, strict=True)]
            bits = torch.stack([extremes(operand.format, v) for v in values]).amax(0)
            held = measure(operand.format, bits, values[0].dtype)
        wanted = operand.decode(whole, torch.float32)
        for place, t, random in zip(places, taken, randoms, strict=True):
            e = operand.encode(t, held, random)
            part = wanted[place.rows.places(r, x.device)][:, place.columns.places(c, x.device)]
            assert torch.equal(operand.decode(e, torch.float32), part), how


def test_ranks_draw_independently_and_rank_0_as_one_process() -> None:
    x = torch.zeros(1000, 100)
    drawn = [Random(of_rank(STATE, rank), 2).uniform(x).flatten() for rank in range(3)]
    assert torch.equal(drawn[0], Random(STATE, 2).uniform(x).flatten())
    assert torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0).abs().max() < 0.015
    assert of_rank(STATE, 1).tolist()[1:] == STATE.tolist()[1:]
