"""Fixed weights: several calls with one set of weights, each side of which is encoded once.

Between two optimizer steps the weights of a model stay what they are, and so do their codes. Inside
`fixed_weights(model)` a prepared layer keeps what it made of its weight: the rows that the forward multiplies, and the
columns that the gradient of the input reads. Nothing else changes, so every result has the bits that it has without.
Sides that are drawn at random are drawn anew each time.

Without gradients a layer is then what convert would make of it: codes, and a recipe that stays. So it multiplies by a
`BoundWeight` of these codes, as the converted layer does, and a call costs the host as little.

A weight that is written inside the block raises: PyTorch counts a version for each in-place operation, and
`weight.data = new` gives it another storage. Two writers move no version: a fused optimizer, and FSDP2 when it gathers
a weight into the memory of the last one. So a step of an optimizer counts as a write of each of its weights that has a
gradient. Writes in place that PyTorch does not count (`weight.data.mul_(2)`, through NumPy or a raw pointer, or to
FSDP2's shards) are not seen: only a pass over the weight could find them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from aoquant._messages import check_model
from aoquant.distributed import fsdp
from aoquant.distributed.gathered import GatheredWeight
from aoquant.formats import Encoded
from aoquant.linear.bound import BoundWeight
from aoquant.linear.cache import FixedWeight
from aoquant.linear.prepared import QATLinear


def _bound(layer: QATLinear, rows: Encoded) -> BoundWeight:
    return BoundWeight(rows, layer.prepared.recipe, layer.weight.dtype, None)


@contextmanager
def fixed_weights(model: nn.Module) -> Iterator[None]:
    """Encode each side of the weights of `model`'s prepared linear layers once inside the block: for micro-batches, and
    for `generate` of a model in training, whose layers then multiply as converted ones do.

        with aoquant.fixed_weights(model):
            ids = model.generate(prompts)
            for batch in micro_batches:
                loss(model, batch).backward()
        optimizer.step()

    The codes live until the block ends: as much memory as the packed model, once for each side. Stacked experts,
    compiled layers, layers that tensor parallelism or FSDP1 shards, weights that are computed for each call (merged
    adapters, parametrisations) or made in inference mode, and delayed scales encode as usual.

    A model without prepared layers stays as it is: converted ones hold their codes, float ones have none.

    Raises:
        ValueError: `model` is no module; or inside the block, where a weight has changed, naming the layer.
    """
    check_model(model)
    layers = [m for m in model.modules() if isinstance(m, QATLinear) and m.fixed is None and not fsdp.is_flattened(m)]
    layers = [m for m in layers if not isinstance(m.weight, GatheredWeight)]  # codes already
    for layer in layers:
        layer.fixed = FixedWeight(layer, _bound)

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        written = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        for layer, weight in _weights(model, layers):
            if id(weight) in written and layer.fixed is not None:
                layer.fixed.written()

    steps = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        steps.remove()
        for layer in layers:
            if layer.fixed is not None:
                layer.fixed.end()
            layer.fixed = None


def _weights(model: nn.Module, layers: list[QATLinear]) -> Iterator[tuple[QATLinear, Tensor]]:
    """Each layer with its weight, the weight's learned scale, and the shard that an optimizer has under FSDP2."""
    for layer in layers:
        yield from ((layer, p) for name, p in layer.named_parameters(recurse=False) if name.startswith("weight"))
    ids = {id(layer) for layer in layers}
    for _, p in fsdp.sharded_parameters(model):
        for module in (p._module_info.module, *p._module_info.shared_modules):
            if id(module) in ids:
                yield module, p.sharded_param
