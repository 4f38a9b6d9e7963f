"""How far a tensor walks: the Python of aoquant that one step runs, counted on a CPU.

    python benchmarks/walk.py [RECIPE ...]

For a small model of each recipe (by default nvfp4) it counts, with `sys.setprofile`, the calls, functions and files of
aoquant, the deepest call inside call, and the classes of aoquant whose instances were passed or returned: of one
forward, one backward and one packed forward, each after a first one that fills the caches, and of one prepare. Then it
times a tiny layer, where a step is all host work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import aoquant
from aoquant import QATConfig, quantize_
from aoquant.recipes import get_recipe

HOME = str(Path(aoquant.__file__).parent)
ROUNDS, REPEATS = 15, 50


class Walk(NamedTuple):
    """What `walked` counted."""

    calls: int
    functions: int
    files: int
    depth: int
    types: int


def walked(run: Callable[[], object]) -> Walk:
    """Count what `run` calls inside aoquant."""
    calls, functions, types, depth, deepest = 0, set[Any](), set[type](), 0, 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls, depth, deepest
        code = frame.f_code
        if not code.co_filename.startswith(HOME):
            return
        if event == "call":
            calls, depth = calls + 1, depth + 1
            deepest = max(deepest, depth)
            functions.add(code)
            values = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
            types.update(type(v) for v in values if type(v).__module__.startswith("aoquant"))
        elif event == "return":
            depth -= 1
            if type(argument).__module__.startswith("aoquant"):
                types.add(type(argument))

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk(calls, len(functions), len({f.co_filename for f in functions}), deepest, len(types))


def made(recipe: str, step: str) -> nn.Linear:
    """A small bfloat16 layer after prepare, or after convert."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64, bias=False)).bfloat16()
    config = get_recipe(recipe).make()
    quantize_(model, config if step == "packed" else QATConfig(config, step="prepare"))
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    return layer


def median(run: Callable[[], object]) -> float:
    """Microseconds of processor time of one call: other programs on the machine do not count."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(REPEATS):
            run()
        rounds.append((time.process_time() - start) / REPEATS * 1e6)
    return statistics.median(rounds)


def walks(recipe: str) -> dict[str, Walk]:
    """Walks of a recipe, by the name of the step."""
    prepared, packed = made(recipe, "prepare"), made(recipe, "packed")
    x = torch.randn(4, 256, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        prepared(x).sum().backward()
        with torch.no_grad():
            packed(x)
    ys: list[Tensor] = []
    forward = walked(lambda: ys.append(prepared(x)))
    backward = walked(lambda: ys[0].sum().backward())
    with torch.no_grad():
        served = walked(lambda: packed(x))
    return {
        "forward": forward,
        "backward": backward,
        "packed forward": served,
        "prepare": walked(lambda: made(recipe, "prepare")),
    }


def times(recipe: str) -> dict[str, float]:
    """Microseconds of a step of a tiny layer."""
    prepared, packed = made(recipe, "prepare"), made(recipe, "packed")
    x = torch.randn(1, 256, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(1, 64, dtype=torch.bfloat16)

    def served() -> None:
        with torch.no_grad():
            packed(x)

    return {"forward + backward": median(lambda: prepared(x).backward(g)), "packed forward": median(served)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["nvfp4"], help="names of recipes: see `aoquant recipes`")
    parser.add_argument("--no-times", action="store_true", help="count only")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for recipe in given.recipes:
        print(f"{recipe:20}{''.join(f'{field:>11}' for field in Walk._fields)}")
        for step, walk in walks(recipe).items():
            print(f"{step:20}{''.join(f'{n:11}' for n in walk)}")
        for step, us in {} if given.no_times else times(recipe).items():
            print(f"{step:20}{us:11.1f} us")


if __name__ == "__main__":
    main()
