"""AWQ and SmoothQuant: scale a layer's input channels, so that its weight or its activations lose less when rounded.

    y = x W^T = (x / s) (W s)^T

W s is stored, and 1 / s is folded into the norm or the linear layer before. So nothing is left at run time, and the
float model's outputs do not change. Layers that read one tensor share s.

- AWQ (Lin et al., 2023): s_j = mean |x_j|^a / mean (|w_j| over its block's largest)^(1 - a), with the a of a grid for
  which the outputs of the deployed layers err least on rows of calibration data; s = 1 is among the candidates.
- SmoothQuant (Xiao et al., 2022): s_j = max |x_j|^a / max |w_j|^(1 - a), with a given.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aoquant._messages import progress, refuse
from aoquant.linear.checks import cast
from aoquant.linear.prepared import QATLinear
from aoquant.ptq.blocks import Call, tokens_that_count
from aoquant.ptq.calibrate_config import CalibrateConfig
from aoquant.ptq.gram import of_tokens
from aoquant.ptq.links import Link, Structure, is_norm, offset, replace, values_of, why_not_replaced
from aoquant.report.measure import hooked, run

ROWS = 512  # of a layer's input that candidates of AWQ are compared on
SMALLEST = 1e-3  # of the mean over channels: what never occurs is scaled as if it did


class Inputs:
    """Keep of a layer's input the sums over all tokens that count, and some of the rows."""

    def __init__(self, share: int) -> None:
        self.share, self.tokens, self.rows = share, 0, list[Tensor]()
        self.total_K: Any = 0.0
        self.largest_K: Any = None

    def add(self, x: Tensor, mask: Tensor | None) -> None:
        x_MK = of_tokens(x.detach(), mask)
        if len(x_MK):
            size_MK = x_MK.float().abs()
            self.total_K = self.total_K + size_MK.sum(0)
            largest_K = size_MK.amax(0)
            self.largest_K = largest_K if self.largest_K is None else torch.maximum(self.largest_K, largest_K)
            self.rows.append(x_MK[:: max(1, len(x_MK) // self.share)][: self.share].cpu())
            self.tokens += len(x_MK)

    def why_not(self) -> str | None:
        """Return why nothing can be made of it."""
        if not self.tokens:
            return "no token reaches it that is no padding: give batches that use every layer, or leave the layer out"
        if not self.total_K.isfinite().all():
            return "its input holds NaN or Inf: look for it in the batches or in the weights before the layer"
        return None


@torch.no_grad()
def fold(
    model: nn.Module,
    layers: Mapping[str, QATLinear],
    structure: Structure,
    batches: Sequence[Any],
    config: CalibrateConfig,
    *,
    skip: bool,
) -> tuple[dict[str, float], dict[str, str]]:
    """Scale the input channels of prepared layers that compute in high precision, by `config`'s method.

    skip: leave layers as they are whose scales cannot be folded. Returns what the squared error of rounding is of that
    without scales, by layer, and why layers were left.

    Raises:
        ValueError: naming each layer whose scales cannot be folded, or whose input cannot be used.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    links, left = _chosen(modules, layers, structure, smooth="smoothquant" in config.steps)
    if left and not skip:
        refuse(left)
    seen = _watched(model, modules, links, batches)
    refuse({link.layers[0]: why for link in links if (why := seen[link.source].why_not()) is not None})
    gains: dict[str, float] = {}
    with progress(len(links), "scales", "input") as shown:
        for link in links:
            members = {fqn: layers[fqn] for fqn in link.layers if _is_rounded(layers.get(fqn))}
            search = _Search(link, members, seen.pop(link.source))
            s_C, ratio = search.smooth(config.alpha) if "smoothquant" in config.steps else search.awq(config.grid)
            _apply(modules, link, s_C)
            gains |= dict.fromkeys(members, ratio)
            shown.set_postfix(layer=link.layers[0], error=f"{ratio:.2f} of rounding's")
            shown.update(1)
    return gains, left


def _is_rounded(layer: QATLinear | None) -> bool:
    recipe = None if layer is None else layer.prepared.recipe
    return recipe is not None and not recipe.fprop_weight.format.lossless and not recipe.history


def _chosen(
    modules: dict[str, Any], layers: Mapping[str, QATLinear], structure: Structure, *, smooth: bool
) -> tuple[list[Link], dict[str, str]]:
    """Return the links of `layers`, and why layers have none that can be used."""
    problems, links = dict[str, str](), dict[str, Link]()
    for fqn, layer in layers.items():
        recipe, link = layer.prepared.recipe, structure.of(fqn)
        if not _is_rounded(layer):
            continue
        if recipe.fitted:
            problems[fqn] = "its fitted transform (WUSH) scales the same channels: use method='nearest' or 'gptq'"
        elif smooth and (recipe.fprop_input is None or recipe.fprop_input.format.lossless):
            problems[fqn] = "its activations are not quantised, which SmoothQuant is for: use method='awq'"
        elif link is None:
            problems[fqn] = (
                "its input channels are not, one by one, those of a norm or a linear layer before it, so no scale can be "
                "folded: leave it out, use method='gptq', or give skip_incompatible=True to quantise it without a scale"
            )
        elif is_norm(modules[link.source]) and offset(modules[link.source]) is None:
            problems[fqn] = f"{link.source} before it multiplies neither by w nor by 1 + w: use method='gptq'"
        elif why := why_not_replaced(modules, (link.source, *link.layers)):
            problems[fqn] = "; ".join(f"{name}: {reason}" for name, reason in why.items())
        else:
            links[link.source] = link
    return list(links.values()), problems


def _watched(
    model: nn.Module, modules: dict[str, Any], links: Sequence[Link], batches: Sequence[Any]
) -> dict[str, Inputs]:
    """Run the float model, and return the inputs of each link's layers by its source."""
    seen = {link.source: Inputs(-(-ROWS // len(batches))) for link in links}
    mask: Tensor | None = None

    def watch(source: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        seen[source].add(cast(Call(args, kwargs, None).input), mask)

    handles = [
        modules[link.layers[0]].register_forward_pre_hook(partial(watch, link.source), with_kwargs=True)
        for link in links
    ]
    with hooked(handles), progress(len(batches), "inputs", "forward") as shown:
        for batch in batches:
            mask = tokens_that_count(batch)
            run(model, batch)
            shown.update(1)
    return seen


class _Search:
    """Scales of one link, for each channel (C,) of its source that the layers read."""

    def __init__(self, link: Link, layers: dict[str, QATLinear], inputs: Inputs) -> None:
        self.layers = list(layers.values())
        weight = self.layers[0].weight
        used, at_K = link.channels_K.unique(return_inverse=True)
        self.count, self.at_K = len(used), at_K.to(weight.device)
        self.mean_C = self._gathered(inputs.total_K.to(weight.device) / inputs.tokens, "mean")
        self.largest_C = self._gathered(inputs.largest_K.to(weight.device), "amax")
        self.x_MK = torch.cat(inputs.rows)[:ROWS].to(weight.device)
        self.weights = [layer.matrix().detach().float() for layer in self.layers]
        self.wanted = [self.x_MK.float() @ w_NK.t() for w_NK in self.weights]

    def _gathered(self, of_K: Tensor, how: str) -> Tensor:
        """Return (C,): the mean or the largest of the input channels that are one channel of the source."""
        of_C = torch.zeros(self.count, dtype=torch.float32, device=of_K.device)
        return of_C.scatter_reduce(0, self.at_K, of_K.float(), how, include_self=False)

    def smooth(self, alpha: float) -> tuple[Tensor, float]:
        """Return SmoothQuant's (s, error over the error without)."""
        w_K = torch.stack([w_NK.abs().amax(0) for w_NK in self.weights]).amax(0)
        s_C = _floored(self.largest_C) ** alpha / _floored(self._gathered(w_K, "amax")) ** (1 - alpha)
        return s_C, self._error(s_C) / max(self._error(torch.ones_like(s_C)), 1e-300)

    def awq(self, grid: int) -> tuple[Tensor, float]:
        """Return AWQ's (s, error over the error without)."""
        shares = []
        for layer, w_NK in zip(self.layers, self.weights, strict=True):
            block = layer.prepared.recipe.fprop_weight.format.block or w_NK.shape[1]
            w_NGB = w_NK.abs().unflatten(1, (-1, block))
            shares.append((w_NGB / w_NGB.amax(-1, keepdim=True).clamp(min=1e-12)).flatten(1))
        w_C, x_C = self._gathered(torch.cat(shares).mean(0), "mean"), _floored(self.mean_C)
        best_C = torch.ones_like(x_C)
        none = least = self._error(best_C)
        for alpha in (i / grid for i in range(grid)):
            s_C = x_C**alpha / (w_C ** (1 - alpha) + 1e-4)
            s_C = s_C / (s_C.amax() * s_C.amin()).sqrt()
            if (error := self._error(s_C)) < least:
                best_C, least = s_C, error
        return best_C, least / max(none, 1e-300)

    def _error(self, s_C: Tensor) -> float:
        s_K, lost = s_C[self.at_K], 0.0
        x_MK = (self.x_MK.float() / s_K).to(self.x_MK.dtype)
        for layer, w_NK, wanted_MN in zip(self.layers, self.weights, self.wanted, strict=True):
            recipe = layer.prepared.recipe
            weight, given = recipe.fprop_weight, recipe.fprop_input
            q_NK = weight.decode(weight.encode((w_NK * s_K).to(layer.weight.dtype)), torch.float32)
            if given is None:
                a_MK = x_MK.float()
            elif given.format.lossless:
                a_MK = given.transformed(x_MK).float()
            else:
                a_MK = given.decode(given.encode(x_MK), torch.float32)
            lost += float((a_MK @ q_NK.t()).sub_(wanted_MN).square().sum())
        return lost


def _floored(size_C: Tensor) -> Tensor:
    return size_C.clamp(min=float(size_C.mean()) * SMALLEST + 1e-30)


def _apply(modules: dict[str, Any], link: Link, s_C: Tensor) -> None:
    """Divide the source's channels by s, and multiply the input channels of the layers."""
    source = modules[link.source]
    parts = {n: values_of(source, n) for n in ("weight", "bias") if source._parameters.get(n) is not None}
    s = torch.ones(len(parts["weight"]), dtype=torch.float64, device=parts["weight"].device)
    s[link.channels_K.unique().to(s.device)] = s_C.double()
    if is_norm(source):
        plus = offset(source) or 0.0
        gain = parts["weight"] + plus
        replace(source, "weight", gain / s - plus)
        stored = values_of(source, "weight") + plus
        s = torch.where((gain == 0) | (stored == 0), s, gain / stored)  # what a 16-bit norm rounds is made up for
    else:
        replace(source, "weight", parts["weight"] / s[:, None])
    if "bias" in parts:
        replace(source, "bias", parts["bias"] / s)
    s_K = s[link.channels_K.to(s.device)]
    for name in link.layers:
        w_NK = values_of(modules[name], "weight")
        replace(modules[name], "weight", w_NK * s_K.to(w_NK.device))
