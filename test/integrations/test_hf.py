"""Hugging Face checkpoints: what comes back is, bit for bit, what was saved, and what is no checkpoint is refused with
a reason.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support import forked
from support.checkpoint_configs import OURS, TORCHAO
from support.models import IDS, llama, logits
from torch import nn
from torchao.core.config import config_to_dict
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
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlamaModel, TorchAoConfig

from aoquant import (
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    NVFP4WeightConfig,
    Packed4WeightConfig,
    PackedTensor,
    PackedWeightConfig,
    QATConfig,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from aoquant.integrations import checkpoint, hf

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
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None), name
        if x is not None:
            assert (x.dtype, x.shape) == (y.dtype, y.shape), name
            assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)), name


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


def test_layers_left_out_of_a_uniform_model_are_named(tmp_path: Path) -> None:
    model = llama()
    quantize_(model, MXFP4WeightConfig(), filter_fn=lambda m, fqn: "mlp" in fqn)
    save_pretrained(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert written["quant_type"]["default"] == config_to_dict(Packed4WeightConfig("mxfp4", "mxfp4"))
    assert written["modules_to_not_convert"] == [
        *(f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qkvo"),
        "lm_head",
    ]
    assert torch.equal(logits(load_pretrained(tmp_path)), logits(model))


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


def test_prepared_float_and_foreign_models_are_not_saved(tmp_path: Path) -> None:
    model = llama()
    with pytest.raises(ValueError, match=r"no layer of the model is quantised: call aoquant.quantize_ first"):
        save_pretrained(model, tmp_path)
    quantize_(model, QATConfig(NVFP4WeightConfig()))
    with pytest.raises(ValueError, match=r"14 layer\(s\), such as model.layers.0.self_attn.q_proj, are prepared"):
        save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="saves Hugging Face models, got Linear"):
        save_pretrained(nn.Linear(2, 2), tmp_path)
    quantize_(model, QATConfig(step="convert"))
    with pytest.raises(ValueError, match="takes no state_dict="):
        save_pretrained(model, tmp_path, state_dict=model.state_dict())
    assert not list(tmp_path.iterdir())


def test_quantised_head_that_the_config_ties_is_refused_until_untied(tmp_path: Path) -> None:
    model = llama(tied=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    quantize_(model, Int8WeightConfig(), filter_fn=lambda m, fqn: isinstance(m, nn.Linear))
    with pytest.raises(ValueError, match="tie_word_embeddings = False"):
        save_pretrained(model, tmp_path)
    model.config.tie_word_embeddings = False
    save_pretrained(model, tmp_path)
    assert torch.equal(logits(load_pretrained(tmp_path)), logits(model))


@pytest.mark.parametrize("how", ["save_pretrained", "save_file", "save_model"])
def test_what_takes_codes_for_plain_memory_is_told_how_to_save(how: str, tmp_path: Path) -> None:
    model = llama()
    quantize_(model, Int8WeightConfig())
    save = {
        "save_pretrained": lambda: model.save_pretrained(tmp_path),
        "save_file": lambda: safetensors.torch.save_file(model.state_dict(), tmp_path / "x.safetensors"),
        "save_model": lambda: safetensors.torch.save_model(model, str(tmp_path / "x.safetensors")),
    }[how]
    with pytest.raises(ValueError, match=r"save the model with aoquant.save_pretrained\(model, directory\)"):
        save()
    assert not list(tmp_path.glob("*.safetensors"))


def test_saving_over_another_layout_replaces_it(saved: Path, copied: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved)
    save_pretrained(model, copied, max_shard_size="50KB")
    assert not (copied / checkpoint.SINGLE).exists() and len(checkpoint.files(copied)) > 1
    load_pretrained(copied)
    save_pretrained(model, copied)
    assert checkpoint.files(copied) == [copied / checkpoint.SINGLE] == list(copied.glob("*.safetensors"))


# ---- damaged, foreign and future checkpoints


def edit(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_checkpoint_is_accepted_unchanged(copied: Path) -> None:
    assert set(checkpoint.check(copied).values()) == {"PackedTensor"}
    assert len(checkpoint.check(copied)) == 14


@pytest.mark.parametrize("keep", [0, 4, 1000, -1], ids=["empty", "length", "header", "data"])
def test_truncated_weights(copied: Path, keep: int) -> None:
    path = copied / checkpoint.SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors: damaged or truncated .* save the checkpoint again"):
        load_pretrained(copied)


def test_truncated_config(copied: Path) -> None:
    path = copied / "config.json"
    path.write_text(path.read_text()[:200])
    with pytest.raises(ValueError, match=r"config.json: damaged or truncated"):
        load_pretrained(copied)


def test_missing_shard_and_lost_tensor(tmp_path: Path) -> None:
    save_pretrained(trained(NVFP4WeightConfig()), tmp_path, max_shard_size="100KB")
    edit(tmp_path / checkpoint.INDEX, lambda c: c["weight_map"].update(ghost="model-00001-of-00005.safetensors"))
    first = sorted(tmp_path.glob("model-00001*"))[0]
    edit(tmp_path / checkpoint.INDEX, lambda c: c["weight_map"].update(ghost=first.name))
    with pytest.raises(ValueError, match=r"model-00001.*: ghost missing, which .* promises"):
        load_pretrained(tmp_path)
    first.unlink()
    with pytest.raises(ValueError, match=r"incomplete, model-00001.* missing"):
        load_pretrained(tmp_path)


def test_lost_scale(copied: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(copied / checkpoint.SINGLE, framework="pt") as file:
        tensors, metadata = {k: file.get_tensor(k) for k in file.keys()}, file.metadata()  # noqa: SIM118
    del tensors["model.layers.0.mlp.up_proj._weight_scale"]
    save_file(tensors, copied / checkpoint.SINGLE, metadata=metadata)
    with pytest.raises(ValueError, match=r"incomplete, model.layers.0.mlp.up_proj._weight_scale missing"):
        load_pretrained(copied)


def test_newer_schema_is_refused_by_every_loader(copied: Path) -> None:
    edit(copied / "config.json", lambda c: c["quantization_config"]["quant_type"]["default"].update(_version=7))
    message = "has schema 7, and this aoquant reads schemas up to 1: upgrade aoquant"
    with pytest.raises(ValueError, match=message):
        load_pretrained(copied)
    with pytest.warns(UserWarning, match="Stored version"), pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(copied)


def test_config_of_the_future(copied: Path) -> None:
    edit(
        copied / "config.json",
        lambda c: c["quantization_config"]["quant_type"]["default"].update(_type="FP1WeightConfig"),
    )
    with pytest.raises(ValueError, match=r"quantization_config cannot be read: Failed to find class FP1WeightConfig"):
        load_pretrained(copied)


def test_foreign_checkpoints(copied: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not a checkpoint folder, it has no config.json"):
        load_pretrained(tmp_path)
    llama().save_pretrained(tmp_path / "float")
    with pytest.raises(ValueError, match="a float checkpoint"):
        load_pretrained(tmp_path / "float")
    shutil.copy(tmp_path / "float" / checkpoint.SINGLE, copied)  # our config over weights that HF wrote
    with pytest.raises(ValueError, match="holds no torchao metadata"):
        load_pretrained(copied)
    edit(copied / "config.json", lambda c: c["quantization_config"].update(quant_method="gptq"))
    with pytest.raises(ValueError, match="was quantised by 'gptq'"):
        load_pretrained(copied)
    (copied / checkpoint.SINGLE).unlink()
    edit(copied / "config.json", lambda c: c["quantization_config"].update(quant_method="torchao"))
    with pytest.raises(ValueError, match=r"holds neither model.safetensors nor"):
        load_pretrained(copied)


def test_checkpoint_that_does_not_fit_the_model(copied: Path) -> None:
    edit(copied / "config.json", lambda c: c.update(num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"does not fit LlamaForCausalLM: unexpected keys: .*model.layers.1"):
        load_pretrained(copied)
    edit(copied / "config.json", lambda c: c.update(num_hidden_layers=3))
    with pytest.raises(ValueError, match=r"does not fit LlamaForCausalLM: missing keys: .*model.layers.2"):
        load_pretrained(copied)
    edit(copied / "config.json", lambda c: c.update(num_hidden_layers=2, intermediate_size=192))
    with pytest.raises(
        ValueError, match=r"gate_proj.weight is \(256, 128\) in the checkpoint and \(192, 128\) in the model"
    ):
        load_pretrained(copied)
    with pytest.raises(ValueError, match="takes no quantization_config="):
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


def test_model_class_of_choice(tmp_path: Path) -> None:
    model = trained(NVFP4WeightConfig()).model
    save_pretrained(model, tmp_path)
    loaded = load_pretrained(tmp_path, LlamaModel)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).last_hidden_state, model(IDS).last_hidden_state)


def test_parts_under_other_names_are_counted_by_kind() -> None:
    wanted = {f"model.{i}.up._weight_{part}" for i in range(3) for part in ("qdata", "scale")}
    renamed = {name.replace("model.", "old.") for name in wanted}
    assert checkpoint._lost(wanted, renamed) == [] and checkpoint._lost(wanted, wanted) == []
    assert checkpoint._lost(wanted, renamed - {"old.1.up._weight_scale"}) == ["1 of the tensors called *._weight_scale"]
    assert checkpoint._lost(wanted, {n for n in wanted if "scale" not in n}) == sorted(
        n for n in wanted if "scale" in n
    )


def test_sizes_of_shards() -> None:
    for size in (1, "1", "5GB", "100KB", 10**9):
        checkpoint.check_shard_size(size)
    for wrong in (0, -1, "-5GB", "0GB", "GB", ""):
        with pytest.raises(ValueError, match="is a size above 0"):
            checkpoint.check_shard_size(wrong)


def test_folders_of_compressed_tensors_go_to_their_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aoquant.export import reading

    calls: list[Any] = []
    monkeypatch.setattr(reading, "load", lambda *args, **kwargs: calls.append((args, kwargs)))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "compressed-tensors"}}))
    load_pretrained(tmp_path, LlamaModel, dtype=torch.float32)
    assert calls == [((tmp_path, LlamaModel), {"dtype": torch.float32})]
