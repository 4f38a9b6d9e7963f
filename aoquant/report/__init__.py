"""Reports: two models compared layer by layer, in dB.

    report(float_model, converted, batch)    what quantisation costs
    report(prepared, converted, batch)       whether training computed what is deployed: inf in every row
    report(float_model, prepared, batch, gradients=True)    also what a backward costs: dx and dW of each layer
    report(float_model, converted, batch, routing=True)     also how many tokens go to other experts (`routing.py`)
    verify(prepared, converted, batch)       the same, as an error that names the layers where it is not so

A figure is None when it could not be measured, and the row's warning says why. In JSON, inf and nan are the strings
"inf", "-inf" and "nan", because strict JSON has no such numbers; null is "not measured".
"""

import math
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from aoquant._messages import check_model, first, track, warn
from aoquant.distributed import fsdp
from aoquant.distributed.gathered import PACKED, GatheredWeight
from aoquant.linear.mastered import Mastered
from aoquant.planning import owners
from aoquant.planning.coverage import Coverage, coverage
from aoquant.planning.sizes import stored_bytes
from aoquant.report import render
from aoquant.report.cache_rows import CacheRow, caches_of
from aoquant.report.compare import compare, pairs_of
from aoquant.report.measure import undisturbed
from aoquant.report.model_gradients import gradients as gradients_of
from aoquant.report.routing import RouterDrift, router_drift
from aoquant.report.rows import Row, rows_of

MODEL_OUTPUT = "(model output)"


@dataclass(frozen=True)
class Report:
    """List a row for each layer, then the row of the models' outputs.

    bytes_before, bytes_after: of the quantised layers' weights in their own dtype, and quantised. model_bytes: of
    everything that model a and model b hold. Tied weights count once. coverage: which parameters of model b are
    quantised, and why others are not. routing: how many tokens go to other experts in model b, for each layer of
    experts; empty where it was not asked for. caches: a row for each attention module whose KV cache is quantised.
    """

    layers: tuple[Row, ...]
    output: Row
    bytes_before: int
    bytes_after: int
    model_bytes: tuple[int, int]
    coverage: Coverage
    routing: tuple[RouterDrift, ...] = ()
    caches: tuple[CacheRow, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        return (*self.layers, self.output)

    @property
    def not_run(self) -> list[str]:
        """Return the layers whose outputs were not compared."""
        return [r.fqn for r in self.layers if r.output_sqnr_db is None]

    @property
    def min_sqnr(self) -> float:
        """Return the lowest output SQNR of a layer; nan if one is nan, or if none was measured."""
        found = self._measured()
        return min(found) if found and not any(map(math.isnan, found)) else math.nan

    @property
    def mean_sqnr(self) -> float:
        """Return the mean output SQNR in dB of layers that are not bit-equal; inf when all are, nan when none ran."""
        found = self._measured()
        finite = [v for v in found if v != math.inf]
        return sum(finite) / len(finite) if finite else math.inf if found else math.nan

    @property
    def mean_bits(self) -> float:
        """Return the stored bits per weight over all layers; nan without layers."""
        weights = sum(math.prod(r.shape) for r in self.layers)
        bits = sum((r.bits_per_weight or 0.0) * math.prod(r.shape) for r in self.layers)
        return bits / weights if weights else math.nan

    @property
    def totals(self) -> dict[str, Any]:
        return {
            "layers": len(self.layers),
            "not_run": self.not_run,
            "min_sqnr_db": self.min_sqnr,
            "mean_sqnr_db": self.mean_sqnr,
            "mean_bits_per_weight": self.mean_bits,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "model_bytes": list(self.model_bytes),
            "coverage": self.coverage.to_dict(),
            **({"routing": [asdict(layer) for layer in self.routing]} if self.routing else {}),
        }

    def to_markdown(self) -> str:
        """Return a table, what stays float, and a line of totals. Needs tabulate."""
        table = render.markdown(self.rows, self.totals, self.coverage)
        return table + render.caches(self.caches) + render.routing(self.routing)

    def to_csv(self) -> str:
        """Return one line a row, without KV caches; None is empty."""
        return render.csv_text(self.rows)

    def to_json(self) -> str:
        """Return strict JSON: {"rows": [...], "totals": {...}}, with quantised KV caches "caches": [...]."""
        caches = {"caches": [asdict(c) for c in self.caches]} if self.caches else {}
        return render.json_text({"rows": [asdict(r) for r in self.rows], **caches, "totals": self.totals})

    def plot(self, path: Path | str) -> None:
        """Draw bars of each layer's weight and output SQNR; `path` ends in the kind of picture. Needs matplotlib."""
        render.bars(self.layers, Path(path))

    def save(self, folder: Path | str) -> None:
        """Write report.csv, .json, .md and .png into `folder`, in this order: the first two need no extra package.
        Without layers there is no picture.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for suffix, text in (("csv", self.to_csv), ("json", self.to_json), ("md", self.to_markdown)):
            (folder / f"report.{suffix}").write_text(text(), encoding="utf-8")
        if self.layers:
            self.plot(folder / "report.png")

    def _measured(self) -> list[float]:
        return [r.output_sqnr_db for r in self.layers if r.output_sqnr_db is not None]


def report(
    model_a: nn.Module,
    model_b: nn.Module,
    batch: Any,
    *,
    gradients: bool = False,
    routing: bool = False,
    progress: bool = True,
) -> Report:
    """Compare every layer and KV cache that is prepared or quantised in either model, and the models' outputs.

    batch: a tensor, positional arguments (tuple or list), or keyword arguments (dict, BatchEncoding). The models stay
    as they are: weights, train or eval mode, and random state. A layer that is called more than once has one row.
    gradients: also dx and dW of model b's prepared linear layers, in dB against the same layer in float, for the loss
        that the model returns, or the mean square of its outputs (`model_gradients.py`), in a training step's memory.
    routing: also how many tokens go to other experts in model b than in model a; each model runs once more for it.

    Raises:
        ValueError: nothing to compare, layers that do not match, a model that is sharded over ranks or packed by
            `quantized_model_init`, or a batch that a model does not take.

    Example:

            print(report(float_model, converted, {"input_ids": ids}))
    """
    if not isinstance(batch, Tensor | tuple | list | Mapping):
        raise ValueError(f"batch must be a tensor, a tuple or list, or a dict, got {type(batch).__name__}")
    for side, model in zip("ab", (model_a, model_b), strict=True):
        check_model(model, f"model_{side}")
    a, b = (getattr(model, "_orig_mod", model) for model in (model_a, model_b))  # what torch.compile wrapped
    for side, model in zip("ab", (a, b), strict=True):
        if (borrowed := owners.borrowed(model)) is not None:
            raise ValueError(f"model_{side}: {borrowed}")
        if fsdp.is_distributed(model):
            raise ValueError(
                f"model_{side} is sharded over ranks, and its layers cannot be run one by one: {fsdp.GATHER}, and compare that"
            )
        for fqn, module in model.named_modules():
            if isinstance(module, Mastered) or isinstance(getattr(module, "weight", None), GatheredWeight):
                raise ValueError(f"model_{side}: {fqn}: {PACKED}")
    pairs = pairs_of(a, b)
    bar = iter(track(pairs, "outputs") if progress else pairs)
    with undisturbed(a, b):
        caches = caches_of(a, b, batch)
        decibels, problem = compare(a, b, pairs, batch, lambda: next(bar, None))
        made = [found for pair in (track(pairs, "weights") if progress else pairs) for found in rows_of(pair)]
        sqnr: dict[int, dict[str, Any]] = {}
        with suppress(Exception) if problem else nullcontext():  # model b may be the one that does not run
            sqnr = gradients_of(b, batch) if gradients else {}
    found = {pair.fqn: sqnr[id(pair.b)] for pair in pairs if id(pair.b) in sqnr}
    rows = tuple(replace(row, **found.get(row.fqn, {})) for _, row in made)
    output = Row(MODEL_OUTPUT, output_sqnr_db=decibels, warning=problem and f"not run: {problem}")
    once = {id(w): (w.dtype.itemsize, row) for w, row in made}.values()
    before = sum(itemsize * math.prod(row.shape) for itemsize, row in once)
    after = sum(row.bytes or 0 for _, row in once)
    sizes = tuple(stored_bytes(*m.parameters(), *m.buffers()) for m in (a, b))
    moved = router_drift(a, b, batch) if routing else ()
    return Report(rows, output, before, after, (sizes[0], sizes[1]), coverage(b), moved, caches)


def verify(
    prepared: nn.Module, converted: nn.Module, batch: Any, *, min_db: float = math.inf, allow_not_run: bool = False
) -> Report:
    """Return the report of `prepared` against `converted`, when weights and outputs of every layer, and keys and values
    of every quantised KV cache, reach `min_db`.

    The default is bit equality, also of the bytes that caches store. Where all layers that ran and all caches are
    bit-equal, the models' own outputs have to reach min_db too, and both models have to run every layer equally often.
    Errors of layers that are not bit-equal add up in the outputs, so those are then left to the reader. A warning names
    matrices without support that stay float, when they are much of the model: nothing is verified of them.

    Raises:
        ValueError: naming the worst layers; or layers that this batch does not run, or that could not be compared
            here, unless allow_not_run.

    Example:

            prepared = copy.deepcopy(model)
            quantize_(model, QATConfig(step="convert"))
            verify(prepared, model, {"input_ids": ids})   # raises unless every layer is bit-equal
    """
    check_model(prepared, "prepared")
    check_model(converted, "converted")
    found = report(prepared, converted, batch, progress=False)
    exact = all(r.output_sqnr_db in (None, math.inf) for r in found.layers) and all(c.exact for c in found.caches)
    judged = found.rows if exact else found.layers
    measured = {r: [v for v in (r.weight_sqnr_db, r.output_sqnr_db) if v is not None] for r in judged}
    least = {r: min((-math.inf if math.isnan(v) else v for v in vs), default=math.inf) for r, vs in measured.items()}
    low = [r for r in judged if least[r] < min_db]
    problems = []
    if low:
        worst = sorted(low, key=lambda r: least[r])
        lines = [
            f"{r.fqn} {r.shape}: output {render.db(r.output_sqnr_db)}, weight {render.db(r.weight_sqnr_db)} "
            f"({r.format}, {r.backend})"
            for r in worst
        ]
        problems.append(f"{len(low)} of {len(found.rows)} row(s) are below {min_db} dB:" + first(lines))
    off = [
        f"{c.fqn}: keys {render.db(c.key_sqnr_db)}, values {render.db(c.value_sqnr_db)}, bytes "
        f"{'differ' if c.bytes_equal is False else 'equal'} ({c.format})"
        for c in found.caches
        if not all(v is None or v >= min_db for v in (c.key_sqnr_db, c.value_sqnr_db))
        or (min_db == math.inf and c.bytes_equal is False)
    ]
    if off:
        problems.append(f"{len(off)} of {len(found.caches)} KV cache(s) are below {min_db} dB:" + first(off))
    uneven = [
        f"{r.fqn}: {r.warning}" for r in found.layers if exact and r.output_sqnr_db is not None and len({*r.calls}) > 1
    ]
    if uneven:
        problems.append(f"{len(uneven)} layer(s) do not run equally often in both models:" + first(uneven))
    missing = [f"{r.fqn}: {r.warning}" for r in found.rows if r.output_sqnr_db is None]
    missing += [f"{c.fqn}: {c.warning or c.format}" for c in found.caches if c.bytes_equal is None]
    if missing and not allow_not_run:
        problems.append(
            f"{len(missing)} of {len(found.rows) + len(found.caches)} row(s) were not run, so nothing is known of them "
            "(verify where they run, or pass allow_not_run=True):" + first(missing)
        )
    if problems:
        raise ValueError("\n".join(problems))
    if found.coverage.problem is not None:
        warn(f"verified, but {found.coverage.problem}")
    return found
