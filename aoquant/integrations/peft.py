"""LoRA adapters on layers of aoquant's, through plain `peft.get_peft_model`.

An adapter on a prepared layer and one on a packed layer are different models:

- on a PREPARED layer, quantisation-aware training of the merged weight: the forward multiplies by fake_quantize(W + s B
  A), which is what convert leaves after `merge_and_unload`, bit for bit. Train, merge, convert: no loss at the merge.
- on a PACKED layer, an adapter beside a quantised base: y = x W^ + s B A x, W^ fixed. It is deployed as it was trained,
  base and adapter apart. Merging rounds again, W^' = encode(decode(codes) + s B A) in the same format, and that costs
  what PTQ of a small change costs.

Prepare or quantise first, then add adapters; the other order is refused. The frozen W has no gradient and no GEMM is
spent on one: with dW = dy^T x never formed, dB = s dy^T (x A^T) and dA = s (dy B)^T x, where x is what the quantised
GEMM saw. Only where W trains too, or clipped values pass no gradient (straight_through="clipped", learned weight
scales), is dW needed. A layer keeps its merged weight from forward to backward, in W's dtype.

peft builds its layers from a list of dispatchers; importing aoquant puts one in front of torchao's (see
`_register.py`). Gradients have to come through every layer above an adapter, adapted or not, and torchao's kernels give
the input of a packed layer none, so injecting adapters also mends those layers (`peft_gradients.py`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear, ParamWrapper
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn
from torch.func import functional_call

from aoquant import ops
from aoquant.formats import Encoded, Operand, Scales
from aoquant.integrations import peft_gradients
from aoquant.layers import held
from aoquant.layers.kinds import is_packed, kind_of
from aoquant.layers.linear import pulled_back
from aoquant.layers.packed import adopt
from aoquant.layers.qat import PreparedModule, QATLayer, QATLinear
from aoquant.parallel.linear import is_sharded
from aoquant.planning.plan import plan_layer
from aoquant.quantize import apply, config_of
from aoquant.report.measure import weight_value


def install(module: ModuleType) -> None:
    """Put `dispatch` in front of the torchao dispatcher of `peft.tuners.lora.model`, and checks around every tuner's
    injection.
    """
    before: Callable[..., nn.Module | None] = module.dispatch_torchao

    def dispatch_torchao(target: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> nn.Module | None:
        return dispatch(target, adapter_name, config, **kwargs) or before(target, adapter_name, config=config, **kwargs)

    module.dispatch_torchao = dispatch_torchao  # type: ignore[attr-defined]
    inject = BaseTuner.inject_adapter

    @functools.wraps(inject)
    def inject_adapter(tuner: BaseTuner, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        learned = _trained_scales(model)
        with _only_lora(tuner):
            inject(tuner, model, *args, **kwargs)
        peft_gradients.mend(model)
        if frozen := [name for name, scale in learned.items() if not scale.requires_grad]:
            warnings.warn(
                f"peft froze {len(frozen)} learned scales ({frozen[0]}, ...), as all that is no adapter: they keep their values; to train "
                "them too, call requires_grad_(True) on them, and keep the base's state_dict, as peft saves adapters alone",
                stacklevel=2,
            )

    BaseTuner.inject_adapter = inject_adapter


def _trained_scales(model: nn.Module) -> dict[str, Tensor]:
    """The learned scales of prepared layers that are trained, by name."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, QATLayer)]
    scales = {f"{name}.{part}": getattr(m, part) for name, m in layers for part in held.names(m)}
    return {name: scale for name, scale in scales.items() if scale.requires_grad}


@contextmanager
def _only_lora(tuner: BaseTuner) -> Iterator[None]:
    """Let `tuner` adapt prepared layers only if it is LoRA: others add to the output of a rounded weight, and merge
    changes it.
    """
    replace = tuner._create_and_replace

    def create_and_replace(config: Any, adapter_name: str, target: nn.Module, *args: Any, **kwargs: Any) -> None:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, QATLayer) and config.peft_type != "LORA":
            raise ValueError(
                f"{base.prepared.fqn}: {config.peft_type.value} has no exact meaning on a prepared layer, its merge would change what was "
                "trained: use LoraConfig, or leave the layer out of target_modules"
            )
        replace(config, adapter_name, target, *args, **kwargs)

    tuner._create_and_replace = create_and_replace
    try:
        yield
    finally:
        del tuner._create_and_replace


def dispatch(target: nn.Module, adapter_name: str, config: Any, **kwargs: Any) -> nn.Module | None:
    """The LoRA layer for a layer of ours, None for any other.

    Raises:
        ValueError: an embedding of ours, or an option that has no exact meaning on a quantised layer.
    """
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    name = kwargs.get("target_name", "")
    if (parameter := kwargs.get("parameter_name")) is not None:
        if is_packed(getattr(base, parameter, None)):
            raise ValueError(
                f"{name}: target_parameters={parameter!r} adapts a packed weight, whose codes are fixed: prepare the model instead of "
                "quantising it, or leave the parameter out of target_parameters"
            )
        return (
            QATParamWrapper(target, adapter_name, config=config, **kwargs) if isinstance(base, PreparedModule) else None
        )
    if not (isinstance(base, QATLayer) or config_of(base) is not None):
        return None
    if isinstance(base, nn.Embedding):
        raise ValueError(f"{name}: adapters on a quantised embedding are not supported: leave it out of target_modules")
    if (known := kind_of(base)) is not None and known.transposed:
        raise ValueError(
            f"{name}: adapters on a quantised {known.plain.__name__} are not supported: leave it out of target_modules, or out of quantize_"
        )
    kind = QATLoraLinear if isinstance(base, QATLinear) else PackedLoraLinear
    return kind(target, adapter_name, config=config, **kwargs)


class _LoraLinear(Linear):
    """peft's LoRA layer with a merge that rounds once and an unmerge that is exact. kept: the weight from before the
    merge, if merged.
    """

    kept: list[Any]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        for option in ("lora_bias", "fan_in_fan_out", *self.refused()):
            if getattr(config, option):
                raise ValueError(
                    f"{self.label}: LoraConfig({option}=...) has no exact meaning on {self.base()}: leave it out"
                )
        if self.resolve_lora_variant(config=config) is not None:
            raise ValueError(
                f"{self.label}: variants of LoRA, such as DoRA, are not supported on {self.base()}: use plain LoRA"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def refused(self) -> tuple[str, ...]:
        """Further options of LoraConfig that must be off."""
        return ()

    def base(self) -> str:
        """The class of the adapted layer, for errors."""
        raise NotImplementedError

    def value(self) -> Tensor:
        """The base weight (N, K) that adapters are added to."""
        raise NotImplementedError

    def store(self, weight: Tensor) -> None:
        """Make `weight`, like `value()`, the base layer's."""
        raise NotImplementedError

    def restore(self, kept: Tensor) -> None:
        """Make the base layer's weight what it was."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        return self.kwargs.get("target_name") or "linear"

    def merged_weight(self, weight: Tensor, adapters: list[str]) -> Tensor:
        """W + s B A in W's dtype, adapter by adapter; autocast, which would round the product, is off."""
        with torch.autocast(weight.device.type, enabled=False):
            for adapter in adapters:
                weight = (weight + self.get_delta_weight(adapter)).to(weight.dtype)
        return weight

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the base. safe_merge raises ValueError, before anything is changed, where the sum is not
        finite.
        """
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        if not names:
            return
        merged = list(self.merged_adapters)
        if merged:
            self.unmerge()  # so that all are added to the same weight and rounded once
        before, weight = self.get_base_layer().weight.detach(), self.merged_weight(self.value(), [*merged, *names])
        if safe_merge and not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{self.label}: the merged weight holds NaN or Inf: adapter {', '.join(names)} is broken")
        self.store(weight)
        self.kept = [before]  # in a list: a packed weight as an attribute would be registered as a parameter
        self.merged_adapters.extend([*merged, *names])

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put back the weight from before the merge, bit for bit."""
        if self.merged:
            self.restore(self.kept[0])
            self.kept.clear()
            self.merged_adapters.clear()


class PackedLoraLinear(_LoraLinear):
    """An adapter beside a packed weight, ours or one of torchao's that `aoquant.quantize_` made."""

    def base(self) -> str:
        return "a packed weight"

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        if config.init_lora_weights not in (True, False, "gaussian", "orthogonal"):
            raise ValueError(
                f"{self.label}: init_lora_weights={config.init_lora_weights!r} changes the base weight, and codes are fixed: use True, "
                "False, 'gaussian' or 'orthogonal', or put the adapter on the prepared layer"
            )
        super().update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def value(self) -> Tensor:
        return weight_value(self.get_base_layer())

    def store(self, weight: Tensor) -> None:
        base = self.get_base_layer()
        packed, config = base.weight, config_of(base)
        base.weight = nn.Parameter(weight, requires_grad=False)
        try:
            step = plan_layer(base, config, self.label)
            assert step is not None
            apply(step)
        except BaseException:
            base.weight = packed
            adopt(base)
            raise

    def restore(self, kept: Tensor) -> None:
        self.get_base_layer().weight = nn.Parameter(
            kept, requires_grad=False
        )  # .data of a packed tensor keeps its old codes


class QATLoraLinear(_LoraLinear):
    """An adapter in a prepared layer's weight: the forward is that of the merged and converted layer."""

    def base(self) -> str:
        return "a prepared layer, whose forward multiplies by the merged weight"

    def refused(self) -> tuple[str, ...]:
        return ("lora_dropout",)

    def prepared_base(self) -> QATLinear:
        """The base layer, which convert or unprepare may have swapped."""
        base = self.get_base_layer()
        if not isinstance(base, QATLinear):
            raise ValueError(
                f"{self.label}: its base is no prepared layer any more, and the adapter is part of the prepared weight: load or prepare "
                "the base again; before convert or unprepare call merge_and_unload()"
            )
        return base

    def value(self) -> Tensor:
        return self.prepared_base().weight.detach()

    def store(self, weight: Tensor) -> None:
        self.prepared_base().weight.data = weight

    def restore(self, kept: Tensor) -> None:
        self.store(kept)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError(
                f"{self.label}: one forward has one merged weight, so adapter_names cannot mix adapters in a batch"
            )
        if self.disable_adapters and self.merged:
            self.unmerge()
        names = [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if n in self.lora_A]
        if not names:
            y: Tensor = self.get_base_layer()(x)
            return y
        base = self.prepared_base()
        if is_sharded(base.weight):
            raise ValueError(
                f"{self.label}: adapters on a prepared layer under tensor parallelism are not supported: leave the layer whole in the "
                "plan of parallelize_module, or shard the model with fully_shard"
            )
        if not base.fake_quant:
            y = super().forward(x)
            return y
        recipe = base.prepared.recipe
        clips = recipe.straight_through == "clipped" or recipe.weight_scales == "learned"
        dense = base.weight.requires_grad or clips
        with torch.set_grad_enabled(dense and torch.is_grad_enabled()):
            merged = self.merged_weight(base.weight, names)
        y = functional_call(base, {"weight": merged}, (x,))
        if not dense and torch.is_grad_enabled():
            held, w_held = base.held_scales("input"), base.held_scales("weight")
            sides = recipe.fprop_input, recipe.fprop_weight, held, w_held
            for n in names:
                a, b = self.lora_A[n].weight, self.lora_B[n].weight
                y = _LowRankGradient.apply(y, x, a, b, self.scaling[n], *sides)  # type: ignore[no-untyped-call]
        return y


class QATParamWrapper(ParamWrapper):
    """An adapter on a parameter of a prepared module, such as stacked experts (`target_parameters`).

    peft makes the adapted parameter by other operations in forward than in merge, which round differently in bf16. Here
    merge stores what forward multiplies by. kept: the parameter from before the merge, if merged.
    """

    kept: list[Tensor]

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """The parameter is the adapted one. It is made here, where autocast, which would round it, is off."""
        with super()._activate_lora(active_adapters):
            if any(name in self.lora_A for name in active_adapters):
                with torch.autocast(
                    self.get_base_layer().parametrizations[self.parameter_name].original.device.type, enabled=False
                ):
                    getattr(self.get_base_layer(), self.parameter_name)  # kept until the context ends
            yield

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into the parameter. safe_merge raises ValueError, before it is changed, where the sum is not
        finite.
        """
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        if not names:
            return
        merged = list(self.merged_adapters)
        if merged:
            self.unmerge()
        with self._activate_lora([*merged, *names]):
            weight = getattr(self.get_base_layer(), self.parameter_name).detach().clone()
        if safe_merge and not bool(torch.isfinite(weight).all()):
            raise ValueError(
                f"{self.parameter_name}: the merged weight holds NaN or Inf: adapter {', '.join(names)} is broken"
            )
        parameter = self.get_param()
        self.kept = [parameter.data]
        parameter.data = weight
        self.merged_adapters.extend([*merged, *names])

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put back the parameter from before the merge, bit for bit."""
        if self.merged:
            self.get_param().data = self.kept.pop()
            self.merged_adapters.clear()


QATParamWrapper.__name__ = ParamWrapper.__name__  # by which peft knows that it may wrap another parameter of the module


class _LowRankGradient(torch.autograd.Function):
    """y as it is; backward adds the gradients of A (r, K) and B (N, r) in y = x (W + s B A)^T, in A's dtype. held: x's
    scales, if static.

    Behind a transform the codes are of x', and x' T^-T is what A meets: w_as and w_held are the weight's side of it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x: Tensor,
        a: Tensor,
        b: Tensor,
        scaling: float,
        x_as: Operand | None,
        w_as: Operand,
        held: Scales | None,
        w_held: Scales | None,
    ) -> Tensor:
        x_MK = x.to(y.dtype).reshape(-1, x.shape[-1])  # autocast gave the GEMM y's dtype
        ctx.save_for_backward(
            a, b, None if w_held is None else w_held.transform, *(ops.encode(x_MK, x_as, held)[:4] if x_as else (x_MK,))
        )
        ctx.scaling, ctx.x_as, ctx.w_as = scaling, x_as, w_as
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, wt, *parts = ctx.saved_tensors
        x_MK = parts[0]
        if ctx.x_as:
            codes, scale, zero, outer = parts
            encoded = Encoded(codes, scale, zero, outer, a.shape[1])
            x_MK = pulled_back(ops.decode(encoded, ctx.x_as, grad.dtype), ctx.w_as, Scales(transform=wt))
        g_MN, x_MK = grad.reshape(-1, grad.shape[-1]).to(a.dtype), x_MK.to(a.dtype)
        da = ((g_MN @ b).t() @ x_MK) * ctx.scaling
        db = (g_MN.t() @ (x_MK @ a.t())) * ctx.scaling
        return grad, None, da, db, *[None] * (len(ctx.needs_input_grad) - 4)
