"""Rotations that are fused into a float model's weights, which changes none of its outputs (QuaRot, SpinQuant).

    R1: the residual stream x becomes x Q: embeddings E Q, layers that write to it Q^T W, layers that read it W g Q
    R2: each head's values v become v R: v's rows R^T W, o's columns W R

Q and R are Hadamard matrices behind random signs. They spread outliers over all channels, so that what is rounded,
weights and activations, is closer to normally distributed. An RMS norm commutes with a rotation once its gain g is in
the layers that read it; LayerNorm, which subtracts a mean, and a norm between a layer and the residual stream do not.

Sources: Ashkboos et al. 2024 (QuaRot), Liu et al. 2024 (SpinQuant; its rotations are learned, these are not).
"""

from typing import Any

import torch
from torch import Tensor, nn

from aoquant._messages import refuse, warn
from aoquant.linear.kinds import is_linear, matrix_of
from aoquant.planning.heads import input_embeddings, output_embeddings
from aoquant.planning.tied import identity
from aoquant.ptq.links import Link, Structure, bare, is_norm, offset, replace, values_of, why_not_replaced
from aoquant.transforms.hadamard import hadamard_matrix


@torch.no_grad()
def rotate(model: nn.Module, structure: Structure, *, stream: bool, heads: bool) -> None:
    """Rotate a float model's residual stream (R1), its values in each head (R2), or both, in place of its weights.

    An output head that is tied to the embedding gets a weight of its own.

    Raises:
        ValueError: naming the modules that R1 or R2 cannot go through.
    """
    if stream:
        _stream(model, structure)
    if heads:
        _heads(model, structure)


def random_hadamard(n: int, seed: int) -> Tensor:
    """Return an orthogonal matrix (n, n) float64: a Hadamard matrix behind random signs.

    Raises:
        ValueError: no Hadamard matrix of this size is known.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    signs = torch.randint(0, 2, (n, 1), generator=generator, device="cpu") * 2 - 1
    return hadamard_matrix(n) * signs


def _stream(model: nn.Module, structure: Structure) -> None:
    embedding = _embedding(model)
    width = embedding.embedding_dim
    modules: dict[str, Any] = dict(model.named_modules())
    norms = {n: m for n, m in modules.items() if is_norm(m) and m._parameters["weight"].shape == (width,)}
    links = {link.source: link for link in structure.links if link.source in norms}
    problems = {n: why for n, m in norms.items() if (why := _why_no_norm(n, m, modules, links, structure)) is not None}
    readers = {n: link for link in links.values() for n in link.layers}
    writers = [n for n, m in modules.items() if is_linear(m) and len(matrix_of(m)) == width and n not in readers]
    head: Any = output_embeddings(model)
    is_tied = head is not None and identity(head.weight) == identity(embedding.weight)
    tied = {n for n, m in modules.items() if is_tied and m is head}
    embeddings = [n for n, m in modules.items() if isinstance(m, nn.Embedding) and m.embedding_dim == width]
    shared = tied | {n for n in embeddings if tied and modules[n] is embedding}  # these two are untied below
    problems |= why_not_replaced(modules, [n for n in (*norms, *readers, *writers, *embeddings) if n not in shared])
    unseen = {n for n in (*norms, *writers) if n not in structure.reached | tied}
    problems |= dict.fromkeys(
        unseen, "the first batch does not reach it, so nobody knows whether it writes to the stream"
    )
    if not links:
        problems[type(model).__name__] = f"no norm of its residual stream, {width} wide, is read by linear layers alone"
    try:
        q_DD = random_hadamard(width, 0)
    except ValueError as error:
        problems[type(model).__name__] = f"its residual stream is {width} wide, and {error}"
    refuse(problems)
    if tied:
        _untie(model, head, embedding)
    for name in embeddings:
        _multiply(modules[name], "weight", right=q_DD)
    for name in writers:
        _multiply(modules[name], "weight", left=q_DD.t())
        if modules[name]._parameters.get("bias") is not None:
            _multiply(modules[name], "bias", right=q_DD)
    for name, link in readers.items():
        norm = modules[link.source]
        gain = norm._parameters["weight"].detach().double() + (offset(norm) or 0.0)
        _multiply(modules[name], "weight", right=gain[:, None].cpu() * q_DD)
    for name in links:
        weight = modules[name]._parameters["weight"]
        replace(modules[name], "weight", torch.full_like(weight, 1.0 - (offset(modules[name]) or 0.0)))


def _heads(model: nn.Module, structure: Structure) -> None:
    modules: dict[str, Any] = dict(model.named_modules())
    links = [link for link in structure.links if link.head and not is_norm(modules[link.source])]
    if not links:
        refuse({type(model).__name__: "no layer reads the values of attention heads alone, so there is nothing for R2"})
    refuse(why_not_replaced(modules, [n for link in links for n in (link.source, *link.layers)]))
    for seed, link in enumerate(links, 1):
        try:
            r_DD = random_hadamard(link.head, seed)
        except ValueError as error:
            raise ValueError(f"{link.source}: its heads have {link.head} channels, and {error}") from None
        first, last = int(link.channels_K.min()), int(link.channels_K.max()) + 1
        source = modules[link.source]
        for name in ("weight", "bias"):
            if source._parameters.get(name) is not None:
                old = values_of(source, name)
                new = old.reshape(len(old), -1).clone()
                part = new[first:last].unflatten(0, (-1, link.head))
                new[first:last] = torch.einsum("hdk,de->hek", part, r_DD.to(new.device)).flatten(0, 1)
                replace(source, name, new.view(old.shape))
        for name in link.layers:
            w_NK = values_of(modules[name], "weight")
            replace(modules[name], "weight", (w_NK.unflatten(1, (-1, link.head)) @ r_DD.to(w_NK.device)).flatten(1))


def _embedding(model: Any) -> nn.Embedding:
    """Return the embedding that begins the residual stream."""
    found = input_embeddings(model) or next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
    if not isinstance(found, nn.Embedding):
        raise ValueError(f"{type(model).__name__}: has no nn.Embedding, with which its residual stream would begin")
    return found


def _why_no_norm(
    name: str, norm: Any, modules: dict[str, Any], links: dict[str, Link], structure: Structure
) -> str | None:
    """Return why R1 cannot go through a norm that is as wide as the residual stream; None if it can."""
    before = structure.read.get(name)
    if before is not None and is_linear(modules[before]):
        return f"it stands between {before} and the residual stream, and its gain cannot be folded: use r2 alone"
    if offset(norm) is None or not _commutes(norm):
        return (
            "a rotation does not commute with it, because it subtracts the mean or multiplies otherwise: use r2 alone"
        )
    if name not in links:
        return "what reads its output is not linear layers alone, so the rotation cannot be undone: use r2 alone"
    return None


def _commutes(norm: Any) -> bool:
    """Return whether a norm without its gain commutes with a reflection, which moves the direction of the mean."""
    weight: Tensor = norm._parameters["weight"]
    if norm._parameters.get("bias") is not None:
        return False
    x = torch.linspace(-1, 2, len(weight), dtype=torch.float32, device=weight.device)[None] ** 2
    unit = {"weight": torch.full_like(weight, 1.0 - (offset(norm) or 0.0), dtype=torch.float32)}
    v = torch.nn.functional.normalize(torch.arange(1.0, len(weight) + 1, device=weight.device), dim=0)
    y, turned = (bare(norm, unit, t) for t in (x, x - 2 * (x @ v)[:, None] * v))
    return torch.allclose(turned, y - 2 * (y @ v)[:, None] * v, atol=1e-3)


def _untie(model: nn.Module, head: Any, embedding: nn.Embedding) -> None:
    head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=embedding.weight.requires_grad)
    for config in configs_of(model):
        if getattr(config, "tie_word_embeddings", None):
            config.tie_word_embeddings = False
    size = embedding.weight.numel() * embedding.weight.element_size() / 1e6
    warn(
        f"R1 unties the output head from the embedding, because the final norm's gain is folded into it: {size:.0f} MB more"
    )


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configs of a model and of its parts."""
    found = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    for config in list(found.values()):
        found |= {id(c): c for c in vars(config).values() if hasattr(c, "tie_word_embeddings")}
    return list(found.values())


def _multiply(module: Any, name: str, *, left: Tensor | None = None, right: Tensor | None = None) -> None:
    """Replace a parameter by left @ it @ right, computed in float64."""
    value = values_of(module, name)
    if left is not None:
        value = left.to(value.device) @ value
    if right is not None:
        value = value @ right.to(value.device)
    replace(module, name, value)
