"""How far a tensor walks: the Python of aoquant that one step runs, counted on a CPU, and the shape of the house.

    python benchmarks/walk.py [RECIPE ...] [--no-times] [--no-house]

For each recipe (by default nvfp4) it takes Linear(256, 256) with bias in bfloat16 and four rows, and counts Python's
"call" events of `sys.setprofile` in the second step: of a forward, a backward, and a forward of the packed layer; and
of one prepare. "all_calls", "all_files" and "all_depth" count everything in aoquant. The other columns leave out
`NUMBERS`, the folders with the arithmetic of formats: calls, functions, files, depth (calls inside calls), and types
(classes of aoquant whose instances were passed or returned). Then it times a tiny layer, where a step is all host work.

The house: circles of files that import one another, circles of siblings (of one package, with what lies below them),
file names that two files of aoquant share, and lines of Python. Imports inside functions and for types count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import grimp
import networkx
import torch
from torch import Tensor, nn

import aoquant
from aoquant import QATConfig, quantize_
from aoquant.recipes import get_recipe

HOME = Path(aoquant.__file__).parent
NUMBERS = ("formats", "transforms", "numerics")  # folders of aoquant, today's and those planned
ROUNDS, REPEATS = 15, 50
SIZE, ROWS = 256, 4


class Walk(NamedTuple):
    """Counts of one step in aoquant, and in aoquant outside `NUMBERS`."""

    all_calls: int
    all_files: int
    all_depth: int
    calls: int
    functions: int
    files: int
    depth: int
    types: int


class Tally:
    """Counts of the files that a profiler is told about."""

    def __init__(self) -> None:
        self.calls, self.depth, self.deepest = 0, 0, 0
        self.functions, self.types = set[CodeType](), set[type]()

    def add(self, frame: FrameType, event: str, argument: object) -> None:
        """Count one event of `sys.setprofile`."""
        code = frame.f_code
        if event == "call":
            self.calls, self.depth = self.calls + 1, self.depth + 1
            self.deepest = max(self.deepest, self.depth)
            self.functions.add(code)
            self.see(*(frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]))
        elif event == "return":
            self.depth -= 1
            self.see(argument)

    def see(self, *values: object) -> None:
        self.types.update(type(v) for v in values if type(v).__module__.startswith("aoquant"))

    @property
    def files(self) -> int:
        return len({code.co_filename for code in self.functions})


def walked(run: Callable[[], object]) -> Walk:
    """Count what `run` calls inside aoquant."""
    home, numbers = f"{HOME}/", tuple(f"{HOME / name}/" for name in NUMBERS)
    every, outside = Tally(), Tally()

    def look(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if file.startswith(home):
            every.add(frame, event, argument)
            if not file.startswith(numbers):
                outside.add(frame, event, argument)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk(every.calls, every.files, every.deepest, outside.calls, len(outside.functions), outside.files, outside.deepest,
                len(outside.types))  # fmt: skip


def made(recipe: str, step: str) -> nn.Linear:
    """Return a small bfloat16 layer after prepare, or after convert."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE)).bfloat16()
    config = get_recipe(recipe).make()
    quantize_(model, config if step == "packed" else QATConfig(config, step="prepare"))
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    return layer


def median(run: Callable[[], object]) -> float:
    """Return the microseconds of processor time of one call: other programs on the machine do not count."""
    rounds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(REPEATS):
            run()
        rounds.append((time.process_time() - start) / REPEATS * 1e6)
    return statistics.median(rounds)


def walks(recipe: str) -> dict[str, Walk]:
    """Return the walks of a recipe, by the name of the step."""
    prepared, packed = made(recipe, "prepare"), made(recipe, "packed")
    x = torch.randn(ROWS, SIZE, dtype=torch.bfloat16, requires_grad=True)
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
    """Return the microseconds of a step of a tiny layer."""
    prepared, packed = made(recipe, "prepare"), made(recipe, "packed")
    x = torch.randn(1, SIZE, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(1, SIZE, dtype=torch.bfloat16)

    def served() -> None:
        with torch.no_grad():
            packed(x)

    return {"forward + backward": median(lambda: prepared(x).backward(g)), "packed forward": median(served)}


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the groups of nodes that reach one another: strongly connected components of two nodes or more."""
    found = networkx.strongly_connected_components(networkx.DiGraph(edges))
    return sorted(sorted(group) for group in found if len(group) > 1)


def circles_of_siblings(edges: list[tuple[str, str]]) -> list[list[str]]:
    """Return the circles among the children of each package, where an import counts for both files' ancestors."""
    siblings = set()
    for importer, imported in edges:
        a, b = importer.split("."), imported.split(".")
        same = next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), None)
        # None: a package and a file of its own
        if same is not None:
            siblings.add((".".join(a[: same + 1]), ".".join(b[: same + 1])))
    return circles(siblings)


def imports(package: str) -> list[tuple[str, str]]:
    """Return (importer, imported) for the files of a package."""
    graph = grimp.build_graph(package, cache_dir=None)
    return [(m, other) for m in graph.modules for other in graph.find_modules_directly_imported_by(m)]


def python_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts]


def lines(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(folder))


def house() -> None:
    """Print circles, names that files share, and lines."""
    edges = imports("aoquant")
    for what, found in (("files", circles(edges)), ("siblings", circles_of_siblings(edges))):
        print(f"{f'circles of {what}':32}{len(found):6}")
        for group in found:
            print(f"    {len(group):2}: {' '.join(name.removeprefix('aoquant.') for name in group)}")
    shared = {n: c for n, c in Counter(p.name for p in python_files(HOME)).items() if c > 1 and n != "__init__.py"}
    print(f"{'file names of two files or more':32}{len(shared):6}")
    print("    " + " ".join(f"{name} {count}" for name, count in sorted(shared.items())))
    for folder in (HOME, HOME.parent / "test"):
        if folder.is_dir():
            print(f"{f'lines of {folder.name}/':32}{lines(folder):6}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=["nvfp4"], help="names of recipes: see `aoquant recipes`")
    parser.add_argument("--no-times", action="store_true", help="do not time a tiny layer")
    parser.add_argument("--no-house", action="store_true", help="count no circles, names and lines")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for recipe in given.recipes:
        print(f"{recipe:20}{''.join(f'{field:>11}' for field in Walk._fields)}")
        for step, walk in walks(recipe).items():
            print(f"{step:20}{''.join(f'{n:11}' for n in walk)}")
        for step, us in {} if given.no_times else times(recipe).items():
            print(f"{step:20}{us:11.1f} us")
    if not given.no_house:
        house()


if __name__ == "__main__":
    main()
