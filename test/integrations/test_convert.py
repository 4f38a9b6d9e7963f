"""Converting a checkpoint on disk: the very files that loading it whole, quantising and saving would write, in little
memory.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from support import big_checkpoint, forked
from support.convert_cases import assert_same_files, edit, left_behind, llama, rewritten, write_floats
from support.models import SMALL, logits
from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
from torchao.quantization import (
    Float8DynamicActivationFloat8WeightConfig,
    FqnToConfig,
    Int8DynamicActivationIntxWeightConfig,
    PerGroup,
    PerRow,
)
from torchao.quantization.quantize_.common import KernelPreference
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from aoquant import (
    GridFlipFP4WeightConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    NVFP4WeightConfig,
    cli,
    convert_checkpoint,
    load_pretrained,
    quantize_,
    save_pretrained,
)
from aoquant.files import atomic, checkpoint, safetensors_file
from aoquant.integrations import skeleton, stream
from aoquant.recipes import Recipe, get_recipe, list_recipes, mixed

MIXED = FqnToConfig(
    {
        r"re:.*\.self_attn\..*": NVFP4WeightConfig(),
        "model.layers.1.mlp.down_proj": None,
        "lm_head": Int8WeightConfig(),
        r"re:.*\.mlp\..*": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),  # type: ignore[attr-defined]
    }
)
CONFIGS: dict[str, Any] = {
    "nvfp4": NVFP4WeightConfig(),
    "gridflip-4over6": GridFlipFP4WeightConfig(activation="fouroversix"),
    "int4-g32": Int4WeightConfig(32),
    "torchao-int8-intx": Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32)),  # type: ignore[attr-defined]
    "torchao-fp8": Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
    "torchao-mxfp8": MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED),
    "mixed, head": MIXED,
    "embedding and tied head": FqnToConfig(
        {"model.embed_tokens": Int8WeightConfig(), "lm_head": Int8WeightConfig(), r"re:.*_proj": IntxWeightConfig(3)}
    ),
}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Copy them before changing them."""
    return write_floats(tmp_path_factory.mktemp("float"))


@pytest.fixture
def copied(floats: dict[bool, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(floats[True], tmp_path / "copy"))


def whole(source: Path, config: Any, out: Path, shards: str = "5GB", **kwargs: Any) -> Any:
    """Load, quantise, save: the long way."""
    # HF counts the whole of a mapped file as the size of a tensor in it, when it sorts tensors into shards
    model = AutoModelForCausalLM.from_pretrained(source, disable_mmap=True, **kwargs)
    quantize_(model, config)
    save_pretrained(model, out, max_shard_size=shards)
    return model


# ---- the same files


def test_layers_that_cannot_take_their_config_are_left_out_on_request_alone(
    floats: dict[bool, Path], tmp_path: Path
) -> None:
    """down_proj alone has 256 input features; without the option nothing is written."""
    with pytest.raises(ValueError, match=r"_proj.*K = 128"):
        convert_checkpoint(floats[True], "int4-g256/", tmp_path / "out")
    assert left_behind(tmp_path) == []
    done = convert_checkpoint(floats[True], "int4-g256/", tmp_path / "out", skip_incompatible=True)
    assert (done.layers, done.verified, len(done.skipped)) == (2, 2, 12)
    assert not any("down_proj" in name for name in done.skipped)


@pytest.mark.parametrize("name", CONFIGS)
def test_files_are_those_of_the_long_way(name: str, floats: dict[bool, Path], tmp_path: Path) -> None:
    source = floats[name != "mixed, head"]
    model = whole(source, CONFIGS[name], tmp_path / "whole", "60KB")
    done = convert_checkpoint(source, CONFIGS[name], tmp_path / "out", max_shard_size="60KB")
    assert done.files > 2
    assert done.layers == (15 if "tied" in name else 14)  # a pair has one weight
    assert done.verified == 4
    assert_same_files(tmp_path / "whole", tmp_path / "out")
    assert left_behind(tmp_path) == []
    loaded = load_pretrained(tmp_path / "out")
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == (name != "mixed, head")
    assert torch.equal(logits(loaded), logits(model))


def test_progress_names_the_tensors_in_lines(
    floats: dict[bool, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aoquant._messages.SECONDS", 0.0)
    convert_checkpoint(floats[True], "int4-g32", tmp_path / "out")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("convert: ")]
    named = [match[1] for line in lines if (match := re.search(r", tensor=([^,]+),", line))]
    assert {*named} == {name for path in floats[True].glob("*.safetensors") for name in load_file(path)}


def outcome(make: Any, *arguments: Any) -> str:
    """The message of the ValueError that make(...) raised, or that it raised none."""
    try:
        make(*arguments)
    except ValueError as error:
        return str(error)
    return "done"


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", [r for r in list_recipes() if not r.experts], ids=lambda r: r.name)
def test_every_recipe_ends_as_the_long_way_does(recipe: Recipe, floats: dict[bool, Path], tmp_path: Path) -> None:
    """The same files, or the same layers refused, or a tensor that is packed on its own machine only."""
    long_way = outcome(whole, floats[True], recipe.make(), tmp_path / "whole")
    streamed = outcome(convert_checkpoint, floats[True], recipe.make(), tmp_path / "out")
    assert streamed == long_way or "cannot be packed here" in streamed
    if streamed == "done":
        assert_same_files(tmp_path / "whole", tmp_path / "out")
    assert (tmp_path / "out").exists() == (streamed == "done")


@pytest.mark.parametrize(
    ("stored", "named", "dtype"),
    [("float32", "bfloat16", "auto"), ("float32", None, "auto"), ("float32", "float32", "float16")],
)
def test_dtype_is_what_from_pretrained_gives(stored: str, named: str | None, dtype: str, tmp_path: Path) -> None:
    llama(True, getattr(torch, stored)).save_pretrained(tmp_path / "float")
    edit(tmp_path / "float" / "config.json", lambda c: c.update(dtype=named))
    model = whole(tmp_path / "float", Int4WeightConfig(32), tmp_path / "whole", dtype=dtype)
    convert_checkpoint(tmp_path / "float", Int4WeightConfig(32), tmp_path / "out", dtype=dtype)
    assert_same_files(tmp_path / "whole", tmp_path / "out")
    assert model.dtype == getattr(torch, dtype if dtype != "auto" else named or stored)


def test_a_weight_that_overflows_in_the_models_dtype_is_refused(tmp_path: Path) -> None:
    """70000 is a float32 and no float16: what counts is the number that the model would load."""
    model = llama(True, torch.float32)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[3, 5] = 70000.0
    model.save_pretrained(tmp_path / "float")
    says = r"model\.layers\.0\.mlp\.up_proj \(256, 128\): .*(Inf|finite)"
    with pytest.raises(ValueError, match=says):
        whole(tmp_path / "float", Int4WeightConfig(32), tmp_path / "whole", dtype=torch.float16)
    with pytest.raises(ValueError, match=says):
        convert_checkpoint(tmp_path / "float", Int4WeightConfig(32), tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    assert convert_checkpoint(tmp_path / "float", Int4WeightConfig(32), tmp_path / "out").layers == 14


def test_every_tensor_of_a_file_lies_aligned(tmp_path: Path) -> None:
    """safetensors' readers map a file and view its bytes: a float32 at an odd address would be copied, or refused."""
    tensors = {
        "a": torch.zeros(3, dtype=torch.uint8),
        "b": torch.zeros(2),
        "c": torch.zeros(5, dtype=torch.bfloat16),
        "d": torch.zeros(7, dtype=torch.float8_e4m3fn),
        "e": torch.zeros(1, dtype=torch.int64),
    }
    for name, stored in safetensors_file.reserve(tmp_path / "model.safetensors", tensors, {}).items():
        assert stored.start % tensors[name].dtype.itemsize == 0, name
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()


def test_weights_that_a_model_keeps_in_float32(
    floats: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"norm"})
    model = whole(floats[True], Int4WeightConfig(32), tmp_path / "whole")
    assert model.model.norm.weight.dtype == torch.float32
    convert_checkpoint(floats[True], Int4WeightConfig(32), tmp_path / "out")
    assert_same_files(tmp_path / "whole", tmp_path / "out")


def test_experts_that_are_fused_on_load_keep_their_stored_names(tmp_path: Path) -> None:
    config = MixtralConfig(**SMALL, num_local_experts=4)
    MixtralForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "float")
    attention = FqnToConfig({r"re:.*\.experts": None, "_default": Int4WeightConfig(32)})
    model = whole(tmp_path / "float", attention, tmp_path / "whole")
    done = convert_checkpoint(tmp_path / "float", attention, tmp_path / "out")
    assert done.layers == 8  # attention
    assert_same_files(tmp_path / "whole", tmp_path / "out")
    assert torch.equal(logits(load_pretrained(tmp_path / "out")), logits(model))


def test_the_bar_ends_at_its_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a source of several tensors, such as stacked experts, are shared out among them."""
    config = MixtralConfig(**SMALL, num_local_experts=4)
    MixtralForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "float")
    bar, totals = mock.MagicMock(), []
    bar.__enter__.return_value = bar
    monkeypatch.setattr(stream, "progress", lambda total, *words: totals.append(total) or bar)
    convert_checkpoint(tmp_path / "float", get_recipe("int4-g32-experts").make(), tmp_path / "out")
    assert [sum(call.args[0] for call in bar.update.call_args_list)] == totals != []


def test_other_files_come_along_and_other_weights_do_not(copied: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "pytorch_model.bin", "model.gguf"):
        (copied / name).write_text(name)
    (copied / "generation_config.json").unlink()
    convert_checkpoint(copied, Int4WeightConfig(32), tmp_path / "out")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        checkpoint.SINGLE,
    }
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature is None


# ---- tied weights


def head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def only_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def old_buffers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)


@pytest.mark.parametrize("change", [head, only_head, old_buffers])
def test_tied_weights_are_found_under_either_name(change: Any, copied: Path, tmp_path: Path) -> None:
    rewritten(copied, change)
    whole(copied, Int4WeightConfig(32), tmp_path / "whole")
    convert_checkpoint(copied, Int4WeightConfig(32), tmp_path / "out")
    assert_same_files(tmp_path / "whole", tmp_path / "out")


def test_tied_weights_that_differ_are_refused(copied: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        head(tensors)
        tensors["lm_head.weight"][3, 4] += 1

    rewritten(copied, change)
    with pytest.raises(
        ValueError, match=r"ties two weights that are stored with different values.*tie_word_embeddings"
    ):
        convert_checkpoint(copied, Int4WeightConfig(32), tmp_path / "out")


# ---- nothing half done


@pytest.fixture
def stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Converting is interrupted at the tenth layer; collects what lay in the folder then."""
    seen: list[list[str]] = []
    real, calls = skeleton.pack, iter(range(100))

    def pack(*args: Any) -> Any:
        if next(calls) == 10:
            (folder,) = [p for p in tmp_path.iterdir() if "partial" in p.name]
            seen.append(sorted(p.name for p in folder.iterdir()))
            with pytest.raises(ValueError, match=r"not a checkpoint folder, it has no config.json"):
                load_pretrained(folder)
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(skeleton, "pack", pack)
    return seen


def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(
    floats: dict[bool, Path], tmp_path: Path, stops: list[list[str]]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(floats[True], Int4WeightConfig(32), tmp_path / "out")
    assert stops == [[checkpoint.SINGLE]]
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_noticed_before_the_result_appears(
    floats: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = safetensors_file.StoredTensor.write

    def write(self: Any, values: torch.Tensor, offset: int = 0) -> int:
        if values.dtype == torch.uint8:
            values = values.clone()
            values.view(-1)[7] ^= 1
        return real(self, values, offset)

    monkeypatch.setattr(safetensors_file.StoredTensor, "write", write)
    with pytest.raises(ValueError, match=r"q_proj.weight: reads back different from what was written"):
        convert_checkpoint(floats[True], NVFP4WeightConfig(), tmp_path / "out", verify=1)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence(floats: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("usage", (), {"free": 1000}))
    with pytest.raises(ValueError, match=r"out: needs 0.00 GB, and the disk has 0.00 GB left"):
        convert_checkpoint(floats[True], NVFP4WeightConfig(), tmp_path / "out")
    monkeypatch.undo()

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "flush", full)
    with pytest.raises(ValueError, match=r"out: cannot be written: .*No space left on device"):
        convert_checkpoint(floats[True], NVFP4WeightConfig(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---- the command


def test_command_chooses_layers_and_reports(
    floats: dict[bool, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--layers", "re:.*down_proj=int8-weight", "lm_head=int8", "--skip", "model.layers.0.mlp.up_proj"]
    places = ["--model", str(floats[False]), "--out", str(tmp_path / "out")]
    cli.main(["convert", *places, "--recipe", "int4-g32", *words, "--verify", "99"])
    assert "14 layers quantised" in capsys.readouterr().out
    config = mixed("int4-g32", ["re:.*down_proj=int8-weight", "lm_head=int8"], ["model.layers.0.mlp.up_proj"])
    whole(floats[False], config, tmp_path / "whole")
    assert_same_files(tmp_path / "whole", tmp_path / "out")
    formats = {n: w.format for n, w in load_pretrained(tmp_path / "out").named_parameters() if hasattr(w, "format")}
    assert formats.pop("lm_head.weight") == "int8-row"
    assert {n for n, f in formats.items() if f != "int4-g32"} == {
        f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)
    }
    assert "model.layers.0.mlp.up_proj.weight" not in formats


def test_an_empty_folder_may_be_filled_and_keeps_its_permissions(floats: dict[bool, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert_checkpoint(floats[True], Int4WeightConfig(32), tmp_path / "out")
    (tmp_path / "other").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


# ---- memory


def run_limited(model: Path, out: Path, recipe: str, megabytes: int) -> str:
    """What `big_checkpoint.limited` printed, in a process of its own."""
    done = forked.script(Path(big_checkpoint.__file__), model, out, recipe, megabytes)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory on Linux only")
@pytest.mark.parametrize(
    ("shape", "megabytes"),
    [
        pytest.param({"hidden": 256, "inner": 1024, "layers": 22, "vocab": 2048}, 15, id="47 MB in 15 MB"),
        pytest.param(
            {"hidden": 1024, "inner": 4096, "layers": 18, "vocab": 8192},
            200,
            id="621 MB in 200 MB",
            marks=[pytest.mark.slow, pytest.mark.nightly],
        ),
    ],
)
def test_a_checkpoint_larger_than_memory_is_converted(shape: dict[str, int], megabytes: int, tmp_path: Path) -> None:
    size = big_checkpoint.write(tmp_path / "model", **shape)
    assert size > 3 * megabytes * 1e6
    printed = run_limited(tmp_path / "model", tmp_path / "out", "nvfp4", megabytes)
    assert f"{7 * shape['layers']} layers quantised" in printed
    assert "whole: True" in printed  # the model does not load in the memory that converted it
    assert len(checkpoint.check(tmp_path / "out")) == 7 * shape["layers"]
