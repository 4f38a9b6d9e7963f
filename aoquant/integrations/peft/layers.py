"""LoRA layers on aoquant's layers: `QATLoraLinear` on a prepared layer, `PackedLoraLinear` on a packed one, and
`QATParamWrapper` on a parameter of a prepared module.

On a prepared layer the frozen W has no gradient and no GEMM is spent on one: with dW = dy^T x never formed, dB = s dy^T
(x A^T) and dA = s (dy B)^T x, where x is the quantised GEMM's input. dW is needed only where W trains too, or clipped
values pass no gradient (straight_through="clipped", learned weight scales). A layer keeps its merged weight from
forward to backward, in W's dtype.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora.layer import Linear, ParamWrapper
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor, nn
from torch.func import functional_call

from aoquant import ops
from aoquant.distributed.sharded_linear import is_sharded
from aoquant.formats import Encoded, Operand, Scales
from aoquant.linear.function import pulled_back
from aoquant.linear.packed import adopt
from aoquant.linear.prepared import QATLinear
from aoquant.planning.plan import plan_layer
from aoquant.quantize import apply, config_of
from aoquant.report.measure import weight_value

KEEP_BASE = (True, False, "gaussian", "orthogonal")  # values of init_lora_weights that leave the base weight alone


class _Merging:
    """Round W + s B A once, however many adapters are merged, and unmerge exactly. Stands before peft's class.

    kept: W from before the merge; in a list, because a packed weight as an attribute would become a parameter.
    """

    kept: list[Tensor]
    lora_A: Any
    merged_adapters: list[str]
    label: Any  # name of what is adapted, for errors
    adapted: Any  # () -> the parameter that adapters are added to
    sum_with: Any  # (adapters) -> W with these added, as forward multiplies by it

    def store(self, weight: Tensor) -> None:
        self.adapted().data = weight

    def restore(self, kept: Tensor) -> None:
        self.adapted().data = kept

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into W, together with those that are merged already.

        safe_merge raises ValueError, before anything is changed, where the sum is not finite.
        """
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        if not names:
            return
        every = [*self.merged_adapters, *names]
        self.unmerge()
        before, weight = self.adapted().detach(), self.sum_with(every)
        if safe_merge and not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{self.label}: the merged weight holds NaN or Inf: adapter {', '.join(names)} is broken")
        self.store(weight)
        self.kept = [before]
        self.merged_adapters.extend(every)

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put back W from before the merge, bit for bit."""
        if self.merged_adapters:
            self.restore(self.kept[0])
            self.kept.clear()
            self.merged_adapters.clear()


class _LoraLinear(_Merging, Linear):
    """peft's LoRA layer, merged by one rounding. base: the adapted layer, for errors. refused: options of LoraConfig
    that must be off.
    """

    base: str
    bad_start: Any  # (init_lora_weights) -> why it cannot be had, as it changes the base weight; None when it can
    refused: tuple[str, ...] = ("lora_bias", "fan_in_fan_out", "use_qalora")

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        if (reason := self.why_not(config)) is not None:
            raise ValueError(f"{self.label}: {reason}")
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)

    def why_not(self, config: Any) -> str | None:
        """Return why an option of `config` cannot be had here, and what to do; None when all can."""
        reason: str | None = self.bad_start(config.init_lora_weights)
        if reason is not None:
            return reason
        for option in self.refused:
            if getattr(config, option):
                return f"LoraConfig({option}=...) has no exact meaning on {self.base}: leave it out"
        if self.resolve_lora_variant(config=config) is not None:
            return f"variants of LoRA, such as DoRA, are not supported on {self.base}: use plain LoRA"
        return None

    @property
    def label(self) -> str:
        return self.kwargs.get("target_name") or "linear"

    def merged_weight(self, weight: Tensor, adapters: list[str]) -> Tensor:
        """Return W + s B A in W's dtype, adapter by adapter; autocast, which would round the product, is off."""
        with torch.autocast(weight.device.type, enabled=False):
            for adapter in adapters:
                weight = (weight + self.get_delta_weight(adapter)).to(weight.dtype)
        return weight

    def adapted(self) -> Tensor:
        return self.get_base_layer().weight

    def sum_with(self, adapters: list[str]) -> Tensor:
        return self.merged_weight(self.adapted().detach(), adapters)


class PackedLoraLinear(_LoraLinear):
    """An adapter beside a packed weight, ours or one of torchao's that `aoquant.quantize_` made."""

    base = "a packed weight"

    def bad_start(self, how: Any) -> str | None:
        if how in KEEP_BASE:
            return None
        return (
            f"init_lora_weights={how!r} changes the base weight, and codes are fixed: use True, "
            "False, 'gaussian' or 'orthogonal', or put the adapter on the prepared layer"
        )

    def sum_with(self, adapters: list[str]) -> Tensor:
        return self.merged_weight(weight_value(self.get_base_layer()), adapters)

    def store(self, weight: Tensor) -> None:
        base = self.get_base_layer()
        packed, config = base.weight, config_of(base)
        base.weight = nn.Parameter(weight, requires_grad=False)
        try:
            change = plan_layer(base, config, self.label)
            assert change is not None
            apply(change)
        except BaseException:
            base.weight = packed
            adopt(base)
            raise

    def restore(self, kept: Tensor) -> None:
        self.get_base_layer().weight = nn.Parameter(kept, requires_grad=False)


class QATLoraLinear(_LoraLinear):
    """An adapter in a prepared layer's weight: the forward is that of the merged and converted layer."""

    base = "a prepared layer, whose forward multiplies by the merged weight"
    # replicated layers share a weight, which merges the adapters of all of them
    refused = (*_LoraLinear.refused, "lora_dropout", "layer_replication")

    def bad_start(self, how: Any) -> str | None:
        if how != "loftq":
            return None
        return (
            "init_lora_weights='loftq' replaces the base weight by NF4's values, and this layer has a format of its own: use "
            "True, 'gaussian' or 'pissa'"
        )

    def prepared_base(self) -> QATLinear:
        """Return the base layer, which convert or unprepare may have swapped."""
        base = self.get_base_layer()
        if not isinstance(base, QATLinear):
            raise ValueError(
                f"{self.label}: its base is no prepared layer any more, and the adapter is part of the prepared weight: load or prepare "
                "the base again; before convert or unprepare call merge_and_unload()"
            )
        return base

    def adapted(self) -> Tensor:
        return self.prepared_base().weight

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError(
                f"{self.label}: one forward has one merged weight, so adapter_names cannot mix adapters in a batch"
            )
        if self.disable_adapters and self.merged:
            self.unmerge()
        names = [] if self.disable_adapters or self.merged else [n for n in self.active_adapters if n in self.lora_A]
        if not names:
            return self.get_base_layer()(x)
        base = self.prepared_base()
        if is_sharded(base.weight):
            raise ValueError(
                f"{self.label}: adapters on a prepared layer under tensor parallelism are not supported: leave the layer whole in the "
                "plan of parallelize_module, or shard the model with fully_shard"
            )
        if not base.fake_quant:
            return super().forward(x)
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


class QATParamWrapper(_Merging, ParamWrapper):
    """An adapter on a parameter of a prepared module, such as stacked experts (`target_parameters`).

    peft makes the adapted parameter by other operations in forward than in merge, which round differently in bf16. Here
    merge stores what forward multiplies by.
    """

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

    @property
    def label(self) -> str:
        return self.parameter_name

    def adapted(self) -> Tensor:
        return self.get_param()

    def sum_with(self, adapters: list[str]) -> Tensor:
        with self._activate_lora(adapters):
            weight: Tensor = getattr(self.get_base_layer(), self.parameter_name).detach().clone()
        return weight


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
            a,
            b,
            None if w_held is None else w_held.transform,
            *(ops.codes(x_MK, x_as, held).tensors if x_as else (x_MK,)),
        )
        ctx.scaling, ctx.x_as, ctx.w_as = scaling, x_as, w_as
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, wt, *parts = ctx.saved_tensors
        x_MK = parts[0]
        if ctx.x_as:
            encoded = Encoded.of(parts, a.shape[1])
            x_MK = pulled_back(ops.decode(encoded, ctx.x_as, grad.dtype), ctx.w_as, Scales(transform=wt))
        g_MN, x_MK = grad.reshape(-1, grad.shape[-1]).to(a.dtype), x_MK.to(a.dtype)
        da = ((g_MN @ b).t() @ x_MK) * ctx.scaling
        db = (g_MN.t() @ (x_MK @ a.t())) * ctx.scaling
        return grad, None, da, db, *[None] * (len(ctx.needs_input_grad) - 4)
