"""Sharded models in a world of one rank, where that is enough: what saving, adapters and transformers' own sharding say
of them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import get_peft_model
from support.adapters import lora, prepared
from support.bits import unequal_parts
from support.models import IDS, llama, logits
from support.moe_models import model_of
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

from aoquant import (
    CalibrateConfig,
    Cast,
    HybridConfig,
    Int4WeightConfig,
    IntxWeightConfig,
    NVFP4WeightConfig,
    QATConfig,
    calibrate_ptq,
    choose_formats,
    fixed_weights,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from aoquant.experts.prepared import QATExperts
from aoquant.integrations import finetune
from aoquant.integrations.distributed import full_state_dict, quantized_all_gather
from aoquant.integrations.vllm_sync import sync_vllm
from aoquant.linear.prepared import QATLayer
from aoquant.recipes import get_recipe


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_a_student_moves_into_its_shards_and_back(mesh: DeviceMesh) -> None:
    """Leave no memory of what trains in the model meanwhile, and what is frozen as it was."""
    model = llama(dtype=torch.float32)
    model.model.embed_tokens.requires_grad_(False)
    before, y = copy.deepcopy(model.state_dict()), logits(model)
    sharded: Any = finetune.shard(model)
    for name, p in model.named_parameters():
        assert p.numel() == 0 if p.requires_grad else torch.equal(p, before[name])
    assert torch.equal(logits(sharded), y)
    sharded.reshard()  # the root keeps its parameters whole after forward
    with torch.no_grad():
        for p in sharded.parameters():
            p += p.requires_grad
    finetune.unshard(sharded, model)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name] + p.requires_grad), name


def test_a_sharded_model_is_gathered_and_then_saved(mesh: DeviceMesh, tmp_path: Path) -> None:
    model = llama()
    fully_shard(model, mesh=mesh)
    quantize_(model, NVFP4WeightConfig())
    want = logits(model)
    message = r"sharded over ranks.*full_state_dict\(model\), load it with assign=True into an unsharded model"
    with pytest.raises(ValueError, match=message):
        save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())
    whole = llama()
    whole.load_state_dict(full_state_dict(model), assign=True)
    save_pretrained(whole, tmp_path)
    assert torch.equal(logits(load_pretrained(tmp_path)), want)


def test_delayed_scales_under_tensor_parallelism_are_refused(mesh: DeviceMesh) -> None:
    delayed = HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor", amax_history=2)
    for mix, refused in ((delayed, True), (get_recipe("fp8-hybrid").prepare(), False)):
        model = nn.ModuleDict({"layer": nn.Linear(32, 16)})
        quantize_(model, mix)
        parallelize_module(model, mesh, {"layer": ColwiseParallel()})
        if refused:
            with pytest.raises(ValueError, match=r"layer.*delayed scaling"):
                model["layer"](torch.randn(4, 32))
        else:
            assert model["layer"](torch.randn(4, 32)).isfinite().all()


@pytest.mark.parametrize("first", ["parallelize", "adapt"])
def test_adapters_on_a_prepared_layer_under_tensor_parallelism_are_refused(mesh: DeviceMesh, first: str) -> None:
    model = prepared(Int4WeightConfig(32))
    if first == "parallelize":
        parallelize_module(model, mesh, {"model.layers.*.self_attn.q_proj": ColwiseParallel()})
    adapted = get_peft_model(model, lora())
    if first == "adapt":
        plan = {"model.layers.*.self_attn.q_proj.base_layer": ColwiseParallel()}
        parallelize_module(model, mesh, plan)
    with pytest.raises(ValueError, match="q_proj: adapters on a prepared layer under tensor parallelism"):
        adapted(IDS)


@pytest.mark.parametrize("config", [QATConfig(Int4WeightConfig(32)), Int4WeightConfig(32)], ids=["prepare", "quantize"])
def test_layers_that_transformers_sharded_are_refused(mesh: DeviceMesh, config: object) -> None:
    layer = nn.Sequential(nn.Linear(64, 32))
    parallelize_module(layer, mesh, {"0": ColwiseParallel()})
    ALL_PARALLEL_STYLES["colwise"].install_forward(layer[0], mesh)
    with pytest.raises(
        ValueError, match=r"0 \(32, 64\): its weight is sharded and its forward replaced.*without tp_plan"
    ):
        quantize_(layer, config)


@pytest.mark.parametrize("how", ["tensor parallel", "fully_shard"])
def test_a_quantised_backward_of_a_sharded_model_is_the_whole_models(mesh: DeviceMesh, how: str) -> None:
    """Gradients bit for bit, the state not sharded."""
    whole = llama()
    sharded = copy.deepcopy(whole)
    for model in (whole, sharded):
        quantize_(model, QATConfig(NVFP4WeightConfig(), backward="quartet2"))
    if how == "fully_shard":
        fully_shard(sharded, mesh=mesh)
    else:
        parallelize_module(sharded, mesh, {"model.layers.*.self_attn.q_proj": ColwiseParallel()})
    for _ in range(2):
        for model in (whole, sharded):
            model.zero_grad()
            model(IDS).logits.float().square().mean().backward()
    wanted = dict(whole.named_parameters())
    for name, parameter in sharded.named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        assert torch.equal(grad, wanted[name].grad), name
    for buffer, want in zip(sharded.buffers(), whole.buffers(), strict=True):
        assert torch.equal(buffer.full_tensor() if isinstance(buffer, DTensor) else buffer, want)


class Block(nn.Sequential):
    """Be a class of its own, as a model's blocks are: in torch's classes torch 2.14 compiles FSDP's hooks too."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("codes", [pytest.param(False, marks=pytest.mark.slow), True], ids=["bf16", "codes"])
def test_compiled_blocks_under_fully_shard(mesh: DeviceMesh, codes: bool) -> None:
    """Outputs of eager training, no graph break, and no more graphs after the second number of tokens; weights gathered
    in bf16 and as codes.
    """
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(1)
        return aot_eager(graph, inputs)

    def run(compiled: bool) -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), Block(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
        quantize_(model.bfloat16(), get_recipe("nvfp4-training").prepare(seed=1))
        if compiled:
            model[1].compile(backend=backend, fullgraph=True)
        for m in (model[1], model):
            fully_shard(m, mesh=mesh)
        if codes:
            assert set(quantized_all_gather(model).values()) == {"rows"}
        outputs, made = [], []
        for rows in (32, 48, 64, 80):
            y = model(torch.linspace(-3, 3, rows * 64).view(rows, 64).bfloat16())
            y.float().square().mean().backward()
            outputs += [y.detach(), *(p.grad.full_tensor() for p in model.parameters())]
            model.zero_grad()
            made.append(len(graphs))
        return outputs, made

    wanted, _ = run(False)
    outputs, made = run(True)
    assert all(torch.equal(a, b) for a, b in zip(outputs, wanted, strict=True))
    assert made[0] >= 1 and made[1:] == [made[1]] * 3, "the second number of tokens makes it dynamic"


def test_a_step_under_fsdp_changes_fixed_weights(mesh: DeviceMesh) -> None:
    """FSDP2 gathers the new values into the memory, and under the version, of the old ones."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    quantize_(model, get_recipe("mxfp8-hp").prepare())
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.ones(4, 32)
    want = model(x).detach()
    with fixed_weights(model):
        for _ in range(2):
            model(x).sum().backward()
            with torch.no_grad():
                assert torch.equal(model(x), want)
        optimizer.step()
        for mode in (torch.enable_grad, torch.no_grad):
            with mode(), pytest.raises(ValueError, match="0: its weight, or a scale of it, changed inside"):
                model(x)
    model(x)


def test_a_gather_of_codes_names_what_it_leaves_out(mesh: DeviceMesh) -> None:
    """Every prepared parameter that is sharded is named: stacked experts and embeddings too."""
    model = model_of("mixtral")
    quantize_(model, QATConfig("mxfp4"))
    quantize_(model, QATConfig(IntxWeightConfig(8, None)), lambda m, _: isinstance(m, nn.Embedding))
    prepared = {n for n, m in model.named_modules() if isinstance(m, QATLayer)}
    stacks = {f"{n}.{name}" for n, m in model.named_modules() if isinstance(m, QATExperts) for name in m.stacks}
    assert len(stacks) == 2 * len(model.model.layers)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = quantized_all_gather(model)
    assert set(found) == prepared | stacks
    assert {found[name] for name in stacks} == {"rows"}
    assert found["model.embed_tokens"] == "bf16: an embedding reads rows of its weight"
    assert found["model.layers.0.self_attn.q_proj"].startswith("rows")
    assert not stacks & set(quantized_all_gather(model, lambda m, _: isinstance(m, nn.Linear)))


GATHERED: dict[str, tuple[Callable[[], Any], str]] = {
    "delayed": (
        lambda: HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor", amax_history=2),
        "bf16: its scales are delayed.*amax_history=0",
    ),
    "learned": (lambda: QATConfig(IntxWeightConfig(4, 32), scales="learned"), "bf16: the layer encodes its weight by"),
    "clipped": (
        lambda: QATConfig(Int4WeightConfig(32), straight_through="clipped"),
        "bf16: straight_through='clipped' masks gradients",
    ),
    "float forward": (lambda: HybridConfig.fwd_bwd(None, "mxfp8"), "bf16: its forward does not quantise the weight"),
    "float dgrad": (
        lambda: HybridConfig.fwd_bwd("mxfp8", None).replaced(dgrad_weight=Cast(None)),
        "bf16: dgrad starts from the weight itself",
    ),
    "wide": (
        lambda: HybridConfig.fwd_bwd("mxfp8", "mxfp8").replaced(dgrad_weight=Cast("mxfp8")),
        r"bf16: its codes take 2\.06 bytes for each value",
    ),
    "rows": (lambda: QATConfig(Int4WeightConfig(32)), "rows$"),
    "both": (
        lambda: HybridConfig.fwd_bwd("te-nvfp4", "te-nvfp4").replaced(dgrad_weight=Cast("te-nvfp4")),
        "rows and columns$",
    ),
}


@pytest.mark.parametrize("name", GATHERED)
def test_a_gather_says_what_it_sends_and_why(mesh: DeviceMesh, name: str) -> None:
    """The reason names what the recipe needs; a layer that is gathered in bf16 trains as before."""
    config, said = GATHERED[name]
    outputs = []
    for codes in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64))
        quantize_(model, config())
        fully_shard(model, mesh=mesh)
        if codes:
            found = quantized_all_gather(model)
            assert list(found) == ["0"] and re.match(said, found["0"]), found
        x = torch.linspace(-3, 3, 32 * 64).view(32, 64).requires_grad_()
        y = model(x)
        y.float().square().mean().backward()
        outputs.append([y, x.grad, *(p.grad.full_tensor() for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_a_gather_leaves_out_shards_that_are_no_whole_rows(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    quantize_(model, QATConfig(Int4WeightConfig(32)))
    columns = model[0].weight
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(int(p is columns)))
    assert quantized_all_gather(model) == {"0": "bf16: its shards are no whole rows", "1": "rows"}


def test_a_gather_leaves_out_shards_of_tensor_parallelism(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantize_(model, QATConfig(Int4WeightConfig(32)))
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, both["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=both["dp"])
    assert quantized_all_gather(model) == {"0": "bf16: its shards are no whole rows"}


@pytest.mark.parametrize("name", ["rows", "both", "experts", "experts both"])
def test_a_rank_sends_its_codes_and_scales_and_no_byte_more(mesh: DeviceMesh, name: str) -> None:
    """FSDP2 sends what `fsdp_pre_all_gather` of the sharded tensor returns."""
    if "experts" in name:
        model: Any = model_of("mixtral").model.layers[0].mlp
        config = QATConfig("mxfp4") if name == "experts" else GATHERED["both"][0]()
        quantize_(model, config, lambda m, fqn: "experts" in fqn)
        owner, weights = model.experts, ["gate_up_proj", "down_proj"]
    else:
        model = nn.Sequential(nn.Linear(64, 96, bias=False)).bfloat16()
        quantize_(model, GATHERED[name][0]())
        owner, weights = model[0], ["weight"]
    fully_shard(model, mesh=mesh)
    assert {*quantized_all_gather(model).values()} == {"rows and columns" if "both" in name else "rows"}
    shards = [owner.get_parameter(n)._local_tensor for n in weights]
    sent = [shard.fsdp_pre_all_gather(mesh)[0] for shard in shards]
    model.unshard()
    for n, (buffer,) in zip(weights, sent, strict=True):
        gathered = owner._parameters[n]
        assert buffer.dtype == torch.uint8
        assert buffer.numel() == sum(part.numel() * part.element_size() for part in gathered.parts)


@pytest.mark.parametrize("alike", [True, False])
def test_a_gather_of_tied_layers(mesh: DeviceMesh, alike: bool) -> None:
    """Tied layers are gathered as codes where they have one recipe, and where filter_fn chooses each of them."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for layer, group in zip(model, (32, 32 if alike else 64), strict=True):
        quantize_(model, QATConfig(Int4WeightConfig(group)), lambda m, _, layer=layer: m is layer)
    model[1].weight = model[0].weight
    fully_shard(model, mesh=mesh)
    assert quantized_all_gather(model, lambda m, fqn: fqn == "0") == {}
    found = quantized_all_gather(model, lambda m, fqn: fqn in ("0", "1"))
    assert found == {"0": "rows" if alike else "bf16: tied layers have different recipes"}


@pytest.mark.parametrize("head_first", [True, False])
def test_a_gather_leaves_out_a_weight_that_an_embedding_reads_too(mesh: DeviceMesh, head_first: bool) -> None:
    embedding, head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
    model = nn.Sequential(*((head, embedding) if head_first else (embedding, head)))
    quantize_(model, QATConfig(IntxWeightConfig(8, None)), lambda m, _: True)
    embedding.weight = head.weight
    fully_shard(model, mesh=mesh)
    reason = "bf16: an embedding reads rows of its weight"
    assert quantized_all_gather(model) == {"1" if head_first else "0": reason}


def test_codes_are_of_the_dtype_that_a_policy_computes_in(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantize_(model, QATConfig(Int4WeightConfig(32)))
    whole = copy.deepcopy(model).bfloat16()
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert quantized_all_gather(model) == {"0": "rows"}
    model.unshard()
    gathered = model[0].weight
    assert gathered.dtype == torch.bfloat16 and not unequal_parts(gathered.rows, whole[0].encode_weight())


@pytest.mark.parametrize("family", ["linear", "mixtral"])
def test_sync_vllm_refuses_a_sharded_model_by_name(family: str, mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(64, 64)) if family == "linear" else model_of(family)
    layer = "0.weight" if family == "linear" else "model.layers.0.mlp.experts.gate_up_proj"
    quantize_(model, QATConfig("mxfp4"), lambda m, fqn: fqn in layer)
    fully_shard(model.get_submodule(layer.rpartition(".")[0]), mesh=mesh)
    worker = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=object()))
    llm = SimpleNamespace(llm_engine=worker, apply_model=lambda _: pytest.fail("the engine is not touched"))
    with pytest.raises(ValueError, match=re.escape(layer)):
        sync_vllm(llm, model)


@pytest.mark.parametrize("name", ["int4-g32", "nvfp4", "fp8"])
def test_converted_weights_are_not_sharded(mesh: DeviceMesh, name: str) -> None:
    """Test that `fully_shard` and `parallelize_module` refuse codes, and that leaving them out works."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    quantize_(model, get_recipe(name).make(), lambda m, fqn: fqn == "0")
    with pytest.raises(ValueError, match="is not sharded"):
        fully_shard(copy.deepcopy(model), mesh=mesh)
    with pytest.raises(ValueError, match="is not sharded"):
        parallelize_module(copy.deepcopy(model), mesh, {"0": ColwiseParallel()})
    x = torch.randn(2, 64)
    wanted = model(x)
    fully_shard(model, mesh=mesh, ignored_params={*model[0].parameters()})
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_calibrated_ptq_refuses_sharded_weights_by_name(family: str, mesh: DeviceMesh) -> None:
    model = (llama() if family == "llama" else model_of(family)).eval()
    layer = "self_attn.q_proj" if family == "llama" else "experts"
    fully_shard(model.model.layers[0], mesh=mesh)
    ids = torch.arange(32)[None]
    for call in (
        lambda: calibrate_ptq(model, [ids], CalibrateConfig("int8-weight")),
        lambda: choose_formats(model, ["int8-weight"], batches=[ids], bits=16.0),
    ):
        with pytest.raises(ValueError, match=rf"layers\.0\..*{layer}.*: its weight is sharded"):
            call()
    assert isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor)
