"""peft's adapter on a parameter of a prepared module (`target_parameters`), such as stacked experts.

peft makes the adapted parameter by other operations in forward than in merge, which round differently in bf16. Here
merge stores what forward multiplies by, so merged and converted is what was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor


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
