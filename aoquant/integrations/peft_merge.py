"""How an adapter of peft merges into what it adapts: W + s B A is rounded once, however many adapters there are, and
unmerge is exact, since W from before the merge is kept.

Where adapters are merged already, they are taken out first and all are added to the same W.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import Tensor


class Merging:
    """Of a LoRA layer, before peft's class. kept: W from before the merge, if merged; in a list, because a packed
    weight as an attribute would be registered as a parameter.
    """

    kept: list[Tensor]
    lora_A: Any
    merged_adapters: list[str]

    @property
    def label(self) -> str:
        """The name of what is adapted, for errors."""
        raise NotImplementedError

    def replaced(self) -> Tensor:
        """W as it is held, which `restore` takes."""
        raise NotImplementedError

    def sum_with(self, adapters: list[str]) -> Tensor:
        """W with these added, as forward multiplies by it."""
        raise NotImplementedError

    def store(self, weight: Tensor) -> None:
        """Make a sum the base's W."""
        raise NotImplementedError

    def restore(self, kept: Tensor) -> None:
        """Make W what it was."""
        raise NotImplementedError

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into W. safe_merge raises ValueError, before anything is changed, where the sum is not
        finite.
        """
        names = [n for n in check_adapters_to_merge(self, adapter_names) if n in self.lora_A]
        if not names:
            return
        every = [*self.merged_adapters, *names]
        self.unmerge()
        before, weight = self.replaced(), self.sum_with(every)
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
