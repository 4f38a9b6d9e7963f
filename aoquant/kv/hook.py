"""The place between an attention module and its KV cache, where keys and values are quantised.

A forward pre-hook puts a `Passing` in the place of the module's cache. Its `update` gets keys and values as they would
be stored: after norms and rotary embeddings, for latent attention the latent and the rotary key. A prepared module
stores and returns what reading the bytes would give; a converted one stores the bytes themselves, in any cache of
transformers (dynamic, sliding, static), and reads them on the way out. Without a cache attention gets the same values.

The gradient goes straight through an autograd function. A cast to float8 and back would round the gradient to float8.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, distributed, nn

from aoquant.formats import KVFormat
from aoquant.kv import packed
from aoquant.kv.cache_config import KVCacheConfig
from aoquant.ops import kv

NAMES = ("cache", "past_key_values")  # of the cache, among the arguments of attention modules
SCALES = ("k_scale", "v_scale", "q_scale")


@dataclass
class KVQuant:
    """Hold what an attention module quantises its cache by; `module.kv_quant`.

    converted: True when caches hold bytes. fake_quant: the switch of a prepared module. seen: the largest magnitudes
        of keys, values and queries while `observing`; None at other times. argument: name and place of the cache among
        the arguments of forward. found: what the last observation saw. calibrated: True once `calibrate` set scales.
    """

    fqn: str
    config: KVCacheConfig
    argument: tuple[str, int]
    converted: bool = False
    fake_quant: bool = True
    seen: dict[str, Tensor] | None = field(default=None, repr=False)
    found: dict[str, Tensor] = field(default_factory=dict, repr=False)
    calibrated: bool = False

    def scale(self, module: nn.Module, name: str, format: KVFormat) -> Tensor | None:
        """Return the module's static scale called `name`; None for formats without."""
        return getattr(module, name) if format.static else None

    def watch(self, name: str, x: Tensor) -> None:
        """Keep the largest magnitude of x (batch, heads, tokens, head_dim), of each head if scales are per head."""
        assert self.seen is not None
        per_head = self.config.per == "head" and name != "q_scale"
        x = x.detach().float().abs()
        amax = x.amax((0, 2, 3)).view(-1, 1, 1) if per_head else x.amax().view(1)
        self.seen[name] = torch.maximum(self.seen[name], amax) if name in self.seen else amax


class StraightThrough(torch.autograd.Function):
    """Return the second tensor, and pass its gradient to the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantised: Tensor) -> Tensor:
        return quantised.view_as(quantised)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def _straight(x: Tensor, quantised: Tensor) -> Tensor:
    return StraightThrough.apply(x, quantised)  # type: ignore[no-untyped-call]


def fake(x: Tensor, format: KVFormat, scale: Tensor | None) -> Tensor:
    """Return x as attention reads it from the cache, in x's dtype, with x's gradient."""
    with torch.no_grad():
        quantised = kv.values(x, format, scale)
    return _straight(x, quantised) if torch.is_grad_enabled() else quantised


class Passing:
    """The cache that an attention module sees: it quantises, and the real cache, if there is one, stores."""

    def __init__(self, module: nn.Module, cache: Any) -> None:
        self.module, self.cache = module, cache

    def update(self, k: Tensor, v: Tensor, layer_idx: int = 0, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Quantise keys and values (batch, heads, tokens, head_dim), store them, and return what attention reads."""
        module, cache, quant = self.module, self.cache, self.module.kv_quant
        assert isinstance(quant, KVQuant)
        if cache is not None:
            _refuse_cache(quant, cache, layer_idx)
        kf, vf = quant.config.k_format, quant.config.v_format
        held = packed.held(cache, layer_idx)
        bytes_held = held is not None and held.dtype == torch.uint8
        if quant.seen is None and (quant.fake_quant or quant.converted):
            key = packed.New(k, kf, quant.scale(module, "k_scale", kf))
            value = packed.New(v, vf, quant.scale(module, "v_scale", vf))
            # A prepared module stores bytes where the kernel of one query token reads them, as after convert.
            packs = bytes_held or (held is None and not is_latent(module) and packed.attends(key, value))
            if cache is not None and (quant.converted or packs):
                return _stored(quant, module, cache, key, value, layer_idx, args, kwargs)
            k, v = fake(k, kf, key.scale), fake(v, vf, value.scale)
        elif bytes_held:
            raise ValueError(
                f"{quant.fqn}: the cache holds bytes, and fake quantisation is off: start with a new cache"
            )
        elif quant.seen is not None:
            quant.watch("k_scale", k)
            quant.watch("v_scale", v)
        return (k, v) if cache is None else cache.update(k, v, layer_idx, *args, **kwargs)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> Any:
        """Return the number of cached tokens; 0 without a cache."""
        return 0 if self.cache is None else self.cache.get_seq_length(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["cache"], name)


def _stored(
    quant: KVQuant,
    module: nn.Module,
    cache: Any,
    key: packed.New,
    value: packed.New,
    layer_idx: int,
    args: Any,
    kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Store the bytes of keys and values, and return what attention reads of all that the cache gives back."""
    held = packed.held(cache, layer_idx)
    if held is not None and held.dtype != torch.uint8:
        raise ValueError(
            f"{quant.fqn}: the cache holds {held.dtype} already, and this layer is converted and stores bytes: start with a "
            "new cache"
        )
    with torch.no_grad():
        k, v = packed.store(cache, key, value, layer_idx, args, kwargs)
    if isinstance(k, packed.Coded):
        _install(module)
    if torch.is_grad_enabled() and (key.x.requires_grad or value.x.requires_grad):
        if k.shape != key.x.shape or v.shape != value.x.shape:
            raise ValueError(
                f"{quant.fqn}: gradients do not go through tokens that a packed cache holds: call the model with use_cache=False"
            )
        k, v = _straight(key.x, k), _straight(value.x, v)
    return k, v


def _refuse_cache(quant: KVQuant, cache: Any, layer_idx: int) -> None:
    """Raise ValueError for caches of two kinds of attention, that quantise by themselves, or that hold no bytes."""
    layers = getattr(cache, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else cache
    if hasattr(cache, "cross_attention_cache") or hasattr(layer, "_quantize"):
        kind = type(cache if layer is cache or hasattr(cache, "cross_attention_cache") else layer).__name__
        raise ValueError(
            f"{quant.fqn}: its KV cache is quantised by aoquant, and a {kind} quantises or divides it otherwise: pass a "
            "DynamicCache or a StaticCache, or none"
        )
    if quant.converted and type(cache).__name__ == "PagedAttentionCache":
        raise ValueError(
            f"{quant.fqn}: it is converted and stores bytes, and the cache of continuous batching holds the model's dtype: call "
            "generate, or generate_batch on the prepared model, which makes the same tokens"
        )


def pass_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Put a `Passing` in the place of the cache: the forward pre-hook of an attention module."""
    quant = getattr(module, "kv_quant", None)
    if quant is None:
        return None
    return in_place(args, kwargs, quant.argument, partial(Passing, module))


def in_place(
    args: tuple[Any, ...], kwargs: dict[str, Any], argument: tuple[str, int], made: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an attention module with `made(cache)` in the place of its cache, which may be None."""
    name, place = argument
    given = next((n for n in NAMES if n in kwargs), name)
    if given not in kwargs and place < len(args):
        return (*args[:place], made(args[place]), *args[place + 1 :]), kwargs
    return args, {**kwargs, given: made(kwargs.get(given))}


def attach(module: Any, fqn: str, config: KVCacheConfig, *, converted: bool = False) -> None:
    """Quantise the cache of an attention module from now on; it gets buffers k_scale, v_scale and q_scale as needed."""
    found = argument(module)
    assert found is not None
    if not hasattr(module, "kv_quant"):
        module.register_forward_pre_hook(pass_cache, with_kwargs=True)
    module.kv_quant = KVQuant(fqn, config, found, converted)
    where = next((t.device for t in module.parameters()), torch.device("cpu"))
    static = {"k_scale": config.k_format.static, "v_scale": config.v_format.static, "q_scale": config.query is not None}
    for name in (name for name, wanted in static.items() if wanted):
        shape = (heads(module), 1, 1) if config.per == "head" and name != "q_scale" else (1,)
        module.register_buffer(name, torch.full(shape, config.start, dtype=torch.float32, device=where))
    if config.query is not None:
        _install(module)


def attach_named(model: nn.Module, by_name: Mapping[str, Any]) -> None:
    """Quantise the KV caches that a checkpoint's configs name, before their scales are loaded.

    Raises:
        ValueError: the model has no such module, or the module cannot have its config.
    """
    found = attentions(model)
    for fqn, own in by_name.items():
        if isinstance(own, KVCacheConfig):
            reason = why_not(found[fqn], own) if fqn in found else "the model has no such attention module"
            if reason is not None:
                raise ValueError(f"{fqn}: the checkpoint quantises its KV cache, and {reason}")
            attach(found[fqn], fqn, own, converted=True)


def detach(module: Any) -> None:
    """Leave the cache of an attention module as it is from now on."""
    module.kv_quant = None
    for name in SCALES:
        module._buffers.pop(name, None)


def quantised(model: nn.Module) -> dict[str, Any]:
    """Return the modules whose cache is quantised, by name."""
    return {fqn: m for fqn, m in model.named_modules() if getattr(m, "kv_quant", None) is not None}


def scales(model: nn.Module) -> dict[str, Tensor]:
    """Return the static scales of a model's caches, by name."""
    return {f"{fqn}.{n}": m._buffers[n] for fqn, m in quantised(model).items() for n in SCALES if n in m._buffers}


def static_scales(module: nn.Module) -> dict[str, list[float]]:
    """Return the values of a module's static scales, by the names of their buffers; none of those without storage."""
    found = {n: t for n in SCALES if (t := module._buffers.get(n)) is not None and not t.is_meta}
    return {name: scale.flatten().tolist() for name, scale in found.items()}


def said(scales: Mapping[str, list[float]]) -> str:
    """Return static scales for people: the value, or the range of those of several heads."""
    ranges = {name: (f"{min(s):g}", f"{max(s):g}") for name, s in scales.items()}
    return ", ".join(f"{name} {' to '.join(dict.fromkeys(ends))}" for name, ends in ranges.items())


def bytes_per_token(module: nn.Module, config: KVCacheConfig | None) -> int | None:
    """Return the bytes that a module's cache takes for a token, in high precision without a config; None where the
    module does not tell its head dimension.
    """
    dims, rows = head_dims(module), 1 if is_latent(module) else heads(module)
    if not all(dims):
        return None
    if shares(module):
        return 0
    if config is None:
        return rows * sum(dims) * next((t.dtype.itemsize for t in module.parameters() if t.is_floating_point()), 4)
    formats = (config.k_format, config.v_format)
    return rows * sum(f.row_bytes(d) + f.scale_bytes for f, d in zip(formats, dims, strict=True))


def attentions(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that are given a KV cache and hand it to no module inside, by name."""
    takers = {fqn: m for fqn, m in model.named_modules() if argument(m) is not None}
    return {
        fqn: m
        for fqn, m in takers.items()
        if not any(o.startswith(f"{fqn}." if fqn else "") for o in takers if o != fqn)
    }


def argument(module: nn.Module) -> tuple[str, int] | None:
    """Return name and place of the cache among the arguments of forward; None for modules without."""
    parameters = list(inspect.signature(module.forward).parameters)
    return next(((name, parameters.index(name)) for name in NAMES if name in parameters), None)


def heads(module: Any) -> int:
    """Return the number of key-value heads."""
    config = getattr(module, "config", None)
    return int(getattr(config, "num_key_value_heads", 0) or getattr(config, "num_attention_heads", 1))


def is_latent(module: nn.Module) -> bool:
    """Return whether the cache holds a latent and a rotary key, which have one scale."""
    return hasattr(module, "kv_lora_rank")


def shares(module: nn.Module) -> bool:
    """Return whether the module reads keys and values of an earlier one, and writes none."""
    return bool(getattr(module, "is_kv_shared_layer", False))


def why_not(module: Any, config: KVCacheConfig) -> str | None:
    """Return why an attention module cannot have its cache quantised; None when it can."""
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
    except (OSError, TypeError):
        return f"{type(module).__name__}.forward has no source to read, which would show how it uses its cache"
    if "EncoderDecoderCache" in source or "cross_attention_cache" in source:
        return "its cache may hold the keys of a cross-attention too (EncoderDecoderCache)"
    if not any(f"{name}.update(" in source for name in NAMES):
        return f"{type(module).__name__} writes no keys and values by its cache's update, as linear attention does not"
    foreign = [type(m).__name__ for m in module.children() if type(m).__name__ == "QuantizedKVCache"]
    if foreign or type(module).__name__.startswith("_Quant"):
        return f"another library quantises its cache already ({(foreign or [type(module).__name__])[0]})"
    if is_latent(module) and (config.per == "head" or config.query):
        return "latent attention has one scale for all heads, and its queries are multiplied unquantised: leave out per and query"
    if config.query and not hasattr(_interfaces(module), "get_interface"):
        return f"{type(module).__name__} calls no attention function of transformers, where queries could be quantised"
    dims = head_dims(module)
    formats = (config.k_format, config.v_format)
    return next((r for d, f in zip(dims, formats, strict=True) if d and (r := f.why_not(d))), None)


def head_dims(module: Any) -> tuple[int, int]:
    """Return the lengths of cached rows of keys and values, 0 where they are not known."""
    if is_latent(module):
        return int(module.kv_lora_rank), int(module.qk_rope_head_dim)
    d = int(getattr(module, "head_dim", 0) or 0)
    return d, d


def _interfaces(module: nn.Module) -> Any:
    """Return transformers' table of attention functions, as the module's own file imports it."""
    return getattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS", None)


def _install(module: nn.Module) -> None:
    """Let `_attention` stand before any attention function that the module calls by transformers' table."""
    table: Any = type(_interfaces(module))
    original = getattr(table, "get_interface", None)
    if original is None or getattr(original, "of_aoquant", False):
        return

    @wraps(original)
    def get_interface(self: Any, *args: Any, **kwargs: Any) -> Any:
        return partial(_attention, original(self, *args, **kwargs))

    vars(get_interface)["of_aoquant"] = True
    table.get_interface = get_interface


def _attention(
    function: Callable[..., Any], module: Any, query: Tensor, key: Any, value: Any, attention_mask: Any = None, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Call an attention function with quantised queries, if asked, and decoded bytes; or attend to the bytes."""
    quant = getattr(module, "kv_quant", None)
    if quant is not None and quant.config.query is not None:
        if quant.seen is not None:
            quant.watch("q_scale", query)
        elif quant.fake_quant or quant.converted:
            query = fake(query, KVFormat(quant.config.query), module.q_scale)
    if isinstance(key, packed.Coded) and isinstance(value, packed.Coded):
        made = None if args else packed.attend(function, query, key, value, attention_mask, kwargs)
        if made is not None:
            return made, None
        key, value = key.decoded(), value.decoded()
    return function(module, query, key, value, attention_mask, *args, **kwargs)


@contextmanager
def observing(modules: Iterable[Any]) -> Iterator[None]:
    """Let prepared modules keep the largest magnitudes that they see inside, and quantise nothing."""
    quants: list[KVQuant] = [m.kv_quant for m in modules]
    for quant in quants:
        quant.seen = {}
    try:
        yield
    finally:
        for quant in quants:
            quant.found, quant.seen = quant.seen or {}, None


def calibrated(modules: Mapping[str, Any]) -> dict[str, dict[str, Tensor] | str]:
    """Return new scales of each module that was observed, by name, or why there are none; ranks are reduced."""
    found: dict[str, dict[str, Tensor] | str] = {}
    for fqn, module in modules.items():
        config, seen = module.kv_quant.config, module.kv_quant.found
        for name, buffer in ((n, module._buffers[n]) for n in SCALES if n in module._buffers):
            amax = seen.get(name, torch.zeros_like(buffer)).to(buffer.device)
            if distributed.is_available() and distributed.is_initialized():
                distributed.all_reduce(amax, distributed.ReduceOp.MAX)
            seen[name] = amax
        if is_latent(module) and "k_scale" in seen:
            seen["k_scale"] = seen["v_scale"] = torch.maximum(seen["k_scale"], seen["v_scale"])
        formats = {"k_scale": config.k_format, "v_scale": config.v_format, "q_scale": KVFormat("fp8")}
        kept = {n: t for n, t in seen.items() if n in module._buffers}
        if not all(bool((t.isfinite() & (t > 0)).all()) for t in kept.values()):
            found[fqn] = "keys, values or queries were not reached, zero throughout, NaN or Inf: run other batches"
        else:
            found[fqn] = {n: formats[n].static_scale(t, config.scale == "pow2") for n, t in kept.items()}
    return found


def to_calibrate(model: nn.Module) -> dict[str, Any]:
    """Return prepared modules whose scales come from data, by name."""
    return {
        fqn: m
        for fqn, m in quantised(model).items()
        if not m.kv_quant.converted and isinstance(m.kv_quant.config.scale, str) and m._buffers.keys() & set(SCALES)
    }


def uncalibrated(modules: Iterable[Any]) -> list[str]:
    """Return the names of modules whose static scales are all 1.0 and came from nowhere."""
    return [
        m.kv_quant.fqn
        for m in modules
        if isinstance(m.kv_quant.config.scale, str)
        and not m.kv_quant.calibrated
        and (own := [m._buffers[n] for n in SCALES if n in m._buffers])
        and not any(t.is_meta for t in own)
        and all(bool((t == 1).all()) for t in own)
    ]
