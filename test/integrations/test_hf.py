"""Hugging Face checkpoints: what comes back is, bit for bit, what was saved, and what is no checkpoint is refused with
a reason.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from support import forked
from support.bits import same_bytes
from support.checkpoint_configs import OURS, TORCHAO
from support.convert_cases import edit
from support.models import IDS, llama, logits
from torch import nn
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    FqnToConfig,
    Int4WeightOnlyConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerBlock,
    PerGroup,
)
from torchao.quantization import quantize_ as torchao_quantize_
from torchao.quantization.quantize_.common import KernelPreference
from torchao.utils import TorchAOBaseTensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, TorchAoConfig

from aoquant import (
    Int8WeightConfig,
    IntxWeightConfig,
    NVFP4WeightConfig,
    Packed4WeightConfig,
    PackedTensor,
    PackedWeightConfig,
    QATConfig,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from aoquant.files import checkpoint
from aoquant.integrations import hf

FP8_BLOCKS = Float8DynamicActivationFloat8WeightConfig(granularity=[PerBlock([1, 128]), PerBlock([128, 128])])
BF16_ONLY = ("fp8-fp8", "mxfp8-emulated")  # torchao's kernels
CASES = [
    pytest.param(
        config,
        tied,
        dtype,
        id=f"{name}-{str(dtype)[6:]}-{'tied' if tied else 'untied'}",
        marks=[pytest.mark.slow] if dtype == torch.float32 and name not in ("nvfp4", "int4-g32", "int8") else [],
    )
    for name, config in (OURS | TORCHAO).items()
    for tied, dtype in ((True, torch.bfloat16), (False, torch.float32))
    if dtype == torch.bfloat16 or name not in BF16_ONLY
]


def trained(config: Any, **kwargs: Any) -> LlamaForCausalLM:
    """Prepared, one step of training, converted."""
    model = llama(**kwargs)
    quantize_(model, QATConfig(config, step="prepare"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    quantize_(model, QATConfig(step="convert"))
    return model


def weights(model: nn.Module) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if isinstance(p, TorchAOBaseTensor)}


def assert_same_bits(a: TorchAOBaseTensor, b: TorchAOBaseTensor) -> None:
    assert type(a) is type(b)
    assert a.dtype == b.dtype
    for name in a.tensor_data_names + getattr(a, "optional_tensor_data_names", []):
        assert same_bytes(getattr(a, name), getattr(b, name)), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An NVFP4 checkpoint; copy it before changing it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("saved")
    save_pretrained(trained(NVFP4WeightConfig()), folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


@pytest.mark.parametrize(("config", "tied", "dtype"), CASES)
def test_round_trip_is_bit_equal(config: Any, tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = trained(config, tied=tied, dtype=dtype)
    save_pretrained(model, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    before, after = weights(model), weights(loaded)
    assert len(before) == 14
    assert before.keys() == after.keys()
    for name in before:
        assert_same_bits(before[name], after[name])
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize(
    "config",
    [Int4WeightOnlyConfig(64), FqnToConfig({r"re:.*\.mlp\..*": FP8_BLOCKS})],
    ids=["int4", "fp8-block"],
)
def test_a_tensor_whose_kernel_is_not_here_keeps_its_bits(config: Any, tmp_path: Path) -> None:
    model = trained(config)
    save_pretrained(model, tmp_path)
    after = weights(load_pretrained(tmp_path))
    for name, weight in weights(model).items():
        assert_same_bits(weight, after[name])


MIXED = FqnToConfig(
    {
        r"re:.*\.self_attn\..*": NVFP4WeightConfig(),
        r"re:.*\.mlp\.up_proj": IntxWeightOnlyConfig(torch.int4, PerGroup(32)),
        "model.layers.1.mlp.down_proj": None,
        "lm_head": Int8WeightConfig(),
        r"re:.*\.mlp\..*": IntxWeightConfig(3),
    }
)


def test_mixed_model_with_layers_left_out_and_its_head_quantised(tmp_path: Path) -> None:
    model = trained(MIXED)
    config = hf.attach(model)
    assert isinstance(config.quant_type, FqnToConfig)
    assert config.modules_to_not_convert == ["model.layers.1.mlp.down_proj"]
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path)
    assert type(loaded.lm_head.weight) is PackedTensor
    assert type(loaded.model.layers[1].mlp.down_proj.weight) is nn.Parameter
    assert torch.equal(logits(loaded), logits(model))
    # the config alone, applied to the float weights, makes the same tensors: that is what serving engines do
    float_model = llama()
    float_model.save_pretrained(tmp_path / "float")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    assert {n: type(w) for n, w in weights(again).items()} == {n: type(w) for n, w in weights(loaded).items()}


def test_shards_that_split_a_weight(tmp_path: Path) -> None:
    model = trained(NVFP4WeightConfig())
    save_pretrained(model, tmp_path, max_shard_size="17KB")
    index = json.loads((tmp_path / checkpoint.INDEX).read_text())["weight_map"]
    homes: dict[str, set[str]] = {}
    for key, file in index.items():
        homes.setdefault(key.partition("._weight_")[0], set()).add(file)
    assert any(len(files) > 1 for name, files in homes.items() if name.endswith("_proj"))
    assert torch.equal(logits(load_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize("config", [OURS["nvfp4"], TORCHAO["int8-int8"]], ids=["aoquant", "torchao"])
def test_loaded_model_saves_again(config: Any, tmp_path: Path) -> None:
    model = trained(config)
    save_pretrained(model, tmp_path / "1")
    save_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "1"), tmp_path / "2")
    load_pretrained(tmp_path / "2").save_pretrained(tmp_path / "3")  # HF's own
    assert torch.equal(logits(load_pretrained(tmp_path / "3")), logits(model))
    for name in ("2", "3"):
        assert (tmp_path / name / "config.json").read_text() == (tmp_path / "1" / "config.json").read_text()


def test_new_process_needs_only_the_import(saved: Path, tmp_path: Path) -> None:
    code = f"""
import sys, torch
# as in a bare process, which would take ten seconds to import torch and what transformers imports
for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
    del sys.modules[name]
import aoquant
assert "transformers" not in sys.modules
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(saved)!r})
with torch.no_grad():
    torch.save(model(torch.arange(24).view(2, 12)).logits, {str(tmp_path / "logits.pt")!r})
"""
    done = forked.python(code)
    assert done.returncode == 0, done.stderr
    here = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), logits(here))


FEW = ("nvfp4", "gridflip", "int4-g32", "int8", "fp8", "mxfp4", "activations alone")


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(c, marks=[] if name in FEW else [pytest.mark.slow]) for name, c in OURS.items()),
        PackedWeightConfig("intx5-row", None, "dequantize"),
    ],
    ids=repr,
)
def test_quantising_on_the_fly_equals_quantize_(config: Any, tmp_path: Path) -> None:
    model = llama(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(config))
    quantize_(model, config)
    assert len(weights(loaded)) == 14
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "quantised")  # HF's own, with the config that the user gave
    assert torch.equal(logits(load_pretrained(tmp_path / "quantised")), logits(model))


def test_float8_config_names_the_kernel_that_convert_stamped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(TORCHAO["fp8-fp8"])
    config = hf.attach(model).quant_type
    assert config.kernel_preference == KernelPreference.TORCH
    again = llama()
    monkeypatch.setattr("torchao.quantization.quant_api._check_hardware_support", lambda granularity: None)
    torchao_quantize_(again, config, lambda m, fqn: fqn.endswith("_proj"))
    weight, ours = again.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight
    weight.data.copy_(ours)  # torchao copies only between tensors that agree in every attribute
    assert_same_bits(weight, ours)


# ---- what is saved of a layer's config


def test_fake_quantisation_config_without_a_base(tmp_path: Path) -> None:
    model = llama()
    quantize_(model, QATConfig(weight_config="intx4-g32-asym", activation_config="int8-row-asym"))
    quantize_(model, QATConfig(step="convert"))
    assert hf.attach(model).quant_type == Packed4WeightConfig("intx4-g32-asym", "int8-row-asym")
    save_pretrained(model, tmp_path)
    assert torch.equal(logits(load_pretrained(tmp_path)), logits(model))


def test_torchao_tensor_of_unknown_origin_asks_for_its_config(tmp_path: Path) -> None:
    model = llama()
    torchao_quantize_(model, Int8WeightOnlyConfig(), lambda m, fqn: fqn.endswith("up_proj"))
    with pytest.raises(ValueError, match=r"up_proj: holds a Int8Tensor .* config is unknown.*aoquant_config"):
        save_pretrained(model, tmp_path)
    for layer in model.model.layers:
        layer.mlp.up_proj.aoquant_config = Int8WeightOnlyConfig()
    save_pretrained(model, tmp_path)
    assert torch.equal(logits(load_pretrained(tmp_path)), logits(model))


def test_torchao_model_that_hf_quantised_brings_its_config(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "float")
    config = FqnToConfig({r"re:.*\.mlp\..*": Int8WeightOnlyConfig(), r"re:.*[qk]_proj\.weight": TORCHAO["intx"]})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "float", quantization_config=TorchAoConfig(config))
    assert len(weights(model)) == 10
    save_pretrained(model, tmp_path / "saved")
    assert torch.equal(logits(load_pretrained(tmp_path / "saved")), logits(model))


def refused_saves(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield what an error names, and a save that raises it."""
    model = llama()
    yield "quantize_", lambda: save_pretrained(model, folder)
    yield "Linear", lambda: save_pretrained(nn.Linear(2, 2), folder)
    prepared = llama()
    quantize_(prepared, QATConfig(NVFP4WeightConfig()))
    yield "model.layers.0.self_attn.q_proj", lambda: save_pretrained(prepared, folder)
    packed = llama()
    quantize_(packed, Int8WeightConfig())
    yield "state_dict", lambda: save_pretrained(packed, folder, state_dict=packed.state_dict())
    for wrong in (0, "-5GB", "GB", ""):
        yield "max_shard_size", lambda wrong=wrong: save_pretrained(packed, folder, max_shard_size=wrong)
    other = r"aoquant.save_pretrained\(model, directory\)"  # for what takes codes for plain memory
    yield other, lambda: packed.save_pretrained(folder)
    yield other, lambda: safetensors.torch.save_file(packed.state_dict(), folder / "x.safetensors")
    yield other, lambda: safetensors.torch.save_model(packed, str(folder / "x.safetensors"))


def test_what_cannot_be_saved_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    for name, save in refused_saves(tmp_path):
        with pytest.raises(ValueError, match=name):
            save()
        assert not list(tmp_path.glob("*.safetensors"))


# ---- damaged, foreign and future checkpoints


def config(folder: Path, **changes: Any) -> None:
    edit(folder / "config.json", lambda c: c.update(changes))


def described(folder: Path, **changes: Any) -> None:
    edit(folder / "config.json", lambda c: c["quantization_config"]["quant_type"]["default"].update(changes))


def method(folder: Path, name: str) -> None:
    edit(folder / "config.json", lambda c: c["quantization_config"].update(quant_method=name))


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def without(folder: Path, name: str) -> None:
    with safe_open(folder / checkpoint.SINGLE, framework="pt") as file:
        tensors, metadata = {k: file.get_tensor(k) for k in file.keys()}, file.metadata()  # noqa: SIM118
    del tensors[name]
    safetensors.torch.save_file(tensors, folder / checkpoint.SINGLE, metadata=metadata)


SCALE = "model.layers.0.mlp.up_proj._weight_scale"
DAMAGED: list[tuple[str, Any]] = [
    *((checkpoint.SINGLE, lambda f, n=n: cut(f / checkpoint.SINGLE, n)) for n in (0, 4, 1000, -1)),
    ("config.json", lambda f: cut(f / "config.json", 200)),
    ("config.json", lambda f: (f / "config.json").unlink()),
    (checkpoint.SINGLE, lambda f: (f / checkpoint.SINGLE).unlink()),
    (
        checkpoint.SINGLE,
        lambda f: llama().save_pretrained(f / "float") or shutil.copy(f / "float" / checkpoint.SINGLE, f),
    ),
    (SCALE, lambda f: without(f, SCALE)),
    ("FP1WeightConfig", lambda f: described(f, _type="FP1WeightConfig")),
    ("gptq", lambda f: method(f, "gptq")),
    ("model.layers.1", lambda f: config(f, num_hidden_layers=1)),
    ("model.layers.2", lambda f: config(f, num_hidden_layers=3)),
    (r"gate_proj.weight is \(256, 128\)", lambda f: config(f, intermediate_size=192)),
]


@pytest.mark.parametrize(("name", "change"), DAMAGED)
def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(name: str, change: Any, copied: Path) -> None:
    assert set(checkpoint.check(copied).values()) == {"PackedTensor"} and len(checkpoint.check(copied)) == 14
    change(copied)
    with pytest.raises(ValueError, match=name):
        load_pretrained(copied)


def test_a_lost_shard_and_a_tensor_that_no_shard_has_are_named(tmp_path: Path) -> None:
    save_pretrained(trained(NVFP4WeightConfig()), tmp_path, max_shard_size="100KB")
    first = sorted(tmp_path.glob("model-00001*"))[0]
    edit(tmp_path / checkpoint.INDEX, lambda c: c["weight_map"].update(ghost=first.name))
    with pytest.raises(ValueError, match=r"model-00001.*ghost"):
        load_pretrained(tmp_path)
    first.unlink()
    with pytest.raises(ValueError, match=r"model-00001"):
        load_pretrained(tmp_path)


def test_newer_schema_is_refused_by_every_loader(copied: Path) -> None:
    edit(copied / "config.json", lambda c: c["quantization_config"]["quant_type"]["default"].update(_version=7))
    message = "schema 7"
    with pytest.raises(ValueError, match=message):
        load_pretrained(copied)
    with pytest.warns(UserWarning, match="Stored version"), pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(copied)
    with pytest.raises(ValueError, match="quantization_config="):
        load_pretrained(copied, quantization_config=None)


def test_weights_that_were_loaded_as_something_else_are_named(copied: Path) -> None:
    """A loader that fills in floats gives a model that answers, in the wrong numerics."""

    class Careless:
        @staticmethod
        def from_pretrained(*args: Any, **kwargs: Any) -> Any:
            model, info = LlamaForCausalLM.from_pretrained(*args, **kwargs)
            layer = model.model.layers[1].mlp.up_proj
            layer.weight = torch.nn.Parameter(layer.weight.data.dequantize())
            return model, info

    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.up_proj\.weight is stored as PackedTensor and loaded as Parameter"
    ):
        load_pretrained(copied, Careless)
