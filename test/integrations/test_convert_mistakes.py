"""What `aoquant convert` refuses, in one sentence, with exit code 2, before or while it works, leaving nothing
behind.
"""

from __future__ import annotations

import builtins
import io
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.convert_cases import edit, left_behind, rewritten, write_floats
from torchao.quantization import Int8DynamicActivationIntxWeightConfig, PerGroup
from transformers import LlamaForCausalLM

from aoquant import Int4WeightConfig, NVFP4WeightConfig, QATConfig, cli, convert_checkpoint, quantize_
from aoquant.integrations import checkpoint, hf, stream
from aoquant.integrations.atomic import Staged
from aoquant.integrations.safetensors_file import raw_bytes


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Copy them before changing them."""
    return write_floats(tmp_path_factory.mktemp("float"))


@pytest.fixture
def copied(floats: dict[bool, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(floats[True], tmp_path / "copy"))


def drop_shard(folder: Path) -> None:
    sorted(folder.glob("model-*"))[1].unlink()


def ghost(folder: Path) -> None:
    edit(folder / checkpoint.INDEX, lambda c: c["weight_map"].update(ghost="model-00009-of-00005.safetensors"))


def truncated(folder: Path) -> None:
    path = sorted(folder.glob("model-*"))[0]
    path.write_bytes(path.read_bytes()[:-10])


def poisoned(folder: Path) -> None:
    rewritten(folder, lambda t: t["model.layers.1.mlp.up_proj.weight"].view(-1)[5].fill_(torch.nan))


def integers(folder: Path) -> None:
    rewritten(folder, lambda t: t.update({"model.norm.weight": torch.ones(128, dtype=torch.int8)}))


def smaller(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(intermediate_size=192))


def fewer(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(num_hidden_layers=1))


def more(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(num_hidden_layers=3))


def unknown(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(model_type="nobody", architectures=None))


def quantised(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(quantization_config={"quant_method": "gptq", "bits": 4}))


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def only_bin(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def twice(folder: Path) -> None:
    a, b = sorted(folder.glob("model-*"))[:2]
    save_file(load_file(a) | {next(iter(load_file(b))): torch.ones(1)}, a, {"format": "pt"})


def nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (no_config, [], "not a model folder, it has no config.json"),
        (only_bin, [], "holds neither model.safetensors nor"),
        (drop_shard, [], "the checkpoint is incomplete, model-00002"),
        (ghost, [], "the checkpoint is incomplete, model-00009-of-00005.safetensors missing"),
        (truncated, [], "damaged or truncated"),
        (twice, [], "is in model-00001"),
        (poisoned, [], "model.layers.1.mlp.up_proj (256, 128): its weight holds NaN or Inf"),
        (integers, [], "model.norm.weight is stored as int8"),
        (smaller, [], "gate_proj.weight is (256, 128) and the model that config.json describes wants (192, 128)"),
        (fewer, [], "unexpected. Load it with transformers"),
        (more, [], "model.layers.2.input_layernorm.weight, model.layers.2.mlp.down_proj.weight"),
        (unknown, [], "config.json: transformers cannot read it"),
        (quantised, [], "is quantised already (gptq): convert the float checkpoint"),
        (nothing, ["--recipe", "int4-q32"], "no recipe is called 'int4-q32'; near it: int4-g"),
        (nothing, ["--recipe", "torchao-int4-g128", "--dtype", "float16"], "cast the layer from float16"),
        (nothing, ["--dtype", "int8"], "dtype must be auto, float32, bfloat16 or float16"),
        (nothing, ["--device", "tpu"], "device must be one that torch finds"),
        (nothing, ["--device", "meta"], "device must hold values"),
        (nothing, ["--verify", "-1"], "verify is a number of layers"),
        (nothing, ["--max-shard-size", "5XB"], "Unit 'XB' not supported"),
        (nothing, ["--max-shard-size", "-1"], "max_shard_size is a size above 0, in bytes or like '5GB', got '-1'"),
        (nothing, ["--max-shard-size", "0GB"], "max_shard_size is a size above 0"),
        (nothing, ["--skip", "re:.*mlp.dwon_proj"], "'re:.*mlp.dwon_proj' matches no linear layer; near it: "),
        (nothing, ["--skip", "re:("], "is no regular expression"),
        (nothing, ["--skip", "re:.*"], "none was chosen"),
        (nothing, ["--layers", "=int8"], "layers are given as NAME or NAME=RECIPE, got '=int8'"),
        (nothing, ["--layers", "int8"], "'int8' matches no linear layer"),
        (nothing, ["--layers", "a=int8", "a=nvfp4"], "'a' is given twice"),
        (nothing, ["--layers", "lm_head=int8"], "its weight is tied"),
        (nothing, ["--out", "{copied}"], "exists and is not an empty folder"),
        (nothing, ["--model", "nowhere"], "nowhere: not a model folder"),
    ],
    ids=lambda v: v.__name__ if callable(v) else " ".join(v) if isinstance(v, list) else "...",
)
def test_mistakes_are_one_sentence(
    change: Any, arguments: list[str], message: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(copied)
    given = {"--model": str(copied), "--recipe": "int4-g32", "--out": str(tmp_path / "out")}
    extra = [a.format(copied=copied) for a in arguments]
    for name in given.keys() & set(extra):
        given.pop(name)
    with pytest.raises(SystemExit) as exit:
        cli.main(["convert", *(word for pair in given.items() for word in pair), *extra])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert "aoquant: " in error
    assert message in error
    assert not (tmp_path / "out").exists()
    assert left_behind(tmp_path) == []


def test_a_checkpoint_is_not_prepared(floats: dict[bool, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="with a PTQ config, not with a QATConfig: give its base"):
        convert_checkpoint(floats[True], QATConfig(NVFP4WeightConfig()), tmp_path / "out")
    with pytest.raises(ValueError, match="no recipe is called 'nvfp5'; near it: nvfp4"):
        convert_checkpoint(floats[True], "nvfp5", tmp_path / "out")
    with pytest.raises(ValueError, match="config must be a QATConfig, a PTQ config"):
        convert_checkpoint(floats[True], 4, tmp_path / "out")


@pytest.mark.parametrize("size", [0, -1, "-5GB"])
def test_shards_hold_something(size: Any, floats: dict[bool, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_shard_size is a size above 0"):
        convert_checkpoint(floats[True], Int4WeightConfig(32), tmp_path / "out", max_shard_size=size)
    model = LlamaForCausalLM.from_pretrained(floats[True])
    quantize_(model, Int4WeightConfig(32))
    with pytest.raises(ValueError, match="max_shard_size is a size above 0"):
        hf.save_pretrained(model, tmp_path / "out", max_shard_size=size)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model-00002-of-00005.safetensors", "notes.txt", "generation_config.json"])
def test_a_failed_read_is_blamed_on_the_file_that_is_read(
    name: str, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copied / "notes.txt").write_text("mine")
    real, reads = builtins.open, []

    def broken(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if Path(path).name == name and Path(path).parent == copied:
            reads.append(path)
            if len(reads) > headers:
                raise OSError(5, "Input/output error")
        return real(path, mode, *args, **kwargs)

    headers = 2 if name.endswith(".safetensors") else 0  # fail after the headers are read
    monkeypatch.setattr(builtins, "open", broken)
    monkeypatch.setattr(io, "open", broken)
    with pytest.raises(ValueError, match=rf"{name}: cannot be read: "):
        convert_checkpoint(copied, Int4WeightConfig(32), tmp_path / "out")
    assert reads
    assert not (tmp_path / "out").exists()
    assert left_behind(tmp_path) == []


def test_tensors_that_no_loader_knows_are_refused_at_the_start(
    floats: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "ALLOWED_TENSORS_SUBCLASSES", ["PackedTensor"])
    monkeypatch.setattr(stream, "reserve", None)  # nothing is written
    config = Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"q_proj: torchao's safetensors store PackedTensor, not IntxUnpackedToInt8Tensor"
    ):
        convert_checkpoint(floats[True], config, tmp_path / "out")
    monkeypatch.setattr(hf, "_known", ["_weight_qdata"])
    with pytest.raises(
        ValueError, match=r"q_proj: its PackedTensor holds scale, .*which Hugging Face's loader does not know"
    ):
        convert_checkpoint(floats[True], Int4WeightConfig(32), tmp_path / "out")


def test_the_folders_above_the_result_are_made(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out"
    with Staged(out, fresh=True) as staged:
        staged.begin()
        (staged.path / "weights").write_text("1")
        assert not out.exists() and staged.path.parent == out.parent
        staged.publish()
    assert [p.name for p in out.parent.iterdir()] == ["out"] and (out / "weights").read_text() == "1"


def test_bytes_of_a_parameter() -> None:
    w = torch.nn.Parameter(torch.randn(4, 6))
    assert bytes(raw_bytes(w)) == w.detach().numpy().tobytes()
    assert bytes(raw_bytes(w.t())) == w.detach().t().contiguous().numpy().tobytes()
    assert bytes(raw_bytes(w[:0])) == b""
