"""Four-over-six, GridFlip and NVFP4's search by csrc's encoders and by Triton equal the formats to the last bit.

    python setup.py build_ext --inplace && AOQUANT_REQUIRE_GPU=1 python -m pytest -m gpu test/gpu/test_grids.py

Without the library of csrc its half is skipped, with the library's own reason.
"""

from __future__ import annotations

import pytest
import torch
from support import bits
from support.bits import differing, same_bytes
from support.gemm import with_values
from support.gpu import BF16, CUDA, F16, F32, no_waiting
from support.grid_inputs import inputs

from aoquant import backend, explain, get_format
from aoquant.formats import Encoded, Format
from aoquant.ops import CodecRequest, codec, native
from aoquant.ops.codec import cuda

pytestmark = pytest.mark.gpu

BY_TRITON = (
    "fouroversix", "gridflip", "gridflip-sided", "gridflip-search", "gridflip-alternating", "gridflip-c0.2",
    "gridflip-sided-c0.5-alternating", "fouroversix-static:0.75", "gridflip-static:2.0",
)  # fmt: skip
BY_CUDA = (
    *BY_TRITON, "hadamard16+fouroversix", "hadamard64-s5+gridflip",
    "fouroversix-mae", "fouroversix-absmax", "fouroversix-16x16", "fouroversix-mae-16x16",
    "gridflip-16x16", "gridflip-search-16x16", "gridflip-sided-alternating-16x16",
)  # fmt: skip
SEARCHES = ("nvfp4-search", "nvfp4-search-none", "nvfp4-search-static:0.001", "hadamard16+nvfp4-search")
ALL = (BF16, F16, F32)
CASES = [
    *(pytest.param("cuda", n, d, id=f"cuda-{n}-{str(d)[6:]}") for n in (*BY_CUDA, *SEARCHES) for d in ALL),
    # one dtype each, and every option once: Triton compiles each combination for seconds
    *(
        pytest.param("triton", n, d, id=f"triton-{n}-{str(d)[6:]}")
        for n, d in (
            ("fouroversix", BF16),
            ("gridflip", F16),
            ("gridflip-sided-c0.5-alternating", F32),
            ("gridflip-search", BF16),
            ("gridflip-static:2.0", BF16),
            ("fouroversix-row", BF16),
            ("gridflip-sided-alternating-row", F32),
            ("gridflip-search-row", BF16),
        )
    ),
]


def need(which: str) -> None:
    if which == "cuda" and (reason := native.why_not()):
        pytest.skip(reason)


def compare(got: Encoded, want: Encoded, what: str) -> None:
    """Compare by bits; the byte of a NaN scale too."""
    bits.compare(got, want, what)
    assert same_bytes(got.scale, want.scale), what


@pytest.mark.parametrize(("which", "name", "dtype"), CASES)
def test_bytes_and_values(which: str, name: str, dtype: torch.dtype) -> None:
    need(which)
    fmt = get_format(name)
    for kind, x_cpu in inputs(dtype).items():
        if fmt.why_not(x_cpu.shape[1], dtype):  # a transform wider than the matrix
            continue
        x, what = x_cpu.to(CUDA), f"{name} {kind}"
        want = fmt.encode(x)
        if dtype == BF16:
            bits.compare(fmt.encode(x_cpu), want, what)  # a NaN made by arithmetic is negative on x86
        with backend(which):
            compare(codec.encode(fmt, x), want, what)
            for out, operand, keep in (
                (dtype, True, True),
                (BF16, False, False),
                (F16, True, False),
                (F32, False, True),
            ):
                expected = fmt.operand(want, out) if operand else fmt.decode(want, out)
                e, values, alpha = with_values(fmt, x, out, operand=operand, keep=keep)
                assert (e is not None) == keep
                assert alpha is want.outer is None or differing(alpha, want.outer) == 0, f"{what} alpha"
                assert differing(values, expected) == 0, f"{what} -> {out}, operand={operand}"
                if e is not None:
                    compare(e, want, f"{what} with values")
                with backend("triton"):
                    decoded = codec.decode(fmt, want, out, operand=operand)
                assert differing(decoded, expected) == 0, f"{what} decoded -> {out}, operand={operand}"


@pytest.mark.parametrize(
    ("which", "name"),
    [
        *((w, n) for w in ("cuda", "triton") for n in ("fouroversix", "gridflip", "gridflip-search")),
        ("cuda", "gridflip-sided"),
        ("cuda", "nvfp4-search"),
    ],
)
def test_many_random_blocks(which: str, name: str) -> None:
    """Enough for blocks whose candidates are nearer than the rough error can tell: one in a thousand or so."""
    need(which)
    fmt = get_format(name)
    for seed, spread in enumerate((0.0, 0.5, 1.5)):
        torch.manual_seed(seed)
        x = torch.randn(2048, 4096, device=CUDA) * (torch.randn(2048, 4096, device=CUDA) * spread).exp()
        for dtype in (BF16, F32):
            with backend(which):
                compare(codec.encode(fmt, x.to(dtype)), fmt.encode(x.to(dtype)), f"{name} {spread} {dtype}")


@pytest.mark.parametrize(
    ("which", "name"),
    [*((w, n) for w in ("cuda", "triton") for n in ("fouroversix", "gridflip")), ("cuda", "nvfp4-search")],
)
def test_strides_shapes_and_offsets(which: str, name: str) -> None:
    need(which)
    fmt: Format = get_format(name)
    x = torch.randn(515, 2064, device=CUDA, dtype=BF16)
    views = (
        x,
        x[:, :16],
        x[:1, :48],
        x[1:, 16:1040],
        x.t()[:2064, :512],
        x.flatten()[1 : 1 + 64 * 48].view(64, 48),
        x[::3],
    )
    for view in views:
        with backend(which):
            compare(codec.encode(fmt, view), fmt.encode(view), f"{name} {tuple(view.shape)} {view.stride()}")


@pytest.mark.parametrize(
    ("which", "name"),
    [
        *((w, n) for w in ("cuda", "triton") for n in ("fouroversix", "gridflip", "gridflip-static:4.0")),
        ("cuda", "nvfp4-search"),
    ],
)
def test_captured_in_a_graph_on_a_stream_without_sync(which: str, name: str) -> None:
    need(which)
    fmt = get_format(name)
    source, x = torch.randn(2, 128, 512, device=CUDA, dtype=BF16)
    with backend(which):
        with_values(fmt, x, BF16, keep=True)  # compiles, loads
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with no_waiting(), torch.cuda.graph(graph, stream=stream):
            x.copy_(source)  # no kernel: an encoder that begins early has to wait for it too
            e, values, _ = with_values(fmt, x, BF16, keep=True)
    for seed in range(3):
        torch.manual_seed(seed)
        source.copy_(torch.randn_like(x) * 2.0 ** (4 * seed))
        graph.replay()
        torch.cuda.synchronize()
        want = fmt.encode(x)
        compare(e, want, f"{name}, replay {seed}")
        assert differing(values, fmt.decode(want, BF16)) == 0


@pytest.mark.parametrize("name", ["fouroversix", "gridflip-static:4.0", "nvfp4-search"])
def test_inputs_that_the_kernel_before_writes(name: str) -> None:
    """In a chain each encoder reads what the kernel before it wrote, although it may start before that one ends."""
    need("cuda")
    fmt = get_format(name)
    torch.manual_seed(5)
    xs = [torch.randn(2048, 4096, device=CUDA, dtype=BF16) * 2.0**i for i in range(6)]
    wants = [fmt.encode(x) for x in xs]
    x = torch.empty_like(xs[0])
    with backend("cuda"):
        for _ in range(20):
            got = []
            for source in xs:
                x.copy_(source)
                got.append(with_values(fmt, x, BF16, keep=True))
                x.zero_()
            for (e, values, _), want in zip(got, wants, strict=True):
                compare(e, want, name)
                assert differing(values, fmt.decode(want, BF16)) == 0


def test_cuda_goes_first_and_says_why_not() -> None:
    request = CodecRequest("quantize", get_format("gridflip"), CUDA, BF16, 16, 64)
    chosen = dict(explain(request))
    reason = native.why_not()
    assert chosen["cuda"] == (reason or "runs") and chosen["triton"] == (
        "runs" if reason else "willing, lower priority"
    )
    tiles = CodecRequest("quantize", get_format("gridflip-16x16"), CUDA, BF16, 16, 64)
    assert "not gridflip-16x16" in dict(explain(tiles))["triton"]
    other = CodecRequest("quantize", get_format("nvfp4"), CUDA, BF16, 16, 64)
    assert "values or more of nvfp4" in dict(explain(other))["cuda"]


def test_operators_by_themselves() -> None:
    need("cuda")
    x = torch.randn(32, 64, device=CUDA, dtype=BF16)
    arguments = (x, native.operator("finite_absmax")(x), 0.0, 1, 0, 1, 0.25, False, 1, True)
    torch.library.opcheck(torch.ops.aoquant_native.finite_absmax.default, (x,))
    torch.library.opcheck(torch.ops.aoquant_native.encode_grids.default, arguments)
    torch.library.opcheck(torch.ops.aoquant_native.outer_scale.default, (x, 0.5, 1.0))
    searched = (x, torch.ones(1, 1, device=CUDA), 2, False)
    torch.library.opcheck(torch.ops.aoquant_native.encode_search.default, searched)
    with pytest.raises(RuntimeError, match="K a multiple of 16"):
        native.operator("encode_grids")(x[:, :8].contiguous(), *arguments[1:])
    with pytest.raises(RuntimeError, match="K a multiple of 16"):
        native.operator("encode_search")(x[:, :8].contiguous(), *searched[1:])
    x[3, 5], x[0, 0] = float("nan"), float("-inf")
    finite = torch.where(x.isfinite(), x, 0.0)
    assert native.operator("finite_absmax")(x).view(torch.float32).max() == finite.abs().max()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("odd", [None, 0.0, float("inf"), float("-inf"), float("nan")], ids=str)
def test_the_outer_scale_of_the_search_is_the_formats(odd: float | None, dtype: torch.dtype) -> None:
    need("cuda")
    f = get_format("nvfp4-search")
    for shape in ((1, 16), (33, 176), (3000, 4096)):
        x = torch.randn(shape, device=CUDA).to(dtype) if odd != 0.0 else torch.zeros(shape, device=CUDA, dtype=dtype)
        if odd:
            x[-1, -1] = odd
        want = f.measure(x).outer
        got = cuda._outer(f, x)
        assert got is not None and want is not None and got.shape == want.shape
        assert torch.equal(got, want) or (bool(got.isnan()) and bool(want.isnan()))
