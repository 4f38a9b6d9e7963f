"""Formats for gradients on a GPU: Triton and the CUDA reference give the CPU's bytes; no step waits for the device."""

from __future__ import annotations

import copy

import pytest
import torch
from support.bits import same
from support.gemm import with_values
from support.gpu import captured
from torch import Tensor, nn

from aoquant import QATConfig, backend, explain, get_format, quantize_
from aoquant.formats import Random, as_operand
from aoquant.formats.random import Place, Span
from aoquant.linear.prepared import RANDOM
from aoquant.ops import CodecRequest, codec
from aoquant.recipes import get_recipe

pytestmark = pytest.mark.gpu

BF16, F32 = torch.bfloat16, torch.float32
NAMES = ("mxfp4-sr", "nvfp4-sr", "ms-eden")
ALL = [*NAMES, "rht32+mxfp4-sr", "rht128+ms-eden", "rht16+nvfp4-sr", "rht64+nvfp4-sr"]
STATE = torch.tensor([0xFEDCBA98, 0x1234567, (3 << 32) + 41])


def inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    """name -> matrix on the CPU, K a multiple of 128."""
    generator = torch.Generator().manual_seed(2)
    normal = torch.randn(100, 384, generator=generator)
    spread = normal * 2.0 ** torch.randint(-60, 60, (100, 1), generator=generator)
    broken = normal.clone()
    broken[3, 7], broken[5, 300], broken[9, 0] = float("nan"), float("inf"), -float("inf")
    made = {
        "normal": normal * 0.02,
        "spread": spread,
        "zeros": torch.zeros(4, 128),
        "broken": broken,
        "tiny": normal * 1e-30,
    }
    made["ties"] = torch.randint(-60, 61, (64, 256), generator=generator) * 0.125
    made["long"] = torch.randn(131, 1024, generator=generator)
    return {name: x.to(dtype) for name, x in made.items()}


def laid_out(x: Tensor, across: bool) -> Tensor:
    """x on the GPU; across: as a transposed view of what is contiguous."""
    x = x.cuda()
    return x.t().contiguous().t() if across else x


@pytest.mark.parametrize(
    ("dtype", "across"), [(BF16, False), (F32, False), (BF16, True)], ids=["bf16", "f32", "bf16-across"]
)
@pytest.mark.parametrize("name", ALL)
def test_bytes_are_the_cpus(name: str, dtype: torch.dtype, across: bool) -> None:
    f = get_format(name)
    assert f.draws
    for kind, x in inputs(dtype).items():
        for side in (0, 3):
            want = f.encode(x, random=Random(STATE, side))
            random = Random(STATE.cuda(), side)
            request = CodecRequest("quantize", f, torch.device("cuda"), dtype, *x.shape)
            assert dict(explain(request))["triton"] == "runs"
            triton = with_values(f, laid_out(x, across), dtype, operand=True, keep=True, random=random)
            with backend("reference"):
                reference = with_values(f, x.cuda(), dtype, operand=True, keep=True, random=random)
            for what, got in (("triton", triton), ("reference", reference)):
                e = got.encoded
                assert torch.equal(e.codes.cpu(), want.codes), f"{what} codes, {kind}"
                assert same(e.scale, want.scale), f"{what} scales, {kind}"
                assert same(got.alpha, want.outer), f"{what} outer, {kind}"
                assert same(got.values, f.operand(want, dtype)), f"{what} operand, {kind}"


@pytest.mark.parametrize("across", [False, True], ids=["rows", "across"])
@pytest.mark.parametrize("name", ALL)
def test_parts_draw_the_bytes_of_the_whole(name: str, across: bool) -> None:
    """Rows, columns and runs of columns, under the outer scale of the whole where there is one."""
    f, (rows, columns) = as_operand(get_format(name)), (96, 1024)
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole = f.encode(x, random=Random(STATE, 2))
    wanted = f.operand(whole, BF16)
    for place, r, c in (
        (Place(Span(32, rows), Span(0, columns)), 32, columns),
        (Place(Span(0, rows), Span(512, columns)), rows, 512),
        (Place(Span(0, rows), Span(256, columns, 256, 512)), rows, 512),
        (Place(Span(16, rows, 16, 32), Span(0, columns)), 48, columns),
    ):
        at = place.rows.places(r, x.device).unsqueeze(1), place.columns.places(c, x.device)
        given = None if whole.outer is None or "mxfp4" in name else whole.outer.cuda()
        random = Random(STATE.cuda(), 2, place)
        got = with_values(f, laid_out(x[at], across), BF16, operand=True, keep=True, measured=given, random=random)
        assert same(got.values, wanted[at]), str(place)
        assert same(got.alpha, whole.outer), str(place)


@pytest.mark.parametrize(
    ("dtype", "across"), [(BF16, False), (F32, False), (BF16, True)], ids=["bf16", "f32", "bf16-across"]
)
@pytest.mark.parametrize("name", ["rht16+mxfp8", "rht32+xx-mxfp4", "rht64+xx-mxfp4", "rht128+nvfp4"])
def test_a_rotation_before_another_format_is_the_cpus(name: str, dtype: torch.dtype, across: bool) -> None:
    f = as_operand(get_format(name))
    assert f.transform is not None
    for kind, x in inputs(dtype).items():
        for side in (0, 3):
            want = f.transform.apply(x, False, Random(STATE, side).signs(f.transform.size))
            request = CodecRequest("transform", f, torch.device("cuda"), dtype, *x.shape)
            assert dict(explain(request))["triton"] == "runs"
            got = codec.transform(f, laid_out(x, across), Random(STATE.cuda(), side))
            assert same(got, want), kind


def layer(recipe: str, dtype: torch.dtype = BF16) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Linear(512, 384, dtype=dtype)})
    r = get_recipe(recipe)
    quantize_(model, QATConfig(r.make(), **r.training))
    return model["layer"].cuda()


@pytest.mark.parametrize("recipe", ["quartet", "quartet2"])
def test_gradients_are_the_cpus_up_to_the_order_of_sums(recipe: str) -> None:
    on_gpu = layer(recipe)
    on_cpu = copy.deepcopy(on_gpu).cpu()
    x, g = torch.randn(300, 512, dtype=BF16), torch.randn(300, 384, dtype=BF16)
    for _ in range(2):
        found = []
        for one, device in ((on_cpu, "cpu"), (on_gpu, "cuda")):
            one.zero_grad()
            z = x.to(device, copy=True).requires_grad_()
            one(z).backward(g.to(device))
            found.append([t.float().cpu() for t in (z.grad, one.weight.grad, one.bias.grad)])
        for a, b in zip(*found, strict=True):
            assert 10 * torch.log10(a.square().sum() / (a - b).square().sum()) > 45
    assert torch.equal(getattr(on_gpu, RANDOM).cpu(), getattr(on_cpu, RANDOM))
    assert int(getattr(on_gpu, RANDOM)[2]) == 2


@pytest.mark.parametrize("recipe", ["quartet", "quartet2"])
def test_a_captured_step_draws_anew_at_every_replay(recipe: str) -> None:
    one = layer(recipe)
    x, g = (torch.randn(256, n, dtype=BF16, device="cuda") for n in (512, 384))
    state = getattr(one, RANDOM)

    def step() -> None:
        one.weight.grad = None
        one(x).backward(g)

    graph, _ = captured(step)
    gradient = one.weight.grad
    start = int(state[2])
    grads = []
    for _ in range(2):
        graph.replay()
        grads.append(gradient.clone())
    assert int(state[2]) == start + 2 and not torch.equal(*grads)
    state[2] = start
    for want in grads:
        step()
        assert torch.equal(one.weight.grad, want)
