"""The config of a KV cache: formats of keys and values, and where static scales come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torchao.core.config import AOBaseConfig
from torchao.quantization import FqnToConfig

from aoquant.formats import KVFormat, get_kv_format

SCHEMA = 1  # as config.SCHEMA: of checkpoints
SCALES = ("pow2", "amax")
# modules, not weights, whose names come first; a KVCacheConfig concerns attention modules alone
ALL_CACHES = r"re:.*(?<!\.weight)"


@dataclass
class KVCacheConfig(AOBaseConfig):
    """Quantise what attention modules write into their KV cache.

    format: "fp8", "fp8-e5m2", "fp8-token-head", "int8-token-head", "int4-token-head", "q8_0", "q4_0" or "nvfp4". key,
        value: another format for one of the two.
    scale: of "fp8", "fp8-e5m2" and "nvfp4": what `aoquant.calibrate` makes of the largest magnitude. "pow2" is the
        power of two at or above amax / 448 (57344, 2688), under which engines write the same bytes on every device;
        "amax" is that ratio itself; a number is the scale.
    per: "tensor" or "head", static scales of each key-value head.
    query: "fp8" where the engine casts queries too, under a scale q_scale of their own.

    Raises:
        ValueError: no format has that name, or the fields do not go together.
    """

    format: str = "fp8"
    scale: str | float = "pow2"
    per: str = "tensor"
    query: str | None = None
    key: str | None = None
    value: str | None = None
    version: int = field(default=SCHEMA, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        formats = (self.k_format, self.v_format)  # a wrong name is an error here
        number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if not (number and 0 < float(self.scale) < float("inf")) and self.scale not in SCALES:
            raise ValueError(f"KVCacheConfig: scale is 'pow2', 'amax' or a finite number above 0, got {self.scale!r}")
        for name, known in (("per", ("tensor", "head")), ("query", (None, "fp8"))):
            if (got := getattr(self, name)) not in known:
                raise ValueError(f"KVCacheConfig: {name} is one of {', '.join(map(repr, known))}, got {got!r}")
        if not any(f.static for f in formats) and (self.scale, self.per) != ("pow2", "tensor"):
            raise ValueError(
                f"KVCacheConfig: {self.k_format.name} makes its scales from each token and head: leave out scale and per"
            )
        if self.version > SCHEMA:
            raise ValueError(
                f"KVCacheConfig: the checkpoint has schema {self.version}, and this aoquant reads schemas up to {SCHEMA}: "
                "upgrade aoquant, or save the checkpoint again with this version"
            )

    @property
    def about(self) -> str:
        """Return the names of the formats: "fp8", "fp8 keys, q8_0 values", "fp8, queries too"."""
        k, v = self.key or self.format, self.value or self.format
        return (k if k == v else f"{k} keys, {v} values") + (", queries too" if self.query else "")

    @property
    def start(self) -> float:
        """Return a static scale before calibration."""
        return 1.0 if isinstance(self.scale, str) else float(self.scale)

    @property
    def k_format(self) -> KVFormat:
        """Return the format of keys."""
        return get_kv_format(self.key or self.format, "k")

    @property
    def v_format(self) -> KVFormat:
        """Return the format of values."""
        return get_kv_format(self.value or self.format, "v")


def as_kv_config(given: Any) -> KVCacheConfig | None:
    """Return a KVCacheConfig for one, for the name of a format, and None for None."""
    if given is None or isinstance(given, KVCacheConfig):
        return given
    if not isinstance(given, str):
        raise ValueError(f"kv_cache takes the name of a KV format or a KVCacheConfig, got {given!r}")
    return KVCacheConfig(given)


def layers_and_cache(config: Any) -> tuple[Any, KVCacheConfig | None]:
    """Return the config of layers and the config of all KV caches, which a recipe may have."""
    by_name = config.fqn_to_config if isinstance(config, FqnToConfig) else {}
    if by_name.keys() == {"_default", ALL_CACHES} and isinstance(by_name[ALL_CACHES], KVCacheConfig):
        return by_name["_default"], by_name[ALL_CACHES]
    return config, None


def under_one_cache(configs: Mapping[str, Any]) -> dict[str, Any]:
    """Return configs by name whose KV cache, if "_default" has one, is that of all attention modules.

    Raises:
        ValueError: another name has a config with a cache.
    """
    parts = {name: layers_and_cache(config) for name, config in configs.items()}
    cached = {name: cache for name, (_, cache) in parts.items() if cache is not None}
    if wrong := [name for name in cached if name != "_default"]:
        raise ValueError(
            f"{wrong[0]}: its recipe has a KV cache, which goes by the names of attention modules: give it to _default, or a recipe "
            "without a cache here and a KVCacheConfig to those"
        )
    of_caches = {ALL_CACHES: cached["_default"]} if cached else {}
    return {name: layers for name, (layers, _) in parts.items()} | of_caches
