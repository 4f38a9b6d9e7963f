"""KV caches of two models compared: what attention reads of the same keys and values, and the bytes that are stored.

One model runs the batch. Where an attention module hands keys and values to its cache, the modules of both models write
them into a cache that keeps what it is given. So a figure is that cache's alone, and a prepared module's bytes are
compared with those that a converted one stores.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aoquant.kv import hook
from aoquant.ops import kv
from aoquant.report.compare import why
from aoquant.report.measure import decibels, energies, hooked, run


@dataclass(frozen=True)
class CacheRow:
    """The KV cache of one attention module, a → b. None: not measured, see warning.

    format: "" is high precision. scales: static scales of model b, or of a where b has none, by the names of their
    buffers. bytes_before: of one token in high precision. bytes_per_token: as model b stores it, or will after convert.
    *_sqnr_db: of what attention reads in b against a. bytes_equal: whether both store the same bytes; None where one
    stores none.
    """

    fqn: str
    format: str
    scales: dict[str, list[float]]
    bytes_before: int | None
    bytes_per_token: int | None
    key_sqnr_db: float | None
    value_sqnr_db: float | None
    bytes_equal: bool | None
    warning: str = ""

    @property
    def exact(self) -> bool:
        """Return whether keys, values and bytes are the same in both models, as far as they were measured."""
        return self.bytes_equal is not False and {self.key_sqnr_db, self.value_sqnr_db} <= {None, float("inf")}


class _Store:
    """A cache that keeps what it is given."""

    layers = ()

    def update(self, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.given = (k, v)
        return k, v


@dataclass
class _Pair:
    """The attention modules of one name in both models, and the energies and bytes of what they were shown."""

    a: nn.Module
    b: nn.Module
    energies: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0], [0.0, 0.0]])
    equal: bool | None = None
    sizes: tuple[int, int] | None = None
    problem: str = "this batch does not reach the cache"

    def add(self, k: Tensor, v: Tensor) -> None:
        """Compare both modules on keys and values (batch, heads, tokens, head_dim)."""
        self.problem = ""
        try:
            (read_a, stored_a), (read_b, stored_b) = (_written(m, k, v) for m in (self.a, self.b))
        except ValueError as error:
            self.problem = f"not compared: {why(error)}"
            return
        for sums, a, b in zip(self.energies, read_a, read_b, strict=True):
            signal, noise = energies(a, b)
            sums[0], sums[1] = sums[0] + signal, sums[1] + noise
        if stored_a and stored_b:
            same = all(map(torch.equal, stored_a, stored_b))
            self.equal = same if self.equal is None else same and self.equal
        tokens = k.shape[0] * k.shape[-2]
        self.sizes = tuple(
            sum(t.numel() * t.element_size() for t in of) // tokens for of in ((k, v), stored_b or (k, v))
        )  # type: ignore[assignment]


class _Watching(hook.Passing):
    """The cache that an attention module sees: it shows keys and values to a pair, and goes on."""

    def __init__(self, pair: _Pair, module: nn.Module, cache: Any) -> None:
        super().__init__(module, cache)
        self.pair = pair

    def update(self, k: Tensor, v: Tensor, layer_idx: int = 0, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.pair.add(k, v)
        return (k, v) if self.cache is None else self.cache.update(k, v, layer_idx, *args, **kwargs)


def _written(module: Any, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Return what attention reads of keys and values, and the bytes that a module stores, now or after convert."""
    quant = getattr(module, "kv_quant", None)
    if quant is None:
        return (k, v), ()
    store = _Store()
    read = hook.Passing(module, store).update(k, v)
    key, _ = store.given
    if key.dtype == torch.uint8:  # and so is the value
        return read, store.given
    if not quant.fake_quant:
        return read, ()
    formats = {"k_scale": quant.config.k_format, "v_scale": quant.config.v_format}
    return read, tuple(
        kv.pack(x, format, quant.scale(module, name, format))
        for x, (name, format) in zip((k, v), formats.items(), strict=True)
    )


def caches_of(a: nn.Module, b: nn.Module, batch: Any) -> tuple[CacheRow, ...]:
    """Return a row for each attention module whose cache is quantised in a or b. Model a runs the batch, or else b.

    Raises:
        ValueError: one model has no such module, or neither runs the batch.
    """
    found = [hook.quantised(model) for model in (a, b)]
    names = list(dict.fromkeys(fqn for side in found for fqn in side))
    if not names:
        return ()
    modules = [dict(model.named_modules(remove_duplicate=False)) for model in (a, b)]
    if missing := next((fqn for fqn in names if not all(fqn in side for side in modules)), None):
        raise ValueError(f"{missing}: its KV cache is quantised in one model, and the other has no such module")
    problem = ""
    for driver in modules:
        pairs = {fqn: _Pair(modules[0][fqn], modules[1][fqn]) for fqn in names}
        watched = hooked(
            driver[fqn].register_forward_pre_hook(partial(_watch, pair), with_kwargs=True)
            for fqn, pair in pairs.items()
        )
        try:
            with watched:
                run(driver[""], batch)
        except Exception as error:  # a kernel that cannot run here: the other model may
            problem = problem or f"not run: {why(error)}"
            continue
        return tuple(_row(fqn, pair) for fqn, pair in pairs.items())
    return tuple(_row(fqn, _Pair(modules[0][fqn], modules[1][fqn], problem=problem)) for fqn in names)


def _watch(pair: _Pair, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put a `_Watching` in the place of the cache: a forward pre-hook behind `hook.pass_cache`."""
    argument = hook.argument(module)
    assert argument is not None
    return hook.in_place(args, kwargs, argument, partial(_Watching, pair, module))


def _row(fqn: str, pair: _Pair) -> CacheRow:
    modules: tuple[Any, Any] = (pair.a, pair.b)
    quants = [getattr(m, "kv_quant", None) for m in modules]
    formats = dict.fromkeys("" if q is None else q.config.about for q in quants)
    scales = hook.static_scales(modules[1] if quants[1] is not None else modules[0])
    off = [
        f"fake quantisation is off in model_{side}"
        for side, q in zip("ab", quants, strict=True)
        if q is not None and not q.converted and not q.fake_quant
    ]
    key, value = (None if pair.problem else decibels(*sums) for sums in pair.energies)
    before, after = pair.sizes or (None, None)
    return CacheRow(
        fqn, " → ".join(f or "high precision" for f in formats), scales, before, after, key, value, pair.equal,
        "; ".join(filter(None, (pair.problem, *off))),
    )  # fmt: skip
