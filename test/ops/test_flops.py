"""FLOPs of the ops, for torch's counter."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.utils import flop_counter

from aoquant import ops
from aoquant.ops import flops


def test_threads_register_each_flop_formula_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registered = list[Any]()

    def slow(targets: Any) -> Any:
        time.sleep(0.02)
        registered.extend(targets)
        return lambda formula: formula

    monkeypatch.setattr(flops, "_FORMULAS", {abs: (ops.matmul,), max: (ops.gradients,)})
    monkeypatch.setattr(flop_counter, "register_flop_formula", slow)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: flops.register(), range(4)))
    assert set(registered) == {ops.matmul.overload.overloadpacket, ops.gradients.overload.overloadpacket}
    assert len(registered) == 2
