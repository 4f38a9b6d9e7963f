"""Configs: what to do to a linear layer.

A PTQ config (`NVFP4WeightConfig()`, or one of torchao's) says what is deployed; alone, it quantises. `QATConfig(base,
step=...)` wraps it. Configs are plain dataclasses of names and numbers, so that torchao's config loader can put them in
a checkpoint; their `version`, which torchao writes, is the checkpoint schema.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

from torchao.core.config import AOBaseConfig
from torchao.quantization import FqnToConfig

from aoquant import serving
from aoquant._messages import warn
from aoquant.formats import (
    MX,
    NVFP4,
    Affine,
    Float8,
    Format,
    FourOverSix,
    GridFlip,
    NVFP4Dialect,
    NVFP4Search,
    Operand,
    get_format,
    get_operand,
)
from aoquant.formats.operand import SCALES
from aoquant.hybrid import HybridConfig, backward_slots, check_seed
from aoquant.kv.cache_config import KVCacheConfig, as_kv_config, layers_and_cache, under_one_cache
from aoquant.linear.recipe import STRAIGHT_THROUGH, LinearRecipe
from aoquant.transforms import Transform

STEPS = ("prepare", "convert")
SCHEMA = 1  # of checkpoints: raise it when older versions could not read what is written
MX_RULES = ("rceil", "floor", "ceil", "even")  # torchao's
# every expert, stacked or a list of layers, but a router that lies among them (JetMoe's attention)
ALL_EXPERTS = r"re:(.*\.)?experts(\.(?!(.*\.)?router(\.|$)).*)?"
# attention under the names that models give it; Nemotron-H calls it "mixer", as its other layers, so by its layers, too
ATTENTION = r"re:(?i:(.*\.)?[^.]*(attn|attention)[^.]*(\..*)?|.*\.[qkvo]_proj)"

FIND: list[Callable[[str], Any]] = []  # `recipes.get_recipe` alone, which adds itself: recipes are made of configs

# how messages call a type
TYPES: dict[type, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    Transform: "aoquant.Hadamard(size) or aoquant.WUSH(size)",
    NoneType: "None",
}


def check_types(owner: str, types: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ValueError unless each of the given values has its type, which is among `TYPES` or a union of them; others
    are not checked.

    True and False are no numbers here, though Python counts them as integers; an integer is a number.
    """
    for name, type_ in types.items():
        allowed = get_args(type_) if isinstance(type_, UnionType) else (type_,)
        if not TYPES.keys() >= set(allowed):
            continue
        got = given[name]
        wide = (*allowed, int) if float in allowed else allowed
        if not (bool in allowed if isinstance(got, bool) else isinstance(got, wide)):
            raise ValueError(f"{owner}: {name} takes {' or '.join(TYPES[t] for t in allowed)}, got {got!r}")


def rule_of(config: str, rules: Mapping[str, tuple[str, ...]], numerics: str, got: str) -> str:
    """`got`, which has to be one of the rules of those numerics."""
    if got not in rules[numerics]:
        homes = [repr(n) for n, found in rules.items() if got in found]
        raise ValueError(
            f"{config}: with numerics={numerics!r}, rule must be one of {', '.join(rules[numerics])}, got {got!r}"
            + (f", which goes with numerics={' or '.join(homes)}" if homes else "")
        )
    return got


def choice(config: Any, name: str, *allowed: str) -> str:
    """Return a config's value of that name, which has to be one of `allowed`."""
    got: str = getattr(config, name)
    if got not in allowed:
        raise ValueError(f"{type(config).__name__}: {name} must be one of {', '.join(allowed)}, got {got!r}")
    return got


@dataclass
class WeightConfig(AOBaseConfig):
    """Base of aoquant's PTQ configs: linear layers get a `PackedTensor` weight.

    activation: name of a format for the layer's input, quantised in every forward; None keeps it as it is. A per-tensor
        format followed by "-static" ("int8-tensor-static") has a scale that `aoquant.calibrate` finds and convert
        freezes.
    transform: of both operands before they are rounded, where a config has the field: `aoquant.Hadamard(16)`,
        `aoquant.WUSH(16)`.
    version: the checkpoint schema.
    """

    version: int = field(default=SCHEMA, kw_only=True, repr=False)

    def weight_format(self) -> Format | Operand:
        raise NotImplementedError

    def recipe(self) -> LinearRecipe:
        """Return the recipe that prepare trains and convert packs."""
        activation: str | None = getattr(self, "activation", None)
        transform: Transform | None = getattr(self, "transform", None)
        return activated(LinearRecipe(None, self.weight_format(), transform=transform), activation)

    def complete(self) -> None:
        """Replace the defaults that depend on other fields."""

    def __post_init__(self) -> None:
        check_types(type(self).__name__, get_type_hints(type(self)), vars(self))
        if self.version > SCHEMA:
            raise ValueError(
                f"{type(self).__name__}: the checkpoint has schema {self.version}, and this aoquant reads schemas up to "
                f"{SCHEMA}: upgrade aoquant, or save the checkpoint again with this version"
            )
        if (group := getattr(self, "group_size", None)) is not None and group < 1:
            raise ValueError(f"{type(self).__name__}: group_size must be an integer of at least 1, got {group!r}")
        self.complete()
        self.recipe()  # a wrong name or number is an error here, not in the middle of a model


@dataclass
class Int4WeightConfig(WeightConfig):
    """int4 weights, asymmetric per group of `group_size` along K (MSLK's numerics); any group that divides K."""

    group_size: int = 128
    activation: str | None = None

    def weight_format(self) -> Format | Operand:
        return get_format(f"int4-g{self.group_size}")


@dataclass
class IntxWeightConfig(WeightConfig):
    """Integer weights of 2 to 8 bits, per group of `group_size` along K, or per row when it is None.

    mapping: "symmetric" (the largest positive value may clip), "noclip" (symmetric, nothing clips) or "asymmetric" (a
        zero point), which takes 1 bit too.
    """

    bits: int = 4
    group_size: int | None = 32
    activation: str | None = None
    mapping: str = "symmetric"

    def weight_format(self) -> Format:
        mapping = choice(self, "mapping", "symmetric", "noclip", "asymmetric")
        least = 1 if mapping == "asymmetric" else 2
        if not least <= self.bits <= 8:
            raise ValueError(f"IntxWeightConfig: bits must be {least} to 8 with mapping={mapping!r}, got {self.bits}")
        if self.group_size is None:
            return Affine(self.bits, mapping=mapping)
        return Affine(self.bits, "group", self.group_size, mapping)


@dataclass
class Int8WeightConfig(WeightConfig):
    """Symmetric int8 weights with a float32 scale per row ("row"), or per tensor ("tensor")."""

    granularity: str = "row"
    activation: str | None = None

    def weight_format(self) -> Format:
        return Affine(8, choice(self, "granularity", "row", "tensor"), scales="float32")


@dataclass
class FP8WeightConfig(WeightConfig):
    """float8 weights ("e4m3" or "e5m2") with a float32 scale per row, per tensor, or per block of 128 x 128.

    activation: "default" is e4m3 per row, and per 1 x 128 beside blocks, which sum each block's products by themselves.
    """

    element: str = "e4m3"
    granularity: str = "row"
    activation: str | None = "default"

    def complete(self) -> None:
        if self.activation == "default":
            self.activation = "fp8-1x128" if self.granularity == "block" else "fp8-row"

    def weight_format(self) -> Format:
        element = choice(self, "element", "e4m3", "e5m2")
        if choice(self, "granularity", "row", "tensor", "block") == "block":
            return Float8(element, "block", rows=128, cols=128)
        return Float8(element, self.granularity)


@dataclass
class MXFP4WeightConfig(WeightConfig):
    """MXFP4 weights.

    rule: how a block becomes its power-of-two scale. numerics "ao" (torchao): "rceil" (default), "floor", "ceil",
        "even" or "quest"; "xx" (QuantLinear): "absmax"; "qutlass": "absmax" (default) or "quest".
    activation: "default" is the same numerics, and "mxfp4" beside a weight of torchao's rules.
    """

    rule: str = "default"
    activation: str | None = "default"
    transform: Transform | None = None
    numerics: str = "ao"

    def complete(self) -> None:
        if self.rule == "default":
            self.rule = "rceil" if self.numerics == "ao" else "absmax"
        format = self.weight_format()
        if self.activation == "default":
            self.activation = "mxfp4" if self.numerics == "ao" and self.rule in MX_RULES else format.name

    def weight_format(self) -> Format | Operand:
        numerics = choice(self, "numerics", "ao", "xx", "qutlass")
        rules = {"ao": (*MX_RULES, "quest"), "xx": ("absmax",), "qutlass": ("absmax", "quest")}
        rule = rule_of("MXFP4WeightConfig", rules, numerics, self.rule)
        if rule in MX_RULES:
            return MX("e2m1", rule)
        return get_format("mxfp4-quest" if rule == "quest" else f"{numerics}-mxfp4")


@dataclass
class MXFP8WeightConfig(WeightConfig):
    """MXFP8 weights ("e4m3" or "e5m2"); rule as in `MXFP4WeightConfig`."""

    element: str = "e4m3"
    rule: str = "rceil"
    activation: str | None = "mxfp8"
    transform: Transform | None = None

    def weight_format(self) -> Format:
        element = choice(self, "element", "e4m3", "e5m2")
        return MX(element, choice(self, "rule", *MX_RULES))


@dataclass
class NVFP4WeightConfig(WeightConfig):
    """NVFP4 weights.

    outer: the scale of the whole weight: "dynamic" (absmax / 2688), "static" (`pts`; numerics "xx": .1 unless it is
        given) or "none".
    rule: how a block gets its scale: "absmax"; "search", of thirteen the one that loses least; or "four_over_six", by
        which each block chooses whether its largest value becomes 6 or 4: the outer scale is dynamic then (absmax /
        1536) and metric what blocks compare ("mse", "mae" or "absmax"). tile: the rows that share a scale, 1, or 16
        with "four_over_six" and with numerics "te".
    numerics: the kernel that will run: "ao" (torchao), "te" (TransformerEngine; dynamic), "xx" (QuantLinear),
        "qutlass"; rules are "ao"'s.
    activation: "default" is "nvfp4-row" with numerics "ao", an outer scale for each token, so that no token's result
        depends on its batch ("fouroversix-row" is the like of "four_over_six"); else the same numerics and outer scale
        as the weight. "nvfp4", one outer scale for all tokens of a call, is what torchao's layers compute; "nvfp4-none"
        has block scales alone.
    """

    outer: str = "dynamic"
    pts: float | None = None
    activation: str | None = "default"
    rule: str = "absmax"
    metric: str = "mse"
    tile: int = 1
    transform: Transform | None = None
    numerics: str = "ao"

    def complete(self) -> None:
        if self.numerics == "xx" and self.outer == "static" and self.pts is None:
            self.pts = 0.1
        format = self.weight_format()
        if self.activation == "default":
            self.activation = "nvfp4-row" if self.numerics == "ao" else format.beside.name

    def weight_format(self) -> Format:
        numerics = choice(self, "numerics", "ao", "te", "xx", "qutlass")
        rules = {"ao": ("absmax", "search", "four_over_six"), **dict.fromkeys(("te", "xx", "qutlass"), ("absmax",))}
        rule = rule_of("NVFP4WeightConfig", rules, numerics, self.rule)
        if rule == "four_over_six":
            if (self.outer, self.pts) != ("dynamic", None):
                raise ValueError(
                    "NVFP4WeightConfig: rule='four_over_six' makes its outer scale from the tensor's absmax, so it takes "
                    f"outer='dynamic' and no pts, got outer={self.outer!r}, pts={self.pts!r}"
                )
            return FourOverSix(self.metric, self.tile)
        if self.metric != "mse" or self.tile not in ((1, 16) if numerics == "te" else (1,)):
            raise ValueError(
                "NVFP4WeightConfig: metric belongs to rule='four_over_six', tile=16 to it and to numerics='te', "
                f"got metric={self.metric!r}, tile={self.tile!r} with rule={rule!r}, numerics={numerics!r}"
            )
        outers = {"ao": ["dynamic", "static", "none"], "te": ["dynamic"]}.get(numerics, ["dynamic", "static"])
        outer = choice(self, "outer", *outers)
        if numerics == "ao":
            return (NVFP4Search if rule == "search" else NVFP4)(outer, self.pts)
        if (outer == "static") != (self.pts is not None):
            raise ValueError(
                f"NVFP4WeightConfig: a static outer scale, and only that, needs pts; got outer={outer!r}, pts={self.pts}"
            )
        dialect = NVFP4Dialect(numerics, tile=self.tile)
        return dialect if self.pts is None else dialect.fix(self.pts)


@dataclass
class GridFlipFP4WeightConfig(WeightConfig):
    """GridFlip weights: four-over-six with a second grid, shifted by c, in the blocks whose scale is negative.

    effort: how many scales a block tries: "base" (4), "sided" (6) or "search" (26), see `formats/gridflip.py`.
        alternating: the shift's sign alternates from block to block. tile: rows that share a scale, 1 or 16.
        activation: "nvfp4-row" or "fouroversix-row", say, but not GridFlip.
    """

    effort: str = "base"
    c: float = 0.25
    alternating: bool = False
    activation: str | None = "nvfp4-row"
    tile: int = 1
    transform: Transform | None = None

    def weight_format(self) -> Format:
        if self.activation and get_operand(self.activation.removesuffix("-static")).format.shifts != (0.0, 0.0):
            raise ValueError(
                f"GridFlipFP4WeightConfig: GridFlip is for weights, got activation={self.activation!r}: use 'nvfp4-row' or 'fouroversix-row'"
            )
        return GridFlip(tile=self.tile, effort=self.effort, c=self.c, alternating=self.alternating)


@dataclass
class PackedWeightConfig(WeightConfig):
    """Any weight format, by name, with any activation format and GEMM contract: a checkpoint's `PackedTensor`s."""

    weight: str
    activation: str | None = None
    contract: str = "aoquant"

    def weight_format(self) -> Format | Operand:
        return get_format(self.weight)

    def recipe(self) -> LinearRecipe:
        return dataclasses.replace(super().recipe(), contract=self.contract)


@dataclass
class Packed4WeightConfig(PackedWeightConfig):
    """`PackedWeightConfig` for codes of at most 4 bits: HF reads a weight's size from the class name."""


def packed_config(weight: str, activation: str | None, contract: str = "aoquant") -> PackedWeightConfig:
    """Return the config of a pair of formats, of the class that says the weight's size."""
    few = get_format(weight).bits <= 4
    return (Packed4WeightConfig if few else PackedWeightConfig)(weight, activation, contract)


def activated(recipe: LinearRecipe, activation: str | None) -> LinearRecipe:
    """`recipe` with a named activation format; "-static" at the end of the name asks for calibrated scales."""
    if not activation:
        return recipe
    static = activation.endswith("-static")
    operand = get_operand(activation.removesuffix("-static"))
    return dataclasses.replace(recipe, fprop_input=operand, input_scales="static" if static else "dynamic")


def by_layer(configs: Mapping[str, Any]) -> FqnToConfig:
    """Return torchao's `FqnToConfig`, without its warning of "_default"."""
    with warnings.catch_warnings():  # plans know "_default", and checkpoints name every layer
        warnings.filterwarnings("ignore", message="Config Deprecation: _default")
        return FqnToConfig(dict(configs))


def named(config: Any) -> Any:
    """Return `config` with PTQ configs in the place of recipes' names: alone, or a value of FqnToConfig.

    Raises:
        ValueError: no recipe has that name; the message lists the nearest.
    """
    if isinstance(config, str):
        return FIND[0](config).make()
    if isinstance(config, FqnToConfig) and any(isinstance(c, str) for c in config.fqn_to_config.values()):
        return by_layer(under_one_cache({name: named(c) for name, c in config.fqn_to_config.items()}))
    return config


@dataclass
class QATConfig(AOBaseConfig):
    """Prepare a model for quantisation-aware training, or convert it afterwards. Takes torchao's arguments.

    base_config: a PTQ config of torchao's or ours, or the name of a recipe, which brings its training options
        (backward, straight_through, scales) and its KV cache unless they are given. activation_config, weight_config:
        instead of a base, fake-quantisation configs of torchao's, formats, or names of formats; such layers convert to
        aoquant's packed tensor. An activation_config alone leaves the weight in high precision.
    step: "prepare" or "convert". Convert takes the base that prepare was given, or none, which means the same.
    straight_through: "identity" passes every gradient; "clipped" stops it at values that the largest code clips.
    scales: how training treats the scales that the deployed layer holds. "dynamic": weight scales follow the weights.
        "static": they are frozen when the layer is prepared, and again by `calibrate`. "learned": they are trained, and
        so are static activation scales (LSQ; integers only). Convert takes held scales as they are.
    backward: how the two backward GEMMs quantise their operands: "quartet", "quartet2", the name of a format for all
        four of them, a `HybridConfig`, or None for high precision. "quartet" also sets straight_through="clipped", its
        trust mask, unless that is given.
    seed: of the random numbers that such a backward draws; by default a HybridConfig's own, or 0.
    kv_cache: quantises what attention caches, too: a `KVCacheConfig` or a format's name; as base_config, that alone.
    engine, gpu: they will serve the model, "vllm" on "h100", "h200" or "b200", or "llama.cpp" on "cpu" or "cuda":
        prepare warns where it will compute something else than is trained (`aoquant.serving`).

    Raises:
        ValueError: the arguments do not go together.

    Example:

            QATConfig("int4-g128", backward="quartet2", kv_cache="fp8")
            QATConfig(weight_config="intx4-g32", activation_config="int8-row")
    """

    base_config: Any = None
    activation_config: Any = None
    weight_config: Any = None
    _: KW_ONLY
    step: str = "prepare"
    straight_through: Any = None
    scales: Any = None
    backward: str | HybridConfig | None = None
    seed: Any = None
    engine: str | None = None
    gpu: str | None = None
    kv_cache: Any = None

    def __post_init__(self) -> None:
        base, step = self.base_config, self.step
        self.step = str(getattr(step, "value", step)).lower()
        if isinstance(base, str) and self.step == "prepare":
            for name, value in FIND[0](base).training.items():
                if getattr(self, name) is None:
                    setattr(self, name, value)
        own = self.backward.seed if isinstance(self.backward, HybridConfig) else 0
        straight = "clipped" if self.backward == "quartet" else "identity"
        for name, value in (("straight_through", straight), ("scales", "dynamic"), ("seed", own)):
            if getattr(self, name) is None:
                setattr(self, name, value)
        alone = isinstance(base, KVCacheConfig)
        self.base_config, cache = (None, base) if alone else layers_and_cache(named(base))
        self.kv_cache = as_kv_config(cache if self.kv_cache is None else self.kv_cache)
        if own and self.seed != own:
            raise ValueError(f"QATConfig: seed={self.seed!r}, and its HybridConfig has seed={own}: give one of them")
        if self.step not in STEPS:
            raise ValueError(f"QATConfig: step must be one of {', '.join(STEPS)}, got {step!r}")
        for name, known in (("straight_through", STRAIGHT_THROUGH), ("scales", SCALES)):
            if (got := getattr(self, name)) not in known:
                raise ValueError(f"QATConfig: {name} is one of {', '.join(known)}, got {got!r}")
        backward_slots(self.backward)  # a wrong name is an error here
        check_seed("QATConfig", self.seed)
        self._check_base()
        for said in self._differences():
            warn(said)

    def _check_base(self) -> None:
        base_config: object = self.base_config
        parts = self.activation_config is not None or self.weight_config is not None
        if base_config is not None and parts:
            raise ValueError("QATConfig: give base_config, or weight_config and activation_config, not both")
        if isinstance(base_config, HybridConfig):
            raise ValueError(
                "QATConfig: base_config says what is deployed, and a HybridConfig how it is trained: give quantize_ the HybridConfig "
                "itself, or QATConfig(base, backward=HybridConfig.bwd(...))"
            )
        if base_config is not None and not isinstance(base_config, AOBaseConfig):
            raise ValueError(
                f"QATConfig: base_config must be a PTQ config, got {type(base_config).__name__}; formats go to weight_config="
            )
        if self.step == "prepare" and base_config is None and not parts and self.kv_cache is None:
            raise ValueError("QATConfig: prepare needs a base_config, or a weight_config, or an activation_config")
        if self.step == "convert" and parts:
            raise ValueError("QATConfig: convert takes no weight_config or activation_config; layers remember theirs")

    def _differences(self) -> list[str]:
        """Return what the engine will compute otherwise than is trained."""
        if self.engine is None and self.gpu is None:
            return []
        by_name = getattr(self.base_config, "fqn_to_config", {"": self.base_config})
        bases = {repr(b): b for b in by_name.values() if isinstance(b, WeightConfig) and self.step == "prepare"}
        recipes = [base.recipe().holding(self.scales) for base in bases.values()]
        return serving.foreseen(recipes, self.engine, self.gpu, experts=ALL_EXPERTS in by_name)
