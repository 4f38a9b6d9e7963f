"""Codes of stacked experts, each expert's chosen on its own tokens.

A stack whose turn it is shows the rows that the router gives each expert, and multiplies nothing; the stacks before it
have their codes by then. In the float model the experts get the tokens that the quantised model's router gives them, so
that rows are pairs. Experts with few tokens are rounded to the nearest.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aoquant._messages import naming
from aoquant.config import QATConfig
from aoquant.experts.packed_experts import packed_experts
from aoquant.experts.prepared import QATExperts, QATReadExperts
from aoquant.formats import Encoded
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor
from aoquant.planning.plan import plan_layer
from aoquant.planning.stack_changes import apply
from aoquant.ptq import blocks, clip, gptq
from aoquant.ptq.calibrate_config import CalibrateConfig
from aoquant.ptq.gram import InputGram, deployed_input
from aoquant.ptq.ptq_report import PTQRow
from aoquant.unpack import stack_with_codes

UNCHANGED = ". The model is unchanged"
LEAST = 0.005  # share of all tokens that an expert needs
FACTOR_BYTES = 1 << 30  # of the factors that exist at once


def in_order(visit: blocks.Visit, module: Any) -> list[str]:
    """Return the prepared parameters of a module in the order in which it multiplies by them."""
    found: list[str] = []
    for given in visit.calls:
        if (call := blocks.call_of(visit.block.module, module, given)) is not None:
            with showing(module, {name: _named(found, name) for name in module.stacks}):
                call.run(module)
            if {*found} == {*module.stacks}:
                break
    return list(dict.fromkeys(found))


def choose(
    visit: blocks.Visit, fqn: str, module: Any, name: str, config: CalibrateConfig
) -> tuple[Encoded | None, PTQRow]:
    """Return the codes of a stack, with experts in front, None where all are the nearest; and its row.

    Raises:
        ValueError: naming the stack and its experts: an input holds NaN or Inf, or few tokens are refused.
    """
    recipe = module.stacks[name].recipe
    operand, dtype, stack = recipe.fprop_weight, module.values(name).dtype, f"{fqn}.{name}"
    if operand.format.lossless:
        return None, PTQRow(stack, operand.name, 0, 0.0, 0.0, 0.0, "its weight is not rounded to codes here")
    grams, tokens = _grams(visit, fqn, module, name, config)
    k, values_in = module.matrix(name, 0).shape[1], dtype if operand.transform is None else torch.float32
    chooses, clips = "gptq" in config.steps, "clip" in config.steps
    least = max(LEAST * tokens, k) if chooses or clips else 0
    counts = [gram.rows if gram.total_KK.any() else 0 for gram in grams]  # zeros alone show nothing
    few = {e: count for e, count in enumerate(counts) if count < least}
    if few and config.strict:
        raise ValueError(
            f"{stack}: {_counted(few)} of {len(grams)} saw fewer than {least:.0f} tokens, and strict is set: give more batches, or "
            "all_experts=True. The model is unchanged"
        )
    codes: list[Encoded] = [module.encode_expert(name, e, dtype) for e in range(len(grams))]
    lost = nearest = damping = 0.0
    together = max(1, FACTOR_BYTES // (8 * k * k))
    shown = [e for e, gram in enumerate(grams) if gram.rows]
    for start in range(0, len(shown), together):
        some, weights = shown[start : start + together], list[tuple[int, gptq.Weight]]()
        for e in some:
            with naming(f"{stack}, expert {e}", UNCHANGED):
                h_KK, ahead_KK = grams[e].mean()
                chosen = chooses and e not in few
                factor = gptq.factor(h_KK, config.damping, config.act_order) if chosen else None
                encoded_NK = operand.transformed(module.matrix(name, e).detach(), None)
                target_NK, rounded = encoded_NK.float(), codes[e]
                if factor is not None and ahead_KK is not None:
                    moved_NK = gptq.ahead(target_NK, ahead_KK)
                    target_NK = gptq.towards_float(target_NK, moved_NK, factor, recipe.fprop_input)
                if clips and e not in few:
                    codes[e] = clip.encode(operand.format, target_NK.to(encoded_NK.dtype), None, h_KK)
            diagonal_K = h_KK.diagonal()
            if factor is not None:
                damping = max(damping, factor.damping)
                diagonal_K = factor.write_upper(h_KK)
                weights.append((e, gptq.Weight(target_NK, codes[e], h_KK, diagonal_K, factor.order_K)))
            by_rounding_NK = gptq.decoded(operand.format, rounded, values_in)
            nearest += grams[e].rows * gptq.missed(target_NK, h_KK, diagonal_K, by_rounding_NK)
            if factor is None:
                values_NK = by_rounding_NK if codes[e] is rounded else gptq.decoded(operand.format, codes[e], values_in)
                lost += grams[e].rows * gptq.missed(target_NK, h_KK, diagonal_K, values_NK)
        if weights:
            made = gptq.choose_codes([w for _, w in weights], operand.format, values_in)
            for (e, _), (best, error) in zip(weights, made, strict=True):
                codes[e], lost = best, lost + grams[e].rows * error
    rows = sum(gram.rows for gram in grams)
    notes = [f"{_counted(few)} of {len(grams)} are rounded to the nearest"] if few else []
    notes += [f"needed damping {damping:g}"] if damping > config.damping else []
    missed = lost / max(rows, 1), nearest / max(rows, 1)
    row = PTQRow(stack, operand.name, rows, *missed, damping, "; ".join(notes), len(few))
    if all(e in few for e in shown) or not (chooses or clips):
        return None, row  # the nearest, which convert makes
    return Encoded.joined(codes, torch.stack), row


def place(fqn: str, module: Any, name: str, codes: Encoded | None, *, packs: bool) -> None:
    """Give a stack its codes, (E, ...); None: those that convert makes. packs: or else it stays prepared.

    Raises:
        ValueError: no weight of its dtype has these codes when it is encoded again.
    """
    stack, weight = f"{fqn}.{name}", module.values(name)
    each = []
    if codes is not None:
        on = [None if t is None else t.to(weight.device) for t in codes.tensors]
        split: list[Any] = [[None] * len(weight) if t is None else t.unbind() for t in on]
        each = [Encoded.of(parts, codes.k) for parts in zip(*split, strict=True)]
    if packs:
        change = plan_layer(module, QATConfig(step="convert"), stack, name)
        assert change is not None
        apply(dataclasses.replace(change, codes=each or None))
    elif each:
        prepared = module.stacks[name]
        packed = [PackedTensor.from_encoded(e, prepared.recipe.deployed, weight.dtype) for e in each]
        together = packed_experts(packed, transposed=module.is_transposed)
        if not stack_with_codes(stack, module, name, together, prepared.config):
            raise no_weight(stack, prepared.recipe, weight.dtype)


def no_weight(fqn: str, recipe: LinearRecipe, dtype: torch.dtype) -> ValueError:
    """Return the error for codes that no weight of a dtype has when it is encoded again."""
    return ValueError(
        f"{fqn}: {recipe.fprop_weight.name}: no {str(dtype).removeprefix('torch.')} weight gives these codes: calibrate the "
        "model in float32. The model is unchanged"
    )


def _counted(few: dict[int, int]) -> str:
    return f"experts {', '.join(f'{e} ({rows} tokens)' for e, rows in few.items())}"


def _grams(
    visit: blocks.Visit, fqn: str, module: Any, name: str, config: CalibrateConfig
) -> tuple[list[InputGram], int]:
    """Return the Gram matrices of every expert's input, and how many tokens the block saw."""
    weight, recipe, k = module.values(name), module.stacks[name].recipe, module.matrix(name, 0).shape[1]
    twin: Any = None
    whole: Any = visit.twin
    if whole is not None and not isinstance(module, QATReadExperts):
        twin = whole.get_submodule(fqn[len(visit.block.fqn) :].lstrip("."))
    grams = [InputGram(k, weight.device, cross=twin is not None) for _ in range(len(weight))]
    tokens = 0
    for i, given in enumerate(visit.calls):
        tokens += given.input.shape[:-1].numel() if given.mask is None else int(given.mask.sum())
        call = blocks.call_of(visit.block.module, module, given)
        float_call = None if twin is None else blocks.call_of(whole, twin, visit.float_calls[i])
        if call is None:
            continue
        if not isinstance(module, QATReadExperts):
            call = _routed(call, len(weight), config.all_experts)
        rows = _rows(module, call, name)
        ahead: list[Any] = [(e, None) for e, _ in rows]
        if twin is not None and float_call is not None:
            names = {"hidden_states": float_call.input}
            ahead = _rows(twin, dataclasses.replace(call, kwargs=call.kwargs | names), name)
        for (e, x_MK), (_, float_MK) in zip(rows, ahead, strict=True):
            if isinstance(module, QATReadExperts):
                x_MK = x_MK[x_MK.any(-1)]  # Llama 4 gives every expert all tokens, zero where they are not its own
            float_MK = float_MK if float_MK is None else deployed_input(recipe, None, float_MK, rounded=False)
            grams[e].add(deployed_input(recipe, None, x_MK), float_MK)
    if twin is not None:
        twin.unprepare_stack(name)  # the stacks behind it see float products
    return grams, tokens


def _named(found: list[str], name: str) -> Callable[[int, Tensor], None]:
    return lambda expert, x: found.append(name)


def _routed(call: blocks.Call, count: int, every: bool) -> blocks.Call:
    """Return a call of `count` experts by keywords, without padding. every: every expert gets all tokens."""
    kwargs = dict(zip(("hidden_states", "top_k_index", "top_k_weights"), call.args, strict=False)) | call.kwargs
    index_TJ, weights_TJ = kwargs["top_k_index"], kwargs["top_k_weights"]
    if every:
        index_TJ = torch.arange(count, device=index_TJ.device).expand(len(index_TJ), count)
        weights_TJ = torch.ones_like(index_TJ, dtype=weights_TJ.dtype)
    if call.mask is not None and call.mask.numel() == len(index_TJ):
        padding_T1 = ~call.mask.reshape(-1, 1).to(index_TJ.device)
        index_TJ = index_TJ.masked_fill(padding_T1, count)  # of no expert
    routed = {"top_k_index": index_TJ, "top_k_weights": weights_TJ}
    return dataclasses.replace(call, args=(), kwargs=kwargs | routed)


def _rows(module: Any, call: blocks.Call, name: str) -> list[tuple[int, Tensor]]:
    found: list[tuple[int, Tensor]] = []
    with showing(module, {name: lambda expert, x: found.append((expert, x))}):
        call.run(module)
    return found


@contextmanager
def showing(module: QATExperts, show: Mapping[str, Callable[[int, Tensor], Tensor | None]]) -> Iterator[None]:
    """Let prepared parameters of a module show their rows inside, as `Stack.show` says. show: by their names."""
    before = module.fake_quant
    module.fake_quant, vars(module)["show"] = True, show
    try:
        yield
    finally:
        module.fake_quant = before
        del vars(module)["show"]
