"""The process that benchmarks/compare.py starts in each checkout: it measures that checkout's aoquant.

The measurements are those of the checkout's own benchmarks/*.py, because operations may have other arguments there.

It answers commands from standard input, a line of JSON each: "where" (the checkout that it imported), "chunks" (what
there is to measure), "prepare" (compile and capture one chunk), "measure" (its rows).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

HOST_RECIPES = {
    "host": ("int4-g128", "nvfp4-weight", "nvfp4", "fp8", "int8", "mxfp4", "fp8-hybrid", "nvfp4-training"),
    "graph": ("int4-g128", "nvfp4", "fp8", "mxfp4", "fp8-hybrid", "nvfp4-training"),
}
GENERATE = ("eager", "graph")
EXPERTS = ("qwen3-30b-a3b", "gpt-oss-20b")
SERVED = ("int4-g128", "nvfp4", "mxfp4", "fp8")
Row = dict[str, Any]
Chunk = tuple[str, ...]
_GIVEN: dict[tuple[str, str], Any] = {}


def chunks(suites: list[str]) -> list[Chunk]:
    """What is prepared and measured together.

    ("layer", group, number of the shape), ("decode", number of the shape), ("encode", which), ("host" or "graph",
    recipe), ("generate", how, recipe), ("experts", part, shape, recipe).
    """
    found: list[Chunk] = []
    if "layer" in suites:
        import layers

        found += [
            ("layer", g, str(i)) for g, (ours, _) in layers.GROUPS.items() if ours for i in range(len(layers.SHAPES))
        ]
    if "decode" in suites:
        import decode

        found += [("decode", str(i)) for i in range(len(decode.SHAPES))]
    if "encode" in suites:
        found += [("encode", "formats"), ("encode", "grids")]
    found += [(suite, name) for suite in ("host", "graph") if suite in suites for name in HOST_RECIPES[suite]]
    if "generate" in suites:
        hows = GENERATE if _device().type == "cuda" else GENERATE[:1]
        found += [("generate", how, name) for how in hows for name in SERVED]
    if "experts" in suites:
        found += [
            ("experts", part, shape, name) for part in ("train", "decode") for shape in EXPERTS for name in SERVED
        ]
    return found


def given(module: ModuleType, name: str) -> Any:
    """What a module of the checkout called `name` before this file put something else there."""
    return _GIVEN.setdefault((module.__name__, name), getattr(module, name))


def measure_of(chunk: Chunk, quick: bool) -> Callable[[], list[Row]]:
    """Prepare a chunk; what measures it, as often as it is called."""
    suite, *rest = chunk
    if suite == "layer":
        return _layer(rest[0], int(rest[1]))
    if suite == "decode":
        import decode

        decode.SHAPES = (given(decode, "SHAPES")[int(rest[0])],)
        decode.peers = lambda *_: {}  # other people's kernels have not changed
        decode.measure(1)
        return lambda: decode.measure(10)
    if suite == "encode":
        import run

        which = run.measure_encode if rest[0] == "formats" else run.measure_grids
        which(1)
        return lambda: which(20)
    run_of: dict[str, Callable[..., Callable[[], list[Row]]]] = {
        "host": _host,
        "graph": _graph,
        "generate": _generate,
        "experts": _experts,
    }
    return run_of[suite](*rest, quick)


def _layer(group: str, shape: int) -> Callable[[], list[Row]]:
    """The layers are compiled once and measured again and again."""
    import layers

    ours, _ = given(layers, "GROUPS")[group]
    layers.GROUPS, layers.SHAPES = {group: (ours, None)}, (given(layers, "SHAPES")[shape],)
    make, made = given(layers, "variants"), []

    def once(*args: Any) -> Any:
        if not made:
            made.append(make(*args))
        return made[0]

    layers.variants = once
    layers.measure(1)
    return lambda: layers.measure(20)


def _host(recipe: str, quick: bool) -> Callable[[], list[Row]]:
    """Host time of calls, and its ratio to nn.Linear's in this process: two processes differ by more than code does."""
    import host

    made = [(*host.calls([recipe], *shape), shape) for shape in (host.QUICK if quick else host.SHAPES)]
    rows = [row for _, failed, _ in made for row in failed]
    if rows:
        raise RuntimeError(rows[0]["note"])
    series = 2 if quick else host.SERIES
    return lambda: [
        {"suite": "host", **_words(row), "variant": f"{recipe}: {row['call']}", "host_us": row["us"],
         "to_linear": row["to_linear"]}
        for runs, _, shape in made
        for row in host.host_rows(runs, shape, series)
        if row["variant"] == recipe
    ]  # fmt: skip


def _graph(recipe: str, quick: bool) -> Callable[[], list[Row]]:
    """A step eager, compiled and in a CUDA graph."""
    import host
    from beside import Deadline

    shape, rounds = (host.QUICK[-1], 2) if quick else (host.SHAPES[-1], host.SERIES)
    runs, failed = host.steps([recipe], shape, "aot_eager" if quick else "inductor", Deadline(0))
    if failed:
        raise RuntimeError(failed[0]["note"])
    return lambda: [
        {"suite": "graph", **_words(row), "variant": recipe, "how": row["call"], "us_p50": row["us"]}
        for row in host.graph_rows(runs, shape, rounds)
        if row["variant"] == recipe
    ]


def _words(row: Row) -> Row:
    return {"shape": row["shape"], "rows": row["rows"]}


def _generate(how: str, recipe: str, quick: bool) -> Callable[[], list[Row]]:
    """Milliseconds of `generate`, or of one token of it where `how` is "graph", for a small Llama."""
    from llamas import Size, llama
    from model_serve import Serving, generate

    size, new = (Size(128, 256, 4, 2, 2, 256), 4) if quick else (llama(2048, 4, 32768), 64)
    serving = Serving(size, 1, 16, new, _device())
    run = generate(serving, how, recipe)
    words = {"suite": "generate", "shape": f"{size.hidden} wide, {size.layers} layers", "rows": 1, "how": how}
    return _timed(run, words | {"variant": recipe}, quick)


def _experts(part: str, shape: str, recipe: str, quick: bool) -> Callable[[], list[Row]]:
    """Milliseconds of a layer's experts: a training step, or `moe.CALLS` calls of the packed ones."""
    import moe

    name = list(moe.TINY)[EXPERTS.index(shape)] if quick else shape
    tokens = 16 if quick else {"train": 8192, "decode": 16}[part]
    work = moe.Work((moe.TINY if quick else moe.SHAPES)[name], "block", tokens, _device())
    run = (moe.train if part == "train" else moe.decode)(work, recipe)
    words = {"suite": "experts", "shape": name, "rows": tokens, "variant": recipe, "how": part}
    return _timed(run, words, quick)


def _timed(run: Callable[[], Any], words: Row, quick: bool) -> Callable[[], list[Row]]:
    """The median of some runs, each from an idle device to an idle device."""
    from beside import percentiles, seconds

    for _ in range(3):
        run()
    rounds = 2 if quick else 15
    return lambda: [words | {"ms_p50": percentiles([seconds(run, 1, _device()) * 1e3 for _ in range(rounds)])[1]}]


def _device() -> Any:
    import torch

    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def work() -> int:
    """Answer commands from standard input until it ends; what the benchmarks print goes to stderr."""
    measure: Callable[[], list[Row]] | None = None
    # last: modules that the checkout does not have
    sys.path.append(str(Path(__file__).resolve().parent))
    for line in sys.stdin:
        command = json.loads(line)
        try:
            with redirect_stdout(sys.stderr):
                if "where" in command:
                    import aoquant

                    answer: Any = str(Path(aoquant.__file__).resolve().parents[1])
                elif "chunks" in command:
                    answer = chunks(command["chunks"])
                elif "prepare" in command:
                    measure, answer = None, None
                    measure = measure_of(tuple(command["prepare"]), command["quick"])
                else:
                    assert measure is not None
                    answer = measure()
            print(json.dumps({"answer": answer}), flush=True)
        except Exception as error:
            print(json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(work())
