"""`parameter_groups`: the parameters of a model as an optimizer should meet them."""

from typing import Any

from torch import nn

from aoquant._messages import check_model
from aoquant.linear.learned_scales import learned_scales
from aoquant.planning.heads import heads


def parameter_groups(
    model: nn.Module, weight_decay: float = 0.0, *, scale_lr: float | None = None
) -> list[dict[str, Any]]:
    """Split the trained parameters of `model` into groups for torch's optimizers, learned scales in one of their own.

    A learned scale has the shape of a matrix, (N, 1), and is none: rules such as "weight decay and Muon for what has
    two dimensions" make it shrink or change its sign. Each group has a "name":

        matrices  weights with two dimensions but embeddings and output heads: decayed, and what Muon takes
        others    embeddings, output heads, stacked experts, kernels of convolutions: decayed
        vectors   biases and norms: not decayed
        scales    learned scales: not decayed

    Groups without parameters are left out.

    weight_decay: of the first two groups.
    scale_lr: learning rate of learned scales; None is the optimizer's.

    Raises:
        ValueError: `model` is no module, or weight_decay or scale_lr is negative.

    Example:

            optimizer = torch.optim.AdamW(aoquant.parameter_groups(model, weight_decay=0.1), lr=1e-4)

            groups = {group["name"]: group for group in aoquant.parameter_groups(model, weight_decay=0.1)}
            muon = torch.optim.Muon(groups.pop("matrices")["params"], lr=1e-3)
            adamw = torch.optim.AdamW(list(groups.values()), lr=1e-4)
    """
    check_model(model)
    for name, value in (("weight_decay", weight_decay), ("scale_lr", scale_lr)):
        if value is not None and not value >= 0:
            raise ValueError(f"parameter_groups: {name} must be 0 or more, got {value}")
    scales = {id(p) for p in learned_scales(model).values()}
    outputs = heads(model)
    apart = {
        id(p)
        for module in model.modules()
        if isinstance(module, nn.Embedding) or id(module) in outputs
        for p in module._parameters.values()
    }
    names: dict[str, list[nn.Parameter]] = {"matrices": [], "others": [], "vectors": [], "scales": []}
    for p in model.parameters():
        if p.requires_grad:
            kind = "scales" if id(p) in scales else "vectors" if p.dim() < 2 else "others"
            names["matrices" if kind == "others" and p.dim() == 2 and id(p) not in apart else kind].append(p)
    decays = ("matrices", "others")
    groups = [
        {"name": name, "params": found, "weight_decay": weight_decay if name in decays else 0.0}
        for name, found in names.items()
        if found
    ]
    if scale_lr is not None and names["scales"]:
        groups[-1]["lr"] = scale_lr
    return groups
