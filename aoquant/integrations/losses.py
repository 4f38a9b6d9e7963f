"""Losses over a large vocabulary, a chunk of tokens at a time: no tensor of all logits is ever made.

With 262 144 tokens the logits of 2048 positions take 2 GB in float32, and the plain KL divergence holds seven such
tensors. Here the model runs to its last hidden states. Then its own code behind them (output head, soft capping,
scaling: whatever the family has, quantised or tied) runs on one chunk of tokens after another, and each chunk is
differentiated at once, as in Liger Kernel's fused linear losses (arXiv:2410.10989). On a GPU a Triton kernel computes
both losses of a chunk.

Nothing here reads a number back from a GPU: while its long kernels compute a loss, the host issues the layers' short
ones of backward and of the next step.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import masking_utils
from transformers.modeling_outputs import BaseModelOutput

from aoquant.ops.codec import has_triton
from aoquant.ops.codec.triton_kernels import imported
from aoquant.report.measure import having, with_forward

CHUNK_BYTES = 1 << 29  # of one chunk's logits in float32: 512 tokens of a vocabulary of 262 144
CHUNK_SHARE = 32  # of a large GPU's memory, this part instead: each chunk costs a pass over the head's gradient
BLOCK_BYTES = 1 << 26  # of the float32 temporaries inside a chunk
IGNORED = -100  # target of a token that is not scored, as in torch's cross_entropy
LossOf = Callable[[Tensor, slice], Tensor]

_find_packed: Any = getattr(masking_utils, "find_packed_sequence_indices", None)


class _Rows(threading.local):
    """State of a thread. one_text: rows are known to hold one text each, so transformers need not look for several: it
    reads the answer back from the device, and the host would wait for the whole step before.
    """

    one_text = False


_rows = _Rows()


def hidden_states(model: Any, **inputs: Any) -> Tensor:
    """Run `model` to its last hidden states, (B, T, D), in what its output head reads. inputs: of the model's forward.

    The model itself is called, so its hooks run (FSDP2 gathers parameters in them), and computes one position's logits.
    """
    found: list[Tensor] = []

    def first_position(_: nn.Module, __: Any, output: Any) -> Any:
        found.append(output[0])
        return type(output)(last_hidden_state=output[0][:, :1])

    with (
        model.base_model.register_forward_hook(first_position),
        having([_rows], "one_text", "position_ids" not in inputs),
    ):
        model(**{**inputs, "use_cache": False})
    return found[-1]


def _packed_sequence_indices(position_ids: Tensor) -> Any:
    """Stand for transformers' function: None says that rows hold one text each."""
    known = not torch.compiler.is_compiling() and _rows.one_text
    return None if known else _find_packed(position_ids)


if _find_packed is not None:
    masking_utils.find_packed_sequence_indices = _packed_sequence_indices


def logits_of(model: Any, hidden_ND: Tensor) -> Tensor:
    """Return the logits (N, V) that `model` computes from last hidden states: its forward behind the base model."""
    with with_forward([model.base_model], lambda *_, **__: _Hidden(last_hidden_state=hidden_ND[None])):
        ids = torch.zeros((1, len(hidden_ND)), dtype=torch.long, device=hidden_ND.device)
        logits: Tensor = model.forward(input_ids=ids, use_cache=False).logits
    return logits[0]


class _Hidden(BaseModelOutput):
    """Last hidden states alone: what else a family looks for in the output of its base model is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def sent_to(device: torch.device, t: Tensor) -> Tensor:
    """Copy a tensor to a device. A GPU reads it from pinned memory: from other memory a large copy would wait for all
    that the GPU has to do.
    """
    if device.type == "cuda" and t.device.type == "cpu":
        return t.pin_memory().to(device, non_blocking=True)
    return t.to(device)


def chunk_rows(vocabulary: int, tokens: int = 0, device: torch.device | str = "cpu") -> int:
    """Return how many tokens a chunk has on a device. tokens: those of a loss; where they take several chunks, each has
    half as many, which leaves room for the float32 sum of the head's gradient.
    """
    size = CHUNK_BYTES
    if torch.device(device).type == "cuda":
        size = max(size, torch.cuda.get_device_properties(device).total_memory // CHUNK_SHARE)
    rows = max(1, size // (4 * vocabulary))
    return rows if tokens <= rows else max(1, rows // 2)


def chunked_loss(model: Any, hidden_BTD: Tensor, loss_of: LossOf, rows: int | None = None) -> Tensor:
    """Return the sum of `loss_of` over chunks of tokens, a float32 scalar, with the gradients of the plain loss.

    hidden_BTD: last hidden states, from `hidden_states(model, ...)`. loss_of: takes the logits (n, V) of a chunk and
    the slice of its tokens in (B * T), and returns its part of the loss. rows: tokens in a chunk. Gradients of the
    head's parameters are summed over chunks in float32 and rounded once, as one GEMM would. The GEMM of a plain head
    adds to that sum itself; of another head each chunk's gradient is rounded too. In a quantised head whose format
    shares scales among tokens (`batch_invariant` is False) they are shared within a chunk.
    """
    hidden_ND = hidden_BTD.flatten(0, 1)
    inside = {id(p) for p in model.base_model.parameters()}
    head = model.get_output_embeddings()
    behind = [*model.parameters(), *(head.parameters() if head is not None else ())]
    shared = {id(p) for p in head.parameters()} if head is not None else set()
    chosen = {id(p): p for p in behind if p.requires_grad and (id(p) in shared or id(p) not in inside)}
    size = rows or chunk_rows(model.config.get_text_config().vocab_size, len(hidden_ND), hidden_ND.device)

    plain = type(head) is nn.Linear and head.bias is None and type(head.weight) is nn.Parameter
    weight = head.weight if plain and "forward" not in head.__dict__ else None

    def of_chunk(part_ND: Tensor, at: slice, total_VD: Tensor | None) -> Tensor:
        if total_VD is None:
            return loss_of(logits_of(model, part_ND), at)
        with with_forward([head], lambda x: _Head.apply(x, weight, total_VD)):  # type: ignore[no-untyped-call]
            return loss_of(logits_of(model, part_ND), at)

    place = list(chosen).index(id(weight)) if id(weight) in chosen else None
    return _Chunked.apply(of_chunk, size, place, hidden_ND, *chosen.values())  # type: ignore[no-untyped-call]


class _Head(torch.autograd.Function):
    """Multiply by the weight of a plain head. The weight's GEMM of backward adds to a float32 sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_VD: Tensor, total_VD: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_VD)
        ctx.total_VD = total_VD
        return F.linear(x, weight_VD)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (d,) = grad_outputs
        x, weight_VD = (t.to(d.dtype) for t in ctx.saved_tensors)  # another dtype under autocast
        d_NV, x_ND, total_VD = d.flatten(0, -2), x.flatten(0, -2), ctx.total_VD
        if d.is_cuda:
            torch.addmm(total_VD, d_NV.t(), x_ND, out_dtype=torch.float32, out=total_VD)
        else:  # has no GEMM from bfloat16 to float32
            total_VD.addmm_(d_NV.float().t(), x_ND.float())
        return d @ weight_VD, None, None


def _add(summed: list[Tensor | None], found: Sequence[Tensor | None], in_float32: bool) -> None:
    """Add a chunk's gradients. A function, so that no name of the loop holds one of them while the next chunk runs."""
    for i, d in enumerate(found):
        before = summed[i]
        if d is not None:
            summed[i] = before.add_(d) if before is not None else d.float() if in_float32 else d


class _Chunked(torch.autograd.Function):
    """Differentiate each chunk in forward; backward hands out what forward summed. place: the weight of a plain head
    among the parameters, whose sum each chunk is given to add to.
    """

    @staticmethod
    def forward(
        ctx: Any, loss_of: Callable[..., Tensor], size: int, place: int | None, hidden_ND: Tensor, *parameters: Tensor
    ) -> Tensor:
        differentiate = any(ctx.needs_input_grad)
        total = torch.zeros((), device=hidden_ND.device)
        d_hidden_ND = torch.empty_like(hidden_ND) if differentiate else None
        summed: list[Tensor | None] = [None] * len(parameters)
        many = len(hidden_ND) > size
        if place is not None and many and differentiate:
            summed[place] = torch.zeros_like(parameters[place], dtype=torch.float32)
        for start in range(0, len(hidden_ND), size):
            at = slice(start, min(start + size, len(hidden_ND)))
            with torch.set_grad_enabled(differentiate):
                part = hidden_ND[at].detach().requires_grad_(differentiate)
                value = loss_of(part, at, None if place is None else summed[place])
            total += value.detach()
            if d_hidden_ND is None:
                continue
            d_hidden_ND[at], *found = torch.autograd.grad(value, [part, *parameters], allow_unused=True)
            _add(summed, found, many)
            del value, part, found
        ctx.d_hidden_ND = d_hidden_ND
        ctx.summed = [None if d is None else d.to(p.dtype) for d, p in zip(summed, parameters, strict=True)]
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        found = [ctx.d_hidden_ND, *ctx.summed]
        del ctx.d_hidden_ND, ctx.summed
        return None, None, None, *(None if d is None else d.mul_(grad) for d in found)


def next_tokens(ids_BT: Tensor, ignored: int | None = None) -> Tensor:
    """Return the target of each position, (B, T) int64: the next token, or IGNORED at the end of a row.

    ignored: a token that is never a target, such as the one that begins documents.
    """
    targets_BT = F.pad(ids_BT[:, 1:], (0, 1), value=IGNORED)
    return targets_BT if ignored is None else targets_BT.masked_fill(targets_BT == ignored, IGNORED)


def cross_entropy(logits_NV: Tensor, targets_N: Tensor, weight: float = 1.0) -> Tensor:
    """Return `weight` times the sum over rows of the cross entropy to their targets, in nats, float32.

    targets_N: int64 token ids. Rows whose target is IGNORED add nothing; any other that is no token has NaN.

    Raises:
        ValueError: targets are not one for each row, or on another device.
    """
    if targets_N.shape != logits_NV.shape[:1] or targets_N.device != logits_NV.device:
        raise ValueError(
            f"cross_entropy: logits {tuple(logits_NV.shape)} on {logits_NV.device} need a target for each row there, got "
            f"{tuple(targets_N.shape)} on {targets_N.device}"
        )
    return _row_loss(_cross_entropy_rows, logits_NV, targets_N, weight)


def kl_divergence(student_NV: Tensor, teacher_NV: Tensor, weight: float = 1.0) -> Tensor:
    """Return `weight` times the sum over rows of KL(teacher || student), in nats, float32.

    Both are logits. The teacher's get no gradient.

    Raises:
        ValueError: the logits differ in shape.
    """
    if student_NV.shape != teacher_NV.shape:
        raise ValueError(
            f"kl_divergence: the student's logits are {tuple(student_NV.shape)} and the teacher's "
            f"{tuple(teacher_NV.shape)}: give both models one vocabulary and the same tokens"
        )
    return _row_loss(_kl_rows, student_NV, teacher_NV, weight)


def _row_loss(rows: Callable[[Tensor, Tensor], Any], logits_NV: Tensor, targets: Tensor, weight: float) -> Tensor:
    """Return `weight` times the sum of a loss: by a kernel, or by `rows` on blocks of rows."""
    found: Tensor
    if has_triton(logits_NV.device):
        found = _KernelLoss.apply(logits_NV, targets, weight)  # type: ignore[no-untyped-call]
    else:
        found = _RowLoss.apply(rows, logits_NV, targets, weight)  # type: ignore[no-untyped-call]
    return found


def _cross_entropy_rows(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    logprobs_NV = F.log_softmax(logits_NV.float(), -1)
    ignored_N1, at_N1 = (targets_N == IGNORED)[:, None], targets_N[:, None]
    unknown_N1 = (at_N1 < 0) | (at_N1 >= logits_NV.shape[-1])
    at_N1 = at_N1.masked_fill(unknown_N1, 0)
    nats_N1 = -logprobs_NV.gather(1, at_N1).masked_fill(unknown_N1, torch.nan).masked_fill(ignored_N1, 0.0)
    d_NV = logprobs_NV.exp_().scatter_add_(1, at_N1, torch.full_like(at_N1, -1, dtype=torch.float32))
    return nats_N1.sum(), d_NV.masked_fill_(unknown_N1, torch.nan).masked_fill_(ignored_N1, 0.0)


def _kl_rows(student_NV: Tensor, teacher_NV: Tensor) -> tuple[Tensor, Tensor]:
    lowest = torch.finfo(torch.float32).min  # of a token that is ruled out: 0 times it is no NaN
    log_p_NV = F.log_softmax(teacher_NV.float(), -1).clamp_(min=lowest)
    log_q_NV = F.log_softmax(student_NV.float(), -1).clamp_(min=lowest)
    p_NV = log_p_NV.exp()
    loss = log_p_NV.sub_(log_q_NV).mul_(p_NV).sum()
    return loss, log_q_NV.exp_().sub_(p_NV)


class _RowLoss(torch.autograd.Function):
    """Sum a loss over blocks of rows. Its gradient, in the logits' dtype, is the one tensor of their size."""

    @staticmethod
    def forward(
        ctx: Any, rows: Callable[[Tensor, Tensor], Any], logits_NV: Tensor, targets: Tensor, weight: float
    ) -> Tensor:
        d_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), device=logits_NV.device)
        size = max(1, BLOCK_BYTES // (4 * logits_NV.shape[-1]))
        for start in range(0, len(logits_NV), size):
            at = slice(start, start + size)
            loss, d_rows_NV = rows(logits_NV[at], targets[at])
            total += loss
            if d_NV is not None:
                d_NV[at] = d_rows_NV.mul_(weight)
        ctx.d_NV = d_NV
        return total * weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        d_NV = ctx.d_NV
        del ctx.d_NV
        return None, d_NV.mul_(grad), None, None


class _KernelLoss(torch.autograd.Function):
    """Sum the loss of rows by a kernel. All logits are saved: backward makes the gradient in one pass."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets: Tensor, weight: float) -> Tensor:
        read = [t if t.stride(-1) == 1 else t.contiguous() for t in (logits_NV, targets)]
        found_RN: Tensor = imported("loss_kernels").row_losses(*read, IGNORED)
        ctx.save_for_backward(*read, found_RN)
        ctx.weight = weight
        return found_RN[0].sum() * weight

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        return imported("loss_kernels").gradient(*ctx.saved_tensors, grad * ctx.weight, IGNORED), None, None
