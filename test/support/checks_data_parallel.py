"""FSDP2 and DDP of prepared and converted models, and FSDP2 beside tensor parallelism."""

from __future__ import annotations

import copy
import functools

import torch
from support.distributed_setup import (
    BF16,
    CONFIGS,
    F32,
    HIDDEN,
    MLP,
    WORLD,
    K,
    Ranks,
    adamw,
    batch,
    check,
    close,
    converts,
    equal,
    full,
    mlp,
    prepare,
    raises,
    same_parameters,
    same_state,
    shard,
    tensor_parallel,
    train,
    two_of,
)
from support.two_ranks import average
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torchao.quantization import Int8WeightOnlyConfig
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.utils import TorchAOBaseTensor

from aoquant import (
    Int4WeightConfig,
    Int8WeightConfig,
    PackedTensor,
    QATConfig,
    quantize_,
    report,
    verify,
)
from aoquant.integrations.distributed import full_state_dict
from aoquant.linear.prepared import QATLinear


def train_alone(c: Ranks, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    """The same steps in one process: both ranks' batches, and the mean of the gradients. Returns this rank's
    outputs.
    """
    outputs = []
    for step in range(steps):
        gradients = []
        for rank in range(WORLD):
            optimizer.zero_grad()
            y = model(batch(c, BF16, seed=10 * step + rank))
            y.float().square().mean().backward()
            gradients.append([p.grad for p in model.parameters()])
            if rank == c.rank:
                outputs.append(y.detach())
        for p, *g in zip(model.parameters(), *gradients, strict=True):
            p.grad = sum(g) / WORLD
        optimizer.step()
    return outputs


@check("prepare-shard", "shard-prepare", "prepare-shard-leaves", "shard-prepare-leaves", "DDP")
def data_parallel_training_equals_one_process(c: Ranks, how: str) -> None:
    """Three AdamW steps: outputs, and then parameters, bit for bit."""
    one, two = two_of(mlp(c, BF16))
    prepare(one, CONFIGS["nvfp4"])
    leaves = how.endswith("leaves")
    if how.startswith("prepare"):
        shard(c, prepare(two, CONFIGS["nvfp4"]), leaves=leaves)
    elif how.startswith("shard"):
        prepare(shard(c, two, leaves=leaves), CONFIGS["nvfp4"])
    else:
        prepare(two, CONFIGS["nvfp4"])
    parallel = DistributedDataParallel(two) if how == "DDP" else two
    assert isinstance(two.up, QATLinear) and isinstance(two.up, FSDPModule) == leaves
    outputs = train(c, parallel, adamw(two), 3)
    for step, (got, want) in enumerate(zip(outputs, train_alone(c, one, adamw(one), 3), strict=True)):
        equal(got, want, f"step {step}")
    same_parameters(one, two)


@check("int4", "ao.int8")
def packed_layers_in_ddp_are_left_out_of_its_first_broadcast(c: Ranks, kind: str) -> None:
    """A norm trained through packed layers equals one process's, and DDP says what to do where it would broadcast
    codes.
    """
    one = mlp(c, BF16)
    quantize_(one, Int4WeightConfig(32) if kind == "int4" else Int8WeightOnlyConfig())
    two, three = copy.deepcopy(one), copy.deepcopy(one)
    if kind == "int4":
        raises(lambda: DistributedDataParallel(two), "cannot be viewed as (-1,)", "init_sync=False")
    packed = [name for name, p in three.named_parameters() if isinstance(p, TorchAOBaseTensor)]
    assert packed == ["up.weight", "down.weight"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(three, packed)
    parallel = {
        "init_sync=False": DistributedDataParallel(two, init_sync=False),
        "ignored": DistributedDataParallel(three),
    }
    trained = [p for p in one.parameters() if p.requires_grad]
    gradients = []
    for rank in range(WORLD):
        one.zero_grad()
        one(batch(c, BF16, seed=rank)).float().square().mean().backward()
        gradients.append([p.grad for p in trained])
    want = [sum(g) / WORLD for g in zip(*gradients, strict=True)]
    for how, model in parallel.items():
        model(batch(c, BF16, seed=c.rank)).float().square().mean().backward()
        got = [p.grad for p in model.parameters() if p.requires_grad]
        for g, w in zip(got, want, strict=True):
            equal(g, w, how)


@check()
def fsdp_options_do_not_change_the_numbers(c: Ranks) -> None:
    """reshard_after_forward, activation checkpointing, sharding along K, HSDP and gradient accumulation without
    synchronisation.
    """
    base = prepare(mlp(c, BF16), CONFIGS["fp8-tensor"])
    hsdp = init_device_mesh(c.device, (1, WORLD), mesh_dim_names=("replicate", "shard"))
    along_k = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
    results = {}
    for name, options in {
        "reshard": {"reshard_after_forward": True},
        "keep": {"reshard_after_forward": False},
        "along K": along_k,
        "HSDP": {"mesh": hsdp},
        "recompute": {},
        "recompute reentrant": {},
    }.items():
        model = copy.deepcopy(base)
        if name.startswith("recompute"):
            inner = model.up.forward
            model.up.forward = functools.partial(checkpoint, inner, use_reentrant="reentrant" in name)
        fully_shard(model, **({"mesh": c.mesh} | options))
        for last in (False, True):  # two micro-batches
            model.set_requires_gradient_sync(last)
            y = model(batch(c, BF16, seed=5 + c.rank + 7 * last).requires_grad_())
            y.float().square().mean().backward()
        results[name] = [y, *(full(p.grad) for p in model.parameters())]
    for name, tensors in results.items():
        for got, want in zip(tensors, results["reshard"], strict=True):
            equal(got, want, name)


@check()
def mixed_precision_policy_is_what_convert_encodes(c: Ranks) -> None:
    """float32 parameters, computed in bfloat16: convert packs the bfloat16 weights that forward encoded."""
    one = mlp(c, F32)
    for order in ("prepare first", "shard first"):
        two = copy.deepcopy(one)
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
        two = prepare(two, CONFIGS["nvfp4"]) if order == "prepare first" else two
        shard(c, two, mp_policy=policy)
        two = prepare(two, CONFIGS["nvfp4"]) if order == "shard first" else two
        alone = prepare(copy.deepcopy(one).to(BF16), CONFIGS["nvfp4"])
        x = batch(c, F32)
        y = two(x)
        equal(y, alone(x.to(BF16)), order)
        y.float().square().mean().backward()
        assert all(p.grad.dtype == F32 for p in two.parameters())
        quantize_(two, QATConfig(step="convert"))
        quantize_(alone, QATConfig(step="convert"))
        with torch.no_grad():
            equal(two(x), y, f"{order}, converted")
        state = {k: t if isinstance(t, PackedTensor) else t.to(BF16) for k, t in full_state_dict(two).items()}
        same_state(state, alone.state_dict())


@check()
def learned_scales_stay_out_of_fsdp(c: Ranks) -> None:
    """As the docs say: bfloat16 weights sharded, float32 scales beside them; three steps equal one process's. A cast
    scale is refused.
    """
    config = QATConfig(Int8WeightConfig("row"), scales="learned")
    one = mlp(c, BF16)
    quantize_(one, config)
    two = copy.deepcopy(one)
    scales = {p for name, p in two.named_parameters() if name.endswith("_scale")}
    for p in scales:
        p.register_post_accumulate_grad_hook(average)
    shard(c, two, ignored_params=scales)
    for got, want in zip(train(c, two, adamw(two), 3), train_alone(c, one, adamw(one), 3), strict=True):
        equal(got, want, "forward")
    before = mlp(c, BF16)
    quantize_(before, config)
    assert not torch.equal(one.up.weight_scale, before.up.weight_scale), "scales were trained"
    same_state(full_state_dict(two), one.state_dict())

    policy = MixedPrecisionPolicy(param_dtype=BF16)
    three = mlp(c, F32)
    quantize_(three, config)
    four = copy.deepcopy(three)
    raises(
        lambda: shard(c, three, mp_policy=policy)(batch(c, F32)),
        "up: its weight_scale is held in float32 and was cast to bfloat16",
        "ignored_params",
    )
    alone = copy.deepcopy(four).to(BF16)
    shard(c, four, mp_policy=policy, ignored_params={four.up.weight_scale, four.down.weight_scale})
    equal(four(batch(c, F32)), alone(batch(c, BF16)), "mixed precision")


@check("nvfp4", "ao.int8act-intx4", slow=("int4-g32", "fp8-row", "fp8-tensor", "int8-tensor", "mxfp4", "intx3-row"))
def fsdp_converted_equals_prepared(c: Ranks, name: str) -> None:
    """Each rank keeps its packed shard; forward equals the prepared one; gathered, it is the whole model's
    conversion.
    """
    one = prepare(mlp(c, BF16), CONFIGS[name])
    for leaves in (False, True):
        for after in (False, True):  # whether FSDP has been used, and holds its parameters unsharded
            two = copy.deepcopy(one)
            shard(c, two, leaves=leaves, reshard_after_forward=False)
            x = batch(c, BF16)
            with torch.no_grad():
                want = two(x) if after else one(x)
            quantize_(two, QATConfig(step="convert"))
            local = two.up.weight.to_local()
            assert isinstance(local, PackedTensor) and local.shape == (HIDDEN // WORLD, K)
            assert isinstance(two.up, FSDPModule) == leaves and not isinstance(two.up, QATLinear)
            with torch.no_grad():
                equal(two(x), want, f"leaves {leaves}, used {after}")
                equal(two(x), want, "again")
            whole = copy.deepcopy(one)
            quantize_(whole, QATConfig(step="convert"))
            same_state(full_state_dict(two), whole.state_dict())
            offloaded = full_state_dict(two, cpu_offload=True)
            same_state(offloaded, {k: t.cpu() for k, t in whole.state_dict().items()} if c.rank == 0 else {})


@check()
def a_converted_layer_trains_its_neighbours(c: Ranks) -> None:
    """FSDP goes on without the packed weights: gradients pass through them to what it still holds."""
    one, two = two_of(prepare(mlp(c, BF16), CONFIGS["mxfp4"]))
    shard(c, two)
    for model in (one, two):
        quantize_(model, QATConfig(step="convert"))
    x = batch(c, BF16)
    for model in (one, two):
        model(x).float().square().mean().backward()
    for key, p in one.named_parameters():
        if p.grad is not None:
            equal(two.get_parameter(key).grad, p.grad, key)
    assert one.norm.weight.grad is not None and two.up.weight.grad is None


@check()
def a_model_prepared_on_meta_is_sharded_and_then_loaded(c: Ranks) -> None:
    one = prepare(mlp(c, BF16), CONFIGS["nvfp4"])
    two = shard(c, prepare(MLP(BF16, "meta"), CONFIGS["nvfp4"]))
    two.to_empty(device=c.device)
    options = dcp_state.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    dcp_state.set_model_state_dict(two, one.state_dict() if c.rank == 0 else {}, options=options)
    equal(two(batch(c, BF16)), one(batch(c, BF16)))
    same_state(full_state_dict(two), one.state_dict())


@check()
def torchao_quantize_takes_sharded_layers(c: Ranks) -> None:
    """torchao's own entry point hands over one layer at a time: enough for tensor parallelism, refused where FSDP must
    let go.
    """
    one, two = two_of(mlp(c, BF16))
    torchao_quantize_(tensor_parallel(c, two), QATConfig(CONFIGS["nvfp4"]))
    prepare(tensor_parallel(c, one), CONFIGS["nvfp4"])
    with torch.no_grad():
        want = one(batch(c, BF16))
        equal(two(batch(c, BF16)), want, "prepared")
        torchao_quantize_(two, QATConfig(step="convert"))
        equal(two(batch(c, BF16)), want, "converted")
    three = shard(c, mlp(c, BF16), leaves=True)
    torchao_quantize_(three, QATConfig(CONFIGS["nvfp4"]))
    assert isinstance(three.up, QATLinear)
    raises(
        lambda: torchao_quantize_(three, QATConfig(step="convert")),
        "call aoquant.quantize_ on the module that holds all",
    )


@check()
def tied_weights_stay_tied(c: Ranks) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, K, bias=False), nn.Linear(K, K, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    torch.manual_seed(0)
    one, two = two_of(prepare(Tied().to(c.device, BF16), CONFIGS["nvfp4"]))
    fully_shard(two, mesh=c.mesh)
    x = batch(c, BF16)
    y1, y2 = one(x), two(x)
    equal(y2, y1, "forward")
    y1.square().mean().backward()
    y2.square().mean().backward()
    equal(two.a.weight.grad, one.a.weight.grad, "gradient")
    for model in (one, two):
        quantize_(model, QATConfig(step="convert"))
    assert two.a.weight is two.b.weight
    with torch.no_grad():
        equal(two(x), y1, "converted")
    state = full_state_dict(two)
    assert state["a.weight"] is state["b.weight"]
    same_state(state, one.state_dict())


@check("FSDP2", "tensor parallelism")
def a_report_of_a_sharded_model_is_refused(c: Ranks, how: str) -> None:
    """On every rank, before and after the model has run; gathered as the message says, prepared and converted are
    verified.
    """
    prepared, converted = two_of(prepare(mlp(c, BF16), CONFIGS["nvfp4"]))
    for model in (prepared, converted):
        shard(c, model) if how == "FSDP2" else tensor_parallel(c, model)
    quantize_(converted, QATConfig(step="convert"))
    x, words = batch(c, BF16), ("is sharded over ranks", "full_state_dict(model)")
    for _ in range(2):
        raises(lambda: verify(prepared, converted, x), "model_a", *words)
        raises(lambda: report(mlp(c, BF16), converted, x), "model_b", *words)
        with torch.no_grad():
            equal(prepared(x), converted(x), "both still run")
    whole = prepare(mlp(c, BF16), CONFIGS["nvfp4"]), mlp(c, BF16)
    for model, sharded in zip(whole, (prepared, converted), strict=True):
        model.load_state_dict(full_state_dict(sharded), assign=True)
    assert verify(*whole, x).min_sqnr == torch.inf


@check()
def quantizing_below_fsdp_is_refused(c: Ranks) -> None:
    model = shard(c, mlp(c, BF16))
    raises(
        lambda: quantize_(nn.Sequential(model.up), Int4WeightConfig(32)), "FSDP shards its weight from a module above"
    )


@check(True, False)
def fsdp1_takes_prepared_layers_and_its_own_are_refused(c: Ranks, original: bool) -> None:
    """original: use_orig_params, which alone lets layers be prepared in place; nothing else is done to flattened
    weights, used or not yet.
    """
    one = prepare(mlp(c, BF16), CONFIGS["nvfp4"])
    options = {"use_orig_params": original, "device_id": torch.device(c.device, c.rank if c.device == "cuda" else None)}
    two = FullyShardedDataParallel(copy.deepcopy(one), **options)
    plain = FullyShardedDataParallel(mlp(c, BF16), **options)
    x, words = batch(c, BF16), ("up (", "FSDP1 (FullySharded", "prepare first, then wrap", "into an unsharded model")
    refused = [CONFIGS["nvfp4"], QATConfig(CONFIGS["nvfp4"], scales="static")]
    refused += [] if original else [QATConfig(CONFIGS["nvfp4"])]
    for _ in range(2):
        raises(lambda: quantize_(two, QATConfig(step="convert")), *words)
        for config in refused:
            raises(lambda config=config: quantize_(plain, config), *words)
        raises(lambda: report(two, plain, x), "model_a is sharded over ranks")
        equal(two(x), one(x), "forward")
        plain(x)
    if original:
        equal(prepare(plain, CONFIGS["nvfp4"])(x), one(x), "prepared in place")


@check()
def what_is_wrong_in_one_shard_is_refused_by_all(c: Ranks) -> None:
    """A NaN in the last row, which rank 1 holds: nobody goes on alone, and the model is as it was."""
    model = mlp(c, BF16)
    with torch.no_grad():
        model.up.weight[-1, -1] = torch.nan
    shard(c, model)
    raises(lambda: quantize_(model, QATConfig(CONFIGS["nvfp4"])), "up (128, 64): its weight holds NaN or Inf")
    assert not isinstance(model.down, QATLinear)
    assert bool(model(batch(c, BF16)).isnan().any()), "FSDP still runs"


@check()
def unprepare_leaves_the_fsdp_model_as_it_was(c: Ranks) -> None:
    one, two = two_of(mlp(c, BF16))
    shard(c, two, leaves=True)
    before = type(two.up).__name__, type(two.up).__mro__[1:]
    prepare(two, CONFIGS["nvfp4"])
    for layer in (two.up, two.down):
        layer.unprepare()
    assert (type(two.up).__name__, type(two.up).__mro__[1:]) == before
    equal(two(batch(c, BF16)), one(batch(c, BF16)))


@check((1, 2), (2, 1))
def two_dimensions(c: Ranks, data: int, tensor: int) -> None:
    """FSDP over one dimension of the mesh and tensor parallelism over the other."""
    mesh = init_device_mesh(c.device, (data, tensor), mesh_dim_names=("data", "tensor"))
    one, two = two_of(prepare(mlp(c, BF16), CONFIGS["nvfp4"]))
    parallelize_module(two, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (two.up, two.down, two):
        fully_shard(module, mesh=mesh["data"])
    x = batch(c, BF16)
    y = two(x)
    want = one(x)
    if tensor == 1:
        equal(y, want, "forward")
    else:
        close(y, want, "forward", 2)
    y.float().square().mean().backward()
    assert all(p.grad is not None for p in two.parameters())
    converts(c, one, two, x, y)


@check((1, 2), (2, 1))
def hsdp_converted_equals_prepared(c: Ranks, replicas: int, shards: int) -> None:
    """Parameters are sharded over one dimension of the mesh and copied over the other."""
    mesh = init_device_mesh(c.device, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    one, two = two_of(prepare(mlp(c, BF16), CONFIGS["fp8-tensor"]))
    fully_shard(two, mesh=mesh)
    x = batch(c, BF16)
    y = two(x)
    equal(y, one(x), "forward")
    y.float().square().mean().backward()
    assert all(p.grad is not None for p in two.parameters())
    converts(c, one, two, x, y)
    local = two.up.weight.to_local()
    assert isinstance(local, PackedTensor) and local.shape == (HIDDEN // shards, K)
