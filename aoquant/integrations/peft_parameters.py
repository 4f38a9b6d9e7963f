"""peft's adapter on a parameter of a prepared module (`target_parameters`), such as stacked experts.

peft makes the adapted parameter by other operations in forward than in merge, which round differently in bf16. Here
merge stores what forward multiplies by, so merged and converted is what was trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from aoquant.integrations.peft_merge import Merging


class QATParamWrapper(Merging, ParamWrapper):
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
        name: str = self.parameter_name
        return name

    def replaced(self) -> Tensor:
        parameter: Tensor = self.get_param()
        return parameter.data

    def sum_with(self, adapters: list[str]) -> Tensor:
        with self._activate_lora(adapters):
            weight: Tensor = getattr(self.get_base_layer(), self.parameter_name).detach().clone()
        return weight

    def store(self, weight: Tensor) -> None:
        self.get_param().data = weight

    def restore(self, kept: Tensor) -> None:
        self.get_param().data = kept


QATParamWrapper.__name__ = ParamWrapper.__name__  # by which peft knows that it may wrap another parameter of the module
