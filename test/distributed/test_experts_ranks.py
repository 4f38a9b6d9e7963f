"""Stacked experts that two ranks share out: expert parallelism, FSDP2 and distributed checkpoints, beside one process.

Two terms of a sum may be added in either order, so with two experts a token the results of two ranks are equal to one
process's, bit for bit, in float32, and gradients to a few roundings. In bfloat16 a rank may round its sum before the
ranks' are added.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.moe_models import IDS, model_of
from support.two_ranks import Check, make
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from aoquant import (
    Cast,
    HybridConfig,
    MXFP4WeightConfig,
    QATConfig,
    quantize_,
    quantized_model_init,
    save_pretrained,
)
from aoquant.experts.packed_experts import PackedExperts
from aoquant.experts.prepared import QATExperts
from aoquant.experts.sharded import ShardedExperts
from aoquant.integrations.distributed import full_state_dict, quantized_all_gather
from aoquant.linear.tensor import same_bits
from aoquant.recipes import get_recipe

CONFIG = MXFP4WeightConfig()  # weights and activations
ORIGINAL = HybridConfig.fwd_bwd("te-nvfp4", "te-nvfp4").replaced(dgrad_weight=Cast("te-nvfp4"))
CHECKS: dict[str, Check] = {}


def check(function: Callable[[DeviceMesh, Path], None]) -> Callable[[DeviceMesh, Path], None]:
    CHECKS[function.__name__] = functools.partial(on_a_mesh, function)
    return function


def on_a_mesh(function: Callable[[DeviceMesh, Path], None], rank: int, folder: Path) -> None:
    function(init_device_mesh("cpu", (2,)), folder)


def experts_of(model: nn.Module) -> list[Any]:
    return [m for n, m in model.named_modules() if n.endswith(".experts")]


def share_out(model: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank half of the experts, their biases too."""
    for module in experts_of(model):
        for name, p in list(module._parameters.items()):
            module._parameters[name] = nn.Parameter(distribute_tensor(p.data, mesh, [Shard(0)]))


def model_and_copy(family: str, implementation: str = "grouped_mm") -> tuple[Any, Any]:
    model = model_of(family).eval()
    model.set_experts_implementation(implementation)
    return model, copy.deepcopy(model)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids).logits
    return found


def expert_parallel(mesh: DeviceMesh, family: str, implementation: str) -> None:
    """Prepared: outputs, gradients of all parameters. Converted in place: outputs, codes of this rank's experts."""
    one, two = (model.float() for model in model_and_copy(family, implementation))
    for model in (one, two):
        if model is two:
            share_out(two, mesh)
        quantize_(model, QATConfig(CONFIG, step="prepare"))
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(isinstance(m, QATExperts) for m in experts_of(two))
    assert torch.equal(logits(two), logits(one))
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        got = q.grad.full_tensor() if isinstance(q.grad, DTensor) else q.grad
        # a token's gradients are added up in another order
        assert (got - p.grad).abs().max() <= 4e-6 * p.grad.abs().max(), name
    wanted = logits(one)
    for model in (one, two):
        quantize_(model, QATConfig(step="convert"))
    for a, b in zip(experts_of(one), experts_of(two), strict=True):
        assert isinstance(b, ShardedExperts)
        for name in ("gate_up_proj", "down_proj"):
            w = getattr(b, name)
            assert isinstance(w, DTensor) and isinstance(w.to_local(), PackedExperts)
            assert same_bits(w.to_local(), getattr(a, name).data[4 * mesh.get_rank() :][:4])
    if implementation == "eager":
        with pytest.raises(ValueError, match=r"eager.*set_experts_implementation\('grouped_mm'\)"):
            logits(two)
        return
    assert torch.equal(logits(two), wanted)
    whole = model_of(family).float().eval()
    whole.load_state_dict(full_state_dict(two), assign=True)
    assert torch.equal(logits(whole), wanted)


@check
def experts_one_by_one_grouped(mesh: DeviceMesh, folder: Path) -> None:
    expert_parallel(mesh, "mixtral", "grouped_mm")


@check
def transposed_experts_with_biases_grouped(mesh: DeviceMesh, folder: Path) -> None:
    expert_parallel(mesh, "gpt-oss", "grouped_mm")


@check
def experts_eager(mesh: DeviceMesh, folder: Path) -> None:
    expert_parallel(mesh, "mixtral", "eager")


@check
def a_rank_without_tokens_takes_part(mesh: DeviceMesh, folder: Path) -> None:
    """Every token goes to experts of rank 0: rank 1 adds nothing, waits for nobody, and its experts' gradient is 0."""
    one, two = model_and_copy("mixtral")
    share_out(two, mesh)
    for model in (one, two):
        quantize_(model, QATConfig(CONFIG, step="prepare"))
    x = torch.randn(6, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    index = torch.tensor([[0, 1], [1, 2], [3, 0], [0, 1], [2, 1], [1, 0]])
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for model in (one, two):
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        y = experts_of(model)[0](inputs[0], index, inputs[1])
        y.float().square().sum().backward()
        results.append((y, *(t.grad for t in inputs)))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    grad = experts_of(two)[0].down_proj.grad
    assert isinstance(grad, DTensor)
    assert torch.equal(grad.full_tensor(), experts_of(one)[0].down_proj.grad)


@check
def fsdp(mesh: DeviceMesh, folder: Path) -> None:
    """Sharded and prepared: outputs and gradients of ranks with tokens of their own. Converted: gathered for a call."""
    ids = IDS.flip(mesh.get_rank())
    one, two = model_and_copy("gpt-oss")
    for layer in two.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(two, mesh=mesh)
    for model in (one, two):
        quantize_(model, QATConfig(CONFIG, step="prepare"))
    two(input_ids=ids, labels=ids).loss.backward()
    gradients = []
    for rank in range(2):
        one.zero_grad()
        one(input_ids=IDS.flip(rank), labels=IDS.flip(rank)).loss.backward()
        gradients.append({n: p.grad for n, p in one.named_parameters()})
    for name, p in two.named_parameters():
        if "experts" in name:
            wanted = (gradients[0][name].float() + gradients[1][name].float()) / 2
            torch.testing.assert_close(p.grad.full_tensor().float(), wanted, rtol=1e-2, atol=1e-6)
    assert torch.equal(logits(two, ids), logits(one, ids))
    for model in (one, two):
        quantize_(model, QATConfig(step="convert"))
    assert all(isinstance(m, ShardedExperts) for m in experts_of(two))
    assert experts_of(two)[0].down_proj.to_local().qdata.shape[0] == 4
    assert torch.equal(logits(two, ids), logits(one, ids))
    whole = model_of("gpt-oss").eval()
    state = full_state_dict(two)
    whole.load_state_dict(state, assign=True)
    assert torch.equal(logits(whole), logits(one))
    with pytest.raises(ValueError, match="sharded over ranks"):
        save_pretrained(two, folder / "saved")


@check
def uneven_shards(mesh: DeviceMesh, folder: Path) -> None:
    """Three experts on two ranks, and one: a rank may have none."""
    for count in (3, 1):
        one, two = model_and_copy("mixtral")
        for model in (one, two):
            for m in experts_of(model):
                m.num_experts = count
                for name, p in list(m._parameters.items()):
                    m._parameters[name] = nn.Parameter(p.data[:count].clone())
        share_out(two, mesh)
        for model in (one, two):
            quantize_(model, CONFIG)
        x = torch.randn(5, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
        index = torch.tensor([[0, 2], [1, 2], [2, 0], [0, 1], [2, 1]]) if count == 3 else torch.zeros(5, 1, dtype=int)
        weights = torch.rand(index.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        with torch.no_grad():
            y = [experts_of(model)[0](x, index, weights) for model in (one, two)]
        assert torch.equal(*y)
        for name in ("gate_up_proj", "down_proj"):
            whole = full_state_dict(two)[f"model.layers.0.mlp.experts.{name}"]
            assert same_bits(whole, getattr(experts_of(one)[0], name).data)


@check
def checkpoints(mesh: DeviceMesh, folder: Path) -> None:
    """DCP: prepared experts resume, converted ones come back into a model that was converted from other weights."""
    for how in ("fsdp", "expert parallel"):

        def build(seed: int, how: str = how) -> Any:
            model = model_of("mixtral").eval()
            torch.manual_seed(seed)
            for m in experts_of(model):
                for p in m.parameters():
                    p.data.normal_(0, 0.1)
            if how == "fsdp":
                fully_shard(model, mesh=mesh)
            else:
                share_out(model, mesh)
            quantize_(model, QATConfig(CONFIG, step="prepare"))
            return model

        one, two = build(1), build(2)
        for step in ("prepared", "converted"):
            if step == "converted":
                two = build(2)
                for model in (one, two):
                    quantize_(model, QATConfig(step="convert"))
            place = folder / f"{how}-{step}"
            torch.distributed.checkpoint.save({"model": one.state_dict()}, checkpoint_id=place)
            state = {"model": two.state_dict()}
            assert not torch.equal(logits(two), logits(one))
            torch.distributed.checkpoint.load(state, checkpoint_id=place)
            two.load_state_dict(state["model"])
            assert torch.equal(logits(two), logits(one)), (how, step)


@check
def what_cannot_be_shared_out_is_refused(mesh: DeviceMesh, folder: Path) -> None:
    model = model_of("mixtral")
    for m in experts_of(model):
        m.down_proj = nn.Parameter(distribute_tensor(m.down_proj.data, mesh, [Shard(1)]))
    for step in (QATConfig(CONFIG, step="prepare"), CONFIG):
        with pytest.raises(ValueError, match=r"experts\.down_proj.*sharded other than by expert.*full_state_dict"):
            quantize_(model, step)
    drawn = model_of("mixtral")
    share_out(drawn, mesh)
    with pytest.raises(ValueError, match=r"experts.*a backward that draws random numbers needs all experts"):
        quantize_(drawn, QATConfig(CONFIG, step="prepare", backward="quartet2"))


def steps(model: Any, mesh: DeviceMesh, count: int = 2) -> list[Tensor]:
    """AdamW steps on tokens of the rank's own; returns its losses."""
    optimizer, losses, ids = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False), [], IDS
    for step in range(count):
        ids = (IDS + 3 * step + mesh.get_rank()) % 64
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


GATHERED: dict[str, tuple[str, Any, str, int]] = {
    "stored (E, N, K), a quantised backward": ("mixtral", get_recipe("nvfp4-training").prepare(seed=3), "rows", 8),
    "stored (E, K, N), both sides": ("gpt-oss", ORIGINAL, "rows and columns", 8),
    "experts that do not divide the ranks": ("mixtral", QATConfig("mxfp4"), "rows", 3),
    "a class with a forward of its own": ("llama-4", QATConfig("nvfp4"), "rows", 4),
}


def gathered_as_codes(mesh: DeviceMesh, folder: Path, how: str) -> None:
    """Two steps equal those of a gather in bf16, and so do the converted shards."""
    family, config, said, count = GATHERED[how]
    models = []
    for gathers in (False, True):
        model = model_of(family)
        del model.model.layers[1:]
        for m in experts_of(model) if count == 3 else ():
            m.num_experts = count
            for name, p in list(m._parameters.items()):
                m._parameters[name] = nn.Parameter(p.data[:count].clone())
            router = model.model.layers[0].mlp.gate
            router.weight = nn.Parameter(router.weight.data[:count].clone())
        quantize_(model, config)
        fully_shard(model.model.layers[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        if gathers:
            found = {n: how for n, how in quantized_all_gather(model).items() if ".experts." in n}
            assert len(found) == 2 and set(found.values()) == {said}, found
        models.append(model)
    for got, want in zip(steps(models[1], mesh), steps(models[0], mesh), strict=True):
        assert torch.equal(got, want)
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor()), name
    if family == "llama-4":
        return  # not converted while it is sharded
    for model in models:
        quantize_(model, QATConfig(step="convert"))
    states = [full_state_dict(model) for model in models]
    for name, value in states[0].items():
        if isinstance(value, PackedExperts):
            assert same_bits(value, states[1][name]), name


for _how in GATHERED:
    CHECKS[_how] = functools.partial(on_a_mesh, functools.partial(gathered_as_codes, how=_how))


def masters_of_two_ranks(mesh: DeviceMesh, folder: Path) -> None:
    """`quantized_model_init` under DDP: DCP saves on both ranks, and another model goes on bit for bit."""

    def build(seed: int) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
        model = model_of("gpt-oss")
        del model.model.layers[1:]
        torch.manual_seed(seed)
        for p in model.parameters():
            p.data.normal_(0, 0.1)
        masters = quantized_model_init(model, QATConfig("mxfp4"))
        return DistributedDataParallel(model), masters, torch.optim.AdamW(masters.parameters(), lr=1e-2)

    def train(run: Any, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            ids = (IDS + 3 * step + mesh.get_rank()) % 64
            run(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    run, masters, optimizer = build(1)
    train(run, optimizer, 0, 2)
    states = dict(zip(("model", "optimizer"), get_state_dict(masters, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder / "masters")
    train(run, optimizer, 2, 4)
    again, others, optimizer = build(2)
    states = dict(zip(("model", "optimizer"), get_state_dict(others, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder / "masters")
    set_state_dict(others, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    train(again, optimizer, 2, 4)
    for name, value in masters.state_dict().items():
        assert torch.equal(value, others.state_dict()[name]), name


CHECKS["masters_of_two_ranks"] = functools.partial(on_a_mesh, masters_of_two_ranks)
QUICK = ("stored (E, K, N), both sides", "masters_of_two_ranks")
WIDE = [name for name in GATHERED if name not in QUICK]


def test_two_ranks_gather_codes_and_resume_masters() -> None:
    make({name: CHECKS[name] for name in QUICK})


@pytest.mark.slow
def test_two_ranks_gather_codes_of_other_experts() -> None:
    make({name: CHECKS[name] for name in WIDE})


@pytest.mark.slow
def test_two_ranks_share_out_experts() -> None:
    make({name: made for name, made in CHECKS.items() if name not in (*QUICK, *WIDE)})
