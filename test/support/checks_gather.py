"""FSDP2 that gathers codes: the whole weight's, the bytes that travel, and a training run that does not notice.

test/hybrid/test_hybrid_gather.py runs the checks with a number in their name: that point of the list in
docs/evidence/backward-formats.md.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import unequal_parts
from support.distributed_setup import BF16, F32, MLP, WORLD, Ranks, adamw, check, equal, raises, same_parameters
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.utils.checkpoint import checkpoint

from aoquant import (
    Cast,
    HybridConfig,
    Int4WeightConfig,
    NVFP4WeightConfig,
    PackedTensor,
    QATConfig,
    quantize_,
    unprepare,
)
from aoquant.distributed.gathered import GatheredWeight
from aoquant.integrations.distributed import full_state_dict, quantized_all_gather
from aoquant.ops import backward
from aoquant.recipes import get_recipe

WIDTH = 64
CONFIGS: dict[str, Any] = {
    "nvfp4": lambda: QATConfig(NVFP4WeightConfig()),
    "int4": lambda: QATConfig(Int4WeightConfig(32)),
    "nvfp4-training": lambda: get_recipe("nvfp4-training").prepare(seed=7),
    "fp8-hybrid": lambda: get_recipe("fp8-hybrid").prepare(),
    "mxfp8-nvfp4": lambda: get_recipe("mxfp8-nvfp4").prepare(),
    "quartet": lambda: QATConfig(NVFP4WeightConfig(), backward="quartet", seed=5),
    "nvfp4-original": lambda: HybridConfig.fwd_bwd("te-nvfp4", "te-nvfp4").replaced(dgrad_weight=Cast("te-nvfp4")),
    "mxfp8-original": lambda: HybridConfig.fwd_bwd("mxfp8", "mxfp8").replaced(dgrad_weight=Cast("mxfp8")),
    "mxfp8-hp": lambda: get_recipe("mxfp8-hp").prepare(),
    "mxfp8-hp-original": lambda: HybridConfig.fwd_bwd("mxfp8", None).replaced(dgrad_weight=Cast(None)),
    "fp8-128x128": lambda: HybridConfig(fprop_input="te-fp8-1x128", fprop_weight="te-fp8-128x128"),
    "mxfp8-32x32": lambda: HybridConfig.fwd_bwd("mxfp8", "mxfp8-32x32").replaced(fprop_weight=Cast("mxfp8-32x32")),
}
SENT = {
    "mxfp8-original": "bf16: its codes take 2.06",
    "mxfp8-hp-original": "bf16: dgrad starts from the weight",
    "quartet": "bf16: straight_through='clipped' masks gradients",
    "nvfp4-original": "rows and columns",
}


def net(c: Ranks, name: str, hidden: int = 128, dtype: torch.dtype = BF16, width: int = WIDTH) -> MLP:
    torch.manual_seed(0)
    model = MLP(dtype, "cpu", width, hidden, width).to(c.device)
    with torch.no_grad():
        model.up.weight[-1, -1] = 3  # in the last shard alone
    quantize_(model, CONFIGS[name]())
    return model


def train(c: Ranks, model: nn.Module, steps: int = 2, micro: int = 2) -> list[Tensor]:
    optimizer, outputs = adamw(model), []
    for step in range(steps):
        for i in range(micro):
            g = torch.Generator().manual_seed(100 * step + 10 * i + c.rank)
            model.set_requires_gradient_sync(i == micro - 1)
            width = model.norm.weight.shape[0]
            dtype = BF16 if model.norm.weight.dtype == BF16 else F32
            y = model(torch.randn(32, width, generator=g).to(c.device, dtype).requires_grad_())
            y.float().square().mean().backward()
            outputs.append(y.detach())
        optimizer.step()
        optimizer.zero_grad()
    return outputs


def same_training(c: Ranks, one: nn.Module, two: nn.Module, what: str = "") -> None:
    for i, (want, got) in enumerate(zip(train(c, one), train(c, two), strict=True)):
        equal(got, want, f"{what} output {i}")
    same_parameters(one, two, what)


def sharded(c: Ranks, model: nn.Module, **options: Any) -> nn.Module:
    for m in (model.up, model.down):
        fully_shard(m, **({"mesh": c.mesh} | options))
    return fully_shard(model, **({"mesh": c.mesh} | options))


FAST = ("nvfp4-training", "fp8-hybrid", "nvfp4-original", "mxfp8-original", "mxfp8-hp-original")


@check(*FAST, slow=tuple(n for n in CONFIGS if n not in FAST))
def training_does_not_notice_a_quantised_gather(c: Ranks, name: str) -> None:
    """Two AdamW steps of two micro-batches, bit for bit; what is said to be gathered is."""
    hidden, width = (256, 256) if name == "fp8-128x128" else (128, WIDTH)
    models = [sharded(c, net(c, name, hidden, width=width)) for _ in range(2)]
    said = quantized_all_gather(models[1])
    assert said and all(s.startswith(SENT.get(name, "rows")) for s in said.values()), said
    same_training(c, *models)


OPTIONS: dict[str, dict[str, Any]] = {
    "keep": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "HSDP": {},
    "policy": {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)},
    "recompute": {},
}


@check(*OPTIONS)
def options_of_fsdp_do_not_change_a_quantised_gather(c: Ranks, how: str) -> None:
    options = dict(OPTIONS[how])
    if how == "HSDP":
        options["mesh"] = init_device_mesh(c.device, (1, WORLD), mesh_dim_names=("replicate", "shard"))
    dtype = F32 if how == "policy" else BF16
    name = "fp8-hybrid" if how in ("HSDP", "offload") else "nvfp4-original"
    models = [net(c, name, dtype=dtype) for _ in range(2)]
    for m in models:
        if how == "recompute":
            m.up.forward = functools.partial(checkpoint, m.up.forward, use_reentrant=False)
        sharded(c, m, **options)
    assert not any(s.startswith("bf16") for s in quantized_all_gather(models[1]).values())
    same_training(c, *models)


@check("nvfp4-original", "fp8-hybrid")
def test_21_weights_that_stay_gathered_train_like_those_that_do_not(c: Ranks, name: str) -> None:
    models = [sharded(c, net(c, name), reshard_after_forward=reshard) for reshard in (True, False)]
    for m in models:
        assert not any(s.startswith("bf16") for s in quantized_all_gather(m).values())
    same_training(c, *models)


@check("nvfp4", "fp8-hybrid", "int4")
def test_20_rows_need_not_divide_the_ranks(c: Ranks, name: str) -> None:
    """33 rows on 2 ranks: 17 and 16."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = MLP(BF16, "cpu", WIDTH, 33, WIDTH).to(c.device)
        quantize_(model, CONFIGS[name](), filter_fn=lambda m, fqn: fqn == "up")
        models.append(sharded(c, model))
    assert quantized_all_gather(models[1]) == {"up": "rows"}
    same_training(c, *models)


@check("nvfp4-training", "fp8-hybrid", "mxfp8-32x32", "nvfp4-original")
def test_19_what_is_gathered_is_the_whole_weights_encoding(c: Ranks, name: str) -> None:
    """Both sides, in memory that is used again, also after the weight has grown a hundredfold. 96 rows on each rank:
    multiples of 32 and not of 128.
    """
    model = sharded(c, net(c, name, 192))
    whole = net(c, name, 192)
    quantized_all_gather(model)
    for factor in (1, 100, 1e-3):
        with torch.no_grad():
            for m in (model, whole):
                m.up.weight.mul_(factor)
        model.up.unshard()
        w, gemm = model.up.weight, whole.up.prepared.recipe.dgrad
        assert isinstance(w, GatheredWeight)
        assert not unequal_parts(w.rows, whole.up.encode_weight())
        if w.columns is not None:
            columns = backward.columns(whole.up.weight.detach(), gemm.other, gemm.multiple)
            assert w.columns.k == columns.k and not unequal_parts(w.columns, columns)
        model.up.reshard()


@check()
def test_21_a_pass_sends_fewer_bytes_than_bf16(c: Ranks) -> None:
    """Counted where they are sent, in forward and in backward."""
    gather, seen = _fsdp_collectives.DefaultAllGather.__call__, list[int]()

    def counted(self: Any, *, input_tensor: Tensor, **others: Any) -> Any:
        seen.append(input_tensor.numel() * input_tensor.element_size())
        return gather(self, input_tensor=input_tensor, **others)

    _fsdp_collectives.DefaultAllGather.__call__ = counted  # type: ignore[method-assign]
    try:
        found: dict[str, list[list[int]]] = {}
        for name, most in (
            ("nvfp4-training", 0.6),
            ("nvfp4-original", 1.2),
            ("fp8-hybrid", 1.05),
        ):
            for codes in (False, True):
                model = sharded(c, net(c, name, 256, width=256))
                if codes:
                    quantized_all_gather(model)
                passes = []
                y = model(torch.ones(32, 256, dtype=BF16, device=c.device, requires_grad=True))
                passes.append(sum(seen))
                seen.clear()
                y.sum().backward()
                passes.append(sum(seen))
                seen.clear()
                found.setdefault(name, []).append(passes)
            values = 2 * 256 * 256 // WORLD
            for bf16, ours in zip(*found[name], strict=True):
                others = bf16 - 2 * values * bool(bf16)  # the norm and the biases
                assert ours - others <= bf16 - others and (ours - others) / values <= most, (name, found[name])
    finally:
        _fsdp_collectives.DefaultAllGather.__call__ = gather  # type: ignore[method-assign]


@check()
def test_20_a_split_tile_is_refused_before_any_collective(c: Ranks) -> None:
    for name, hidden, words in (
        ("fp8-128x128", 384, ("te-fp8-128x128", "128", "each rank has 192", "N = 384")),
        ("mxfp8-32x32", 96, ("mxfp8-32x32", "32", "each rank has 48", "N = 96")),
        ("nvfp4-original", 48, ("te-nvfp4", "16", "each rank has 24", "N = 48")),
    ):
        model = sharded(c, net(c, name, hidden, width=256))
        for rank in range(WORLD):  # each alone: nothing is communicated before
            if c.rank == rank:
                raises(lambda m=model: quantized_all_gather(m), "up: ", *words)
            dist.barrier()


@check()
def a_quantised_gather_is_saved_and_converted_like_another(c: Ranks) -> None:
    one, two = (sharded(c, net(c, "nvfp4-training")) for _ in range(2))
    quantized_all_gather(two)
    for m in (one, two):
        train(c, m, 1)
    states = [dcp_state.get_model_state_dict(m) for m in (one, two)]
    for key, t in states[0].items():
        equal(states[1][key], t, key)
        local = getattr(states[1][key], "_local_tensor", states[1][key])
        assert type(local) is Tensor, f"{key}: {type(local)} in a checkpoint"
    torch.distributed.checkpoint.save({"model": states[1]}, checkpoint_id=c.directory / "gathered")
    three = sharded(c, net(c, "nvfp4-training"))
    quantized_all_gather(three)
    loaded = {"model": dcp_state.get_model_state_dict(three)}
    torch.distributed.checkpoint.load(loaded, checkpoint_id=c.directory / "gathered")
    dcp_state.set_model_state_dict(three, loaded["model"])
    same_training(c, two, three, "resumed")
    x = torch.ones(4, WIDTH, dtype=BF16, device=c.device)
    with torch.no_grad():
        want = two(x)
    state = full_state_dict(two)
    assert all(type(t) is Tensor for t in state.values())
    quantize_(two, QATConfig(step="convert"))
    with torch.no_grad():
        equal(two(x), want, "converted")
    assert isinstance(two.up.weight.to_local(), PackedTensor)


@check()
def a_weight_that_is_gathered_as_codes_has_no_values(c: Ranks) -> None:
    model = sharded(c, net(c, "nvfp4"))
    quantized_all_gather(model)
    model.up.fake_quant = False
    with pytest.raises(NotImplementedError, match="quantized_all_gather"):
        model(torch.ones(4, WIDTH, dtype=BF16, device=c.device))


@check("unprepare", "gather nothing")
def weights_are_gathered_as_values_again(c: Ranks, how: str) -> None:
    """After a forward too, whose weights FSDP2 still holds as codes."""
    one, two = (net(c, "nvfp4") for _ in range(2))
    quantized_all_gather(sharded(c, two, reshard_after_forward=False))
    with torch.no_grad():
        two(torch.ones(4, WIDTH, dtype=BF16, device=c.device))
    assert isinstance(two.up.weight, GatheredWeight)
    if how == "unprepare":
        for model in (one, two):
            assert unprepare(model) == 2
    else:
        assert quantized_all_gather(two, lambda m, fqn: False) == {}
    same_training(c, sharded(c, one), two)
    two.up.unshard()
    assert type(two.up.weight) is nn.Parameter
