"""The ops are well-formed for compilers, and the router runs what it says it runs."""

from __future__ import annotations

import _thread
import contextvars
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from support.bits import same_bytes, unequal_parts
from support.formats import ONE_OF_EACH as FORMATS
from support.gemm import arguments, coded, dgrad, kept, parts, wgrad
from support.linear_cases import BF16, F32, assert_equal, data, dtype_name
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from aoquant import backend, explain, get_format, ops
from aoquant.formats import Encoded, Scales, get_operand
from aoquant.ops import CONTRACTS, Request, flops, router

K, N, M = 192, 16, 6  # a multiple of every block; N and K of 16 for torch._scaled_mm

# contract -> (x format, w format): one pair that each contract is used with
OPERANDS = {
    "aoquant": ("nvfp4", "nvfp4"),
    "bias_after": ("", "int4-g64"),
    "fp8_bias_after": ("fp8-row-mslk", "int4-e4m3-row-g64"),
    "tinygemm_cuda": ("", "int4-tinygemm-g64"),
    "tinygemm_cpu": ("", "int4-tinygemm-cpu-g64"),
    "dequantize": ("intx8-row-asym-native", "intx4-g32"),
    "dequantize_flat": ("mxfp8", "mxfp8"),
    "matmul_bias": ("", "fp8-row"),
    "int8_rescale": ("", "int8-row"),
    "int8_dynamic": ("int8-row-asym-native", "int8-row"),
    "fp8_scaled_mm": ("fp8-row-native", "fp8-row"),
    "fp8_scaled_mm_precise": ("fp8-tensor-native", "fp8-tensor"),
    "fp8_blocks": ("fp8-1x64-native", "fp8-8x64"),
    "fp8_mslk": ("fp8-row-mslk", "fp8-row-mslk"),
    "fp8_mslk_precise": ("fp8-row-mslk", "fp8-row-mslk"),
    "nvfp4_rescale": ("nvfp4", "nvfp4"),
    "ggml": ("q8_0-x86", "q4_0"),
}


def encoded(name: str, x: Tensor) -> Encoded:
    return get_operand(name).encode(x)


def gemm(
    contract: str, dtype: torch.dtype = BF16, *, m: int = M, n: int = N, k: int = K, bias: bool = True
) -> tuple[Any, ...]:
    """Arguments of `ops.scaled_mm` under `contract`."""
    x_name, w_name = OPERANDS[contract]
    x, w = data("normal", m, k, dtype, 1), data("normal", n, k, dtype, 2)
    x_q = encoded(x_name, x) if x_name else x
    b = data("normal", 1, n, dtype, 3)[0] if bias else None
    return arguments(x_q, encoded(w_name, w), b, x_name, w_name, contract, [m], dtype)


def request(contract: str, **options: Any) -> Request:
    x_name, w_name = OPERANDS[contract]
    shape = {"m": M, "n": N, "k": K, "device": torch.device("cpu"), "dtype": BF16} | options
    return Request(contract, get_format(x_name) if x_name else None, get_format(w_name), **shape)


@pytest.mark.parametrize("contract", OPERANDS)
def test_a_wider_bias_leaves_the_results_dtype(contract: str) -> None:
    given = list(gemm(contract))
    given[2] = given[2].float()
    with backend("reference", role="gemm"):
        assert ops.matmul(*given).y.dtype is BF16


# Schemas, fakes, autograd registration and symbolic shapes


def opcheck(op: Any, *args: Any, only: tuple[str, ...] = (), symbolic: bool = True, **named: Any) -> None:
    """PyTorch's checks; its schema check compares inputs with allclose, which float8 lacks, so that one is done here by
    bytes. only: these alone. symbolic: with the one that takes ten times as long as the others together.
    """
    op, args = op.overload, tuple(op.flat(*args, **named))
    tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    float8 = any(t.is_floating_point() and t.element_size() == 1 for t in tensors)
    left_out = ({"test_schema"} if float8 else set()) | (set() if symbolic else {SYMBOLIC})
    torch.library.opcheck(op, args, test_utils=only or [u for u in OPCHECKS if u not in left_out])
    before = [t.clone() for t in tensors]
    outputs = op(*args)
    assert all(same_bytes(t, b) for t, b in zip(tensors, before, strict=True))
    results = [t for t in tree_leaves(outputs) if t is not None and t.numel()]
    storages = [t.untyped_storage()._cdata for t in (*tensors, *results) if t.numel()]
    distinct_inputs = len({t.untyped_storage()._cdata for t in tensors if t.numel()})
    assert len(set(storages)) == distinct_inputs + len(results), "an output is an alias"


# Traces with symbolic sizes: operands of TRACED here, and `slow` for the others, for float32, and for empty inputs,
# whose size 0 is no symbol.
TRACED = ("int4-g32", "intx8-row-asym-native", "fp8-row", "nvfp4", "hadamard16+nvfp4")
SYMBOLIC = "test_aot_dispatch_dynamic"
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", SYMBOLIC)


@pytest.mark.parametrize("rows", [5, 0], ids=["rows", "empty"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
@pytest.mark.parametrize("name", FORMATS)
def test_encode_is_well_formed(name: str, dtype: torch.dtype, rows: int) -> None:
    x = data("normal", rows, K, dtype)
    opcheck(ops.encode, x, get_operand(name), symbolic=name in TRACED and dtype == BF16 and rows > 0)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [5, 0], ids=["rows", "empty"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
@pytest.mark.parametrize("name", FORMATS)
def test_encode_is_traced_with_symbolic_sizes(name: str, dtype: torch.dtype, rows: int) -> None:
    opcheck(ops.encode, data("normal", rows, K, dtype), get_operand(name), only=(SYMBOLIC,))


@pytest.mark.parametrize("name", FORMATS)
def test_codes_and_scales_are_contiguous_whatever_the_input(name: str) -> None:
    """A fake knows shapes only: a stride that followed the input's would break compiled graphs, loaders and kernels."""
    x = data("normal", 5, K, BF16)
    for strided in (x.t().contiguous().t(), torch.cat((x, x), 1)[:, :K]):
        opcheck(ops.encode, strided, get_operand(name), only=("test_faketensor",))
        made, same = (coded(t, get_operand(name)) for t in (strided, x))
        for part, want in zip(parts(made), parts(same), strict=True):
            assert part.is_contiguous() and torch.equal(part.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
@pytest.mark.parametrize("contract", CONTRACTS)
def test_scaled_mm_is_well_formed(contract: str, dtype: torch.dtype) -> None:
    for bias in (True, False):
        opcheck(ops.matmul, *gemm(contract, dtype, bias=bias), symbolic=bias and dtype == BF16)


@pytest.mark.slow
@pytest.mark.parametrize("contract", CONTRACTS)
def test_scaled_mm_is_traced_with_symbolic_sizes(contract: str) -> None:
    for dtype, bias in ((BF16, False), (F32, True), (F32, False)):
        opcheck(ops.matmul, *gemm(contract, dtype, bias=bias), only=(SYMBOLIC,))


@pytest.mark.parametrize("lead", [[M], [2, 3], [0]], ids=["rows", "batch", "empty"])
@pytest.mark.parametrize("contract", [c for c, (x_name, _) in OPERANDS.items() if x_name])
def test_an_input_is_encoded_with_the_product(contract: str, lead: list[int]) -> None:
    """As before it, for every contract that reads codes, operands or decoded values of x; also by the dispatcher."""
    x_name, w_name = OPERANDS[contract]
    x, w = data("outlier", math.prod(lead), K, BF16, 1).view(*lead, K), data("normal", N, K, BF16, 2)
    x_q = encoded(x_name, x.reshape(-1, K))
    for of_w in (encoded(w_name, w), w):
        given, want = (arguments(of_x, of_w, None, x_name, w_name, contract, lead, BF16) for of_x in (x, x_q))
        with torch.no_grad():
            assert_equal(ops.matmul(*given).y, ops.matmul(*want).y)
        assert_equal(ops.matmul(*given).y, ops.matmul(*want).y)
        opcheck(ops.matmul, *given, symbolic=False)


@pytest.mark.parametrize("m", [M, 0], ids=["rows", "empty"])
@pytest.mark.parametrize("name", ["nvfp4", "hadamard16+nvfp4"])
@pytest.mark.parametrize("contract", ["aoquant", "nvfp4_rescale", "dequantize"])
def test_scaled_mm_that_measures_is_well_formed(contract: str, name: str, m: int) -> None:
    """It gives `scaled_mm`'s y, and the outer scale that W is encoded with; each is memory of its own."""
    assert ops.finds_outer(get_operand(name))
    x, w = data("normal", m, K, BF16, 1), data("outlier", N, K, BF16, 2)
    rest = None, name, name, contract, [m], BF16
    args = arguments(encoded(name, x), w, *rest)
    opcheck(ops.matmul, *args)
    with torch.no_grad():
        direct = ops.matmul(*args)
    y, kept, outer = ops.matmul(*args)
    assert kept is None
    e = coded(w, get_operand(name))
    assert_equal(y, ops.matmul(*arguments(encoded(name, x), e, *rest)).y)
    assert outer is not None and direct.measured is not None and e.outer is not None
    assert_equal(outer, e.outer)
    assert_equal(direct.y, y)
    assert_equal(direct.measured, outer)


@pytest.mark.parametrize("name", [n for n in FORMATS if n != "nvfp4"])
def test_only_a_dynamic_outer_scale_is_measured(name: str) -> None:
    assert not ops.finds_outer(get_operand(name))


def test_scaled_mm_is_well_formed_for_strided_and_nd_inputs() -> None:
    w, name = encoded("intx4-g32", data("normal", N, K, BF16)), "intx8-row-asym-native"
    x = data("normal", M, K, BF16, 1).view(2, 3, K).transpose(0, 1)
    opcheck(ops.matmul, *arguments(x, w, None, "", "intx4-g32", "dequantize", [3, 2], BF16))
    rest = None, name, "intx4-g32", "dequantize", [3, 2], BF16
    opcheck(ops.matmul, *arguments(encoded(name, x.reshape(-1, K)), w, *rest, strides=list(x.stride())))


def symbolic(names: tuple[str, ...]) -> pytest.MarkDecorator:
    """(name, whether to trace with symbolic sizes)."""
    others = [pytest.param(name, True, marks=pytest.mark.slow) for name in names if name not in TRACED]
    return pytest.mark.parametrize(("name", "symbolic"), [*((name, name in TRACED) for name in names), *others])


@symbolic(FORMATS)
def test_gradient_ops_are_well_formed(name: str, symbolic: bool) -> None:
    x, w, g = data("normal", M, K, BF16, 1), data("normal", N, K, BF16, 2), data("normal", M, N, BF16, 3)
    operand = get_operand(name)
    opcheck(ops.gradients, g, kept(w, operand), None, symbolic=symbolic)
    opcheck(ops.gradients, g, kept(encoded(name, w), operand), None, symbolic=symbolic)
    opcheck(ops.gradients, g, None, kept(encoded(name, x), operand), symbolic=symbolic)
    opcheck(ops.saturated, x, operand, symbolic=symbolic)


@pytest.mark.parametrize(
    ("name", "contract"),
    [
        ("te-nvfp4-16x16", "aoquant"),
        pytest.param("mxfp8", "aoquant", marks=pytest.mark.slow),
        ("te-fp8-tensor", "fp8_scaled_mm"),
    ],
)
def test_a_product_that_keeps_the_weights_codes_is_well_formed(name: str, contract: str) -> None:
    """And its parts are those of the two ops that it stands for."""
    x, w, operand = data("normal", M, K, BF16, 1), data("normal", N, K, BF16, 2), get_operand(name)
    how = None, operand, operand, contract, [M], BF16
    opcheck(ops.matmul, encoded(name, x), w, *how, keep=True)
    got, e = ops.matmul(encoded(name, x), w, *how, keep=True), coded(w, operand)
    assert got.w is not None and got.w.k == K and got.measured is None
    assert not unequal_parts(got.w, e) and same_bytes(got.y, ops.matmul(encoded(name, x), e, *how).y)


def test_gradients_are_those_of_both_gemms() -> None:
    """dy's codes or operands are made once; the bits are those of each alone, and so is what is counted."""
    x, w, g = data("normal", M, K, BF16, 1), data("normal", N, K, BF16, 2), data("normal", M, N, BF16, 3)
    e5m2, e4m3, mx = (get_operand(name) for name in ("te-fp8-e5m2-tensor", "te-fp8-tensor", "mxfp8"))
    fp8 = e5m2, e4m3, "fp8_scaled_mm_precise"
    flops.register()
    for of_w, of_x in (
        [kept(coded(t, e4m3), keeps="square", gemm=fp8) for t in (w, x)],
        [kept(t, gemm=(mx, mx)) for t in (w, x)],
        [kept(t, mx, gemm=(mx, mx)) for t in (w, coded(x, mx))],
    ):
        with FlopCounterMode(display=False) as together:
            got = ops.gradients(g, of_w, of_x)
        with FlopCounterMode(display=False) as apart:
            want = dgrad(g, of_w), wgrad(g, of_x)
        assert torch.equal(got.dx, want[0]) and torch.equal(got.dw, want[1])
        assert together.get_total_flops() == apart.get_total_flops() == 4 * M * N * K


@symbolic(("hadamard16+nvfp4", "hadamard32-s5-inverse+mxfp4", "wush16+nvfp4"))
def test_ops_behind_a_transform_are_well_formed(name: str, symbolic: bool) -> None:
    """T is an argument where it is data."""
    x, w, g = data("normal", M, K, BF16, 1), data("normal", N, K, BF16, 2), data("normal", M, N, BF16, 3)
    t = torch.randn(K // 16, 16, 16) if name.startswith("wush") else None
    held, operand = Scales(transform=t), get_operand(name)
    opcheck(ops.encode, x, operand, None, held, symbolic=symbolic)
    opcheck(ops.encode, x[:0], operand, None, held, symbolic=False)
    opcheck(ops.gradients, g, kept(w, operand, held), None, symbolic=symbolic)
    opcheck(ops.gradients, g, None, kept(x, operand, held), symbolic=symbolic)
    opcheck(ops.saturated, x, operand, held, symbolic=symbolic)
    opcheck(ops.pull_back, x, operand, t, symbolic=symbolic)
    opcheck(ops.pull_back, x.t().contiguous().t(), operand, t, symbolic=symbolic)


@pytest.mark.parametrize("rows", [5, pytest.param(0, marks=pytest.mark.slow)], ids=["rows", "empty"])
@pytest.mark.parametrize(
    "names", [("te-nvfp4", "te-hadamard16-sd7e8+te-nvfp4"), pytest.param(("mxfp8", "te-nvfp4"), marks=pytest.mark.slow)]
)
def test_encoding_both_sides_of_an_input_is_well_formed(names: tuple[str, str], rows: int) -> None:
    """And its parts are those of each side alone."""
    x, (operand, columns_as) = data("normal", rows, K, BF16), map(get_operand, names)
    opcheck(ops.encode, x, operand, columns_as, None, "operand", 32)
    got = ops.encode(x, operand, columns_as, None, "operand", 32)
    row, col = ops.encode(x, operand, None, None, "operand").row, ops.encode(x, None, columns_as, multiple=32).col
    assert got.row is not None and got.col is not None and row is not None and col is not None
    assert got.row.codes.k == row.codes.k == K and got.col.codes.k == col.codes.k == 32
    assert not unequal_parts(got.row.codes, row.codes) and not unequal_parts(got.col.codes, col.codes)
    assert same_bytes(got.row.values, row.values)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
def test_bias_gradient_op_is_well_formed(dtype: torch.dtype) -> None:
    opcheck(ops.bgrad, data("normal", M, N, BF16), dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_the_dispatcher_and_the_body_give_the_same_encoded_matrix(name: str) -> None:
    """With gradients on a call goes through the registered op, without them straight to the body; a missing part is
    None either way.
    """
    x, operand = data("normal", 5, K, BF16), get_operand(name)
    registered = coded(x, operand)
    with torch.no_grad(), mock.patch.object(ops.encode, "overload", None):
        direct = coded(x, operand)
    assert direct.k == registered.k == K
    assert not unequal_parts(direct, registered)


def test_no_body_is_given_a_tensor_that_torch_has_yet_to_negate() -> None:
    """A view such as the imaginary part of a conjugate: kernels read its memory, which has the other sign."""
    x, operand, given = torch.randn(5, K, dtype=torch.complex64).conj().imag, get_operand("nvfp4"), list[Tensor]()
    real = ops.encode.body
    with torch.no_grad(), mock.patch.object(ops.encode, "body", lambda t, *rest: given.append(t) or real(t, *rest)):
        made = coded(x, operand)
        assert not unequal_parts(made, coded(x.resolve_neg(), operand))
    assert x.is_neg() and len(given) == 2 and not any(t.is_neg() for t in given)


# The router


@pytest.mark.parametrize("contract", CONTRACTS)
def test_explain_gives_every_backend_a_verdict_and_one_runs(contract: str) -> None:
    rows = explain(request(contract))
    assert [name for name, _ in rows] == ops.backend_names() and rows[-1][0] == "reference"
    assert [verdict for _, verdict in rows].count("runs") == 1
    fast = {
        "fp8_scaled_mm": "torch._scaled_mm",
        "fp8_scaled_mm_precise": "torch._scaled_mm",
        "int8_dynamic": "torch._int_mm",
        "tinygemm_cpu": "torch._weight_int4pack_mm_for_cpu",
    }
    assert dict(rows)[fast.get(contract, "reference")] == "runs"
    for name, verdict in rows:
        if (
            name.startswith("torch.")
            and verdict != "runs"
            and not verdict.endswith("(compute capability 10.0 or later)")
        ):
            assert contract in verdict, f"{name} does not say why it refuses {contract}: {verdict}"


def test_explain_names_the_shape_that_a_kernel_refuses() -> None:
    rows = dict(explain(request("fp8_scaled_mm", k=40)))
    assert "K = 40" in rows["torch._scaled_mm"] and rows["reference"] == "runs"
    elsewhere = dict(explain(request("tinygemm_cpu", device=torch.device("meta"))))
    assert "on a CPU alone" in elsewhere["torch._weight_int4pack_mm_for_cpu"]


@pytest.mark.parametrize(
    ("dtype", "scales", "taken"), [(BF16, None, True), (F32, BF16, True), (F32, None, False), (BF16, F32, False)]
)
def test_pytorchs_int4_kernel_for_cuda_takes_scales_in_bfloat16_alone(
    dtype: torch.dtype, scales: Any, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads others as if they were."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    (kernel,) = (b for b in ops.router._backends if b.name == "torch._weight_int4pack_mm")
    asked = request("tinygemm_cuda", device=torch.device("cuda"), dtype=dtype, scale_dtype=scales)
    assert (kernel.why_not(asked) is None) == taken


def test_forcing_runs_that_backend_and_only_inside_the_block() -> None:
    args = gemm("fp8_scaled_mm", F32)
    free = ops.matmul(*args).y
    with backend("torch._scaled_mm"):
        assert_equal(ops.matmul(*args).y, free)
    with backend("reference"):
        reference = ops.matmul(*args).y
        with pytest.raises(ValueError, match="there are:"), backend("cuda-dreams"):
            pass
        assert_equal(ops.matmul(*args).y, reference)
    assert_equal(ops.matmul(*args).y, free)
    # the reference multiplies the scales one after the other, so in float32 the two can be told apart
    assert not torch.equal(reference, free)


def test_the_last_block_that_is_open_rules_them() -> None:
    """Whichever order the program's threads leave theirs in."""
    other, found, done = ops.backend_names()[0], list[Any](), threading.Semaphore(0)
    opened = [(contextvars.copy_context(), backend(name, "gemm")) for name in ("reference", other, "reference")]
    for context, block in opened:
        context.run(block.__enter__)
    for leaves in (2, 0, 1):
        context, block = opened[leaves]
        context.run(block.__exit__, None, None, None)
        _thread.start_new_thread(lambda: (found.append(router.forced("gemm")[0]), done.release()), ())
        assert done.acquire(timeout=60)
    assert found == [other, other, None]


def test_a_block_rules_threads_that_python_did_not_begin() -> None:
    """As autograd's are that run a GPU's backwards; other threads have blocks of their own."""
    found, done = list[bool](), threading.Semaphore(0)
    for force in (True, False):
        with backend("reference") if force else nullcontext(), ThreadPoolExecutor(1) as pool:
            _thread.start_new_thread(lambda: (found.append(router.forcing()), done.release()), ())
            done.acquire(timeout=60)
            found.append(pool.submit(router.forcing).result())
    assert found == [True, False, False, False] and not router.forcing()


def test_forcing_a_backend_that_cannot_run_says_why() -> None:
    with (
        backend("torch._scaled_mm"),
        pytest.raises(ValueError, match=r"computes fp8_scaled_mm, not aoquant.*choose another"),
    ):
        ops.matmul(*gemm("aoquant"))
    with backend("torch._int_mm"), pytest.raises(ValueError, match=r"M = 6, N = 16, K = 192, cpu"):
        ops.matmul(*gemm("fp8_scaled_mm"))


def test_forcing_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    args = gemm("fp8_scaled_mm", F32)
    with backend("reference"):
        reference = ops.matmul(*args).y
    monkeypatch.setenv("AOQUANT_BACKEND", "reference")
    assert_equal(ops.matmul(*args).y, reference)
    monkeypatch.setenv("AOQUANT_BACKEND", "torch._int_mm")
    with pytest.raises(ValueError, match="forced, but cannot run"):
        ops.matmul(*args)
    with backend("reference"):  # the block is nearer than the environment
        assert_equal(ops.matmul(*args).y, reference)
    monkeypatch.setenv("AOQUANT_BACKEND", "nonsense")
    with pytest.raises(ValueError, match=r"there is none; known: .*reference"):
        ops.matmul(*args)


def test_forcing_reaches_compiled_layers() -> None:
    """The backend is chosen when the op runs, not when it is traced."""
    args = gemm("fp8_scaled_mm", F32)
    torch._dynamo.reset()
    run = torch.compile(lambda: ops.matmul(*args).y, backend="eager", fullgraph=True)
    free = run()
    with backend("reference"):
        assert not torch.equal(run(), free)
    assert_equal(run(), free)


# One backend against another: the order of additions alone may differ


@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
@pytest.mark.parametrize("contract", ["fp8_scaled_mm", "fp8_scaled_mm_precise"])
def test_reference_and_scaled_mm_differ_by_the_order_of_additions(contract: str, dtype: torch.dtype) -> None:
    """Bound, an element: K float32 roundings of the sum of absolute products and two of the scales, then one of the
    output.
    """
    args = gemm(contract, dtype, m=64, n=32, k=512)
    with backend("reference"):
        reference = ops.matmul(*args).y
    with backend("torch._scaled_mm"):
        fast = ops.matmul(*args).y
    x, w = args[0], args[1]
    magnitude = args[3].decode(x, F32).abs().double() @ args[4].decode(w, F32).abs().double().t()
    slack = magnitude * (512 + 4) * 2.0**-24 + reference.double().abs() * torch.finfo(dtype).eps
    assert ((reference.double() - fast.double()).abs() <= slack).all()
    noise = (reference.double() - fast.double()).square().sum()
    sqnr = 10 * torch.log10(reference.double().square().sum() / noise)
    assert sqnr > (55 if dtype == BF16 else 120), f"{sqnr:.1f} dB"


@pytest.mark.parametrize("kind", ["normal", "outlier", "zero", "onehot", "mixed"])
@pytest.mark.parametrize("x_name", ["int8-row-native", "int8-row-asym-native", "int8-tensor-native"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=dtype_name)
def test_reference_int8_equals_int_mm(x_name: str, dtype: torch.dtype, kind: str) -> None:
    """Integers have one sum: bit-equal, whatever K."""
    for k in (53, 4096):
        x, w, b = data(kind, 7, k, dtype, 1), data(kind, 9, k, dtype, 2), data("normal", 1, 9, dtype, 3)[0]
        args = arguments(encoded(x_name, x), encoded("int8-row", w), b, x_name, "int8-row", "int8_dynamic", [7], dtype)
        with backend("reference"):
            reference = ops.matmul(*args).y
        with backend("torch._int_mm"):
            assert_equal(ops.matmul(*args).y, reference)


def test_a_route_is_asked_for_once_and_again_when_backends_or_force_change() -> None:
    from aoquant.ops import router

    asked: list[Request] = []

    def why_not(request: Request) -> str | None:
        asked.append(request)
        return "it only counts"

    args = gemm("fp8_scaled_mm", F32)
    free = ops.matmul(*args).y
    counts = router.Backend("counts", 99, why_not, lambda call: None)
    router.register(counts)
    try:
        for _ in range(3):
            assert_equal(ops.matmul(*args).y, free)
        assert len(asked) == 1
        with backend("reference"):
            ops.matmul(*args)
        with backend("counts"), pytest.raises(ValueError, match="it only counts"):
            ops.matmul(*args)
        with backend("counts"), pytest.raises(ValueError, match="it only counts"):  # no answer, nothing to remember
            ops.matmul(*args)
        assert len(asked) == 3
        assert_equal(ops.matmul(*args).y, free)
        assert len(asked) == 3
    finally:
        router._backends.remove(counts)
        router._routes.clear()
