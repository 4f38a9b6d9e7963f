"""Every GEMM that runs on this machine against the reference, to the bit, for every pair of formats that a recipe or a
config of torchao's multiplies.

The order of sums is a kernel's own, so inputs are such that no order rounds: values of -1, -1/2, 0, 1/2 and 1, the
largest of a group 7/4, so that float8's codes are powers of two (Hopper adds them up in 14 bits), and scales that are
powers of two. What is left is what a contract says: codes, scales, zero points, where the outer scale
multiplies, where the bias is added, and where is rounded. A result that is off by one unit in the last place is seen.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.linear_cases import AOQUANT_CASES, BF16, F16, F32, TORCHAO_CASES
from torch import Tensor

from aoquant import list_recipes
from aoquant.formats import Encoded, Operand, as_operand
from aoquant.ops import Call, contracts, gemm_request, router
from aoquant.targets import resolve

N, K = 48, 768  # multiples of every group and tile, and of what kernels ask for
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def pairs() -> dict[str, tuple[str, Any, Any]]:
    """Return contract, operand of x (None: high precision) and operand of W of each recipe that has a GEMM."""
    configs = [case.config for case in (*TORCHAO_CASES, *AOQUANT_CASES)]
    configs += [recipe.make() for recipe in list_recipes() if not recipe.experts]
    found = {}
    for config in configs:
        try:
            recipe = resolve(config).recipe
        except ValueError:
            continue  # refused here, as test/targets says
        x, w = (o and as_operand(o.format) for o in (recipe.fprop_input, recipe.fprop_weight))  # no transform
        found[f"{recipe.contract}-{x.name if x else 'values'}-{w.name}"] = recipe.contract, x, w
    return found


PAIRS = pairs()


def values(rows: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return (rows, K): what is multiplied of two seeds is -1, -1/2, 0, 1/2 or 1, where one has 7/4 the other has 0."""
    made = torch.randint(-2, 3, (rows, K), generator=torch.Generator().manual_seed(seed)) / 2
    made[:, seed % 2 :: 16], made[:, 1 - seed % 2 :: 16] = 1.75, 0
    return made.to(device, dtype)


def power_of_two(t: Tensor | None) -> Tensor | None:
    """Return the next powers of two towards 0, in t's dtype."""
    if t is None or t.dtype in (torch.uint8, torch.int8, torch.float8_e8m0fnu):
        return t
    v = t.float()
    return torch.where(v == 0, v, v.sign() * v.abs().log2().floor().exp2()).to(t.dtype)


def encoded(operand: Operand, x: Tensor) -> Encoded:
    """Return codes of x under scales, and values of code 0, that are powers of two."""
    e = operand.encode(x)
    return Encoded(e.codes, power_of_two(e.scale), power_of_two(e.zero), power_of_two(e.outer), e.k)


def willing(request: router.Request) -> list[router.Backend]:
    """Return the GEMMs that keep a request's contract, but for the reference."""
    of = [b for b in router._backends if b.role == "gemm" and b.name != "reference"]
    return [backend for backend in of if backend.why_not(request) is None]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_kernel_gives_the_references_bits(pair: str, device: str) -> None:
    contract, x_as, w_as = PAIRS[pair]
    (reference,) = (b for b in router._backends if b.role == "gemm" and b.name == "reference")
    for dtype in (BF16, F16, F32):
        if contracts.input_error(contract, dtype, dtype) is not None:
            continue
        for m in (1, 3, 32):
            x, w = values(m, 1, dtype, device), values(N, 2, dtype, device)
            request = gemm_request(contract, x_as, w_as, w, dtype, m)
            if not (kernels := willing(request)):
                continue
            x_given, w_given = x if x_as is None else encoded(x_as, x), encoded(w_as, w)
            bias = (torch.arange(N, device=device) / 8 - 2).to(dtype)
            for b in (None, bias):
                call = partial(Call, contract, x_given, x_as, w_given, w_as, b, [m], dtype)
                expected, read = reference.run(call()), read_by(contract, call())
                for kernel in kernels:
                    what = f"{kernel.name}, {dtype}, M = {m}, bias {b is not None}"
                    assert torch.equal(kernel.run(call()), expected), what
                    bound = kernel.bind and read and kernel.bind(request, w_given.by_row)
                    assert not bound or torch.equal(bound(*read, b), expected), f"bound: {what}"


def read_by(contract: str, call: Call) -> tuple[Tensor, Tensor | None] | None:
    """Return x as a bound product of the contract reads it, and its alpha or, beside codes, its scale; None where
    such a product has no place for all of it.
    """
    if call.x is None:
        return call.x_hp, None
    if contracts.reads(contract) == "codes":
        return (call.x.codes, call.x.scale) if call.x.zero is call.x.outer is None else None
    return call.x_matrix(operand=contracts.reads(contract) == "operand"), call.alpha_x
