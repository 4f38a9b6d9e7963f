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

from aoquant import Int4WeightConfig, NVFP4WeightConfig, QATConfig, cli, convert_checkpoint
from aoquant.files import checkpoint
from aoquant.files.atomic import Staged
from aoquant.integrations import hf, stream


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Copy them before changing them."""
    return write_floats(tmp_path_factory.mktemp("float"))


@pytest.fixture
def copied(floats: dict[bool, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(floats[True], tmp_path / "copy"))


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[5] = torch.nan


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def only_bin(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def store_twice(folder: Path) -> None:
    a, b = sorted(folder.glob("model-*"))[:2]
    save_file(load_file(a) | {next(iter(load_file(b))): torch.ones(1)}, a, {"format": "pt"})


def config(**changes: Any) -> Any:
    return lambda folder: edit(folder / "config.json", lambda c: c.update(changes))


FILES: list[tuple[str, Any]] = [
    ("config.json", lambda f: (f / "config.json").unlink()),
    (checkpoint.SINGLE, only_bin),
    ("model-00002", lambda f: sorted(f.glob("model-*"))[1].unlink()),
    ("model-9", lambda f: edit(f / checkpoint.INDEX, lambda c: c["weight_map"].update(ghost="model-9.safetensors"))),
    ("model-00001", lambda f: truncate(sorted(f.glob("model-*"))[0])),
    ("model-00001", store_twice),
    ("model.layers.1.mlp.up_proj", lambda f: rewritten(f, poison)),
    ("model.norm.weight", lambda f: rewritten(f, lambda t: t.update({"model.norm.weight": torch.ones(128).char()}))),
    ("gate_proj.weight is (256, 128)", config(intermediate_size=192)),
    ("unexpected", config(num_hidden_layers=1)),
    ("model.layers.2.mlp.down_proj.weight", config(num_hidden_layers=3)),
    ("config.json", config(model_type="nobody", architectures=None)),
    ("gptq", config(quantization_config={"quant_method": "gptq", "bits": 4})),
]
ARGUMENTS = [
    ("int4-q32", "--recipe int4-q32"),
    ("float16", "--recipe torchao-int4-g128 --dtype float16"),
    ("dtype", "--dtype int8"),
    ("device", "--device tpu"),
    ("device", "--device meta"),
    ("verify", "--verify -1"),
    ("5XB", "--max-shard-size 5XB"),
    ("max_shard_size", "--max-shard-size -1"),
    ("dwon_proj", "--skip re:.*mlp.dwon_proj"),
    ("regular expression", "--skip re:("),
    ("none was chosen", "--skip re:.*"),
    ("=int8", "--layers =int8"),
    ("'int8'", "--layers int8"),
    ("'a'", "--layers a=int8 a=nvfp4"),
    ("tied", "--layers lm_head=int8"),
    ("copy", "--out {copied}"),
    ("nowhere", "--model nowhere"),
]


@pytest.mark.parametrize(
    ("name", "change", "arguments"),
    [*((name, change, "") for name, change in FILES), *((name, None, given) for name, given in ARGUMENTS)],
)
def test_a_mistake_is_one_sentence_that_names_it(
    name: str, change: Any, arguments: str, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if change is not None:
        change(copied)
    given = {"--model": str(copied), "--recipe": "int4-g32", "--out": str(tmp_path / "out")}
    extra = arguments.format(copied=copied).split()
    words = [word for pair in given.items() for word in pair if pair[0] not in extra]
    with pytest.raises(SystemExit) as exit:
        cli.main(["convert", *words, *extra])
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert "aoquant: " in error and name in error
    assert not (tmp_path / "out").exists() and left_behind(tmp_path) == []


def test_wrong_configs_and_sizes_are_refused(floats: dict[bool, Path], tmp_path: Path) -> None:
    for name, given in (
        ("QATConfig", QATConfig(NVFP4WeightConfig())),
        ("nvfp5", "nvfp5"),
        ("config", 4),
    ):
        with pytest.raises(ValueError, match=name):
            convert_checkpoint(floats[True], given, tmp_path / "out")
    with pytest.raises(ValueError, match="max_shard_size"):
        convert_checkpoint(floats[True], Int4WeightConfig(32), tmp_path / "out", max_shard_size=0)
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
    with pytest.raises(ValueError, match="q_proj"):
        convert_checkpoint(floats[True], config, tmp_path / "out")
    monkeypatch.setattr(hf, "_known", ["_weight_qdata"])
    with pytest.raises(ValueError, match="q_proj"):
        convert_checkpoint(floats[True], Int4WeightConfig(32), tmp_path / "out")


def test_the_folders_above_the_result_are_made(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out"
    with Staged(out, fresh=True) as staged:
        staged.begin()
        (staged.path / "weights").write_text("1")
        assert not out.exists() and staged.path.parent == out.parent
        staged.publish()
    assert [p.name for p in out.parent.iterdir()] == ["out"] and (out / "weights").read_text() == "1"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"ptq": "gptq"}, "--calibrate"),
        ({"calibrate": Path("text.txt")}, "--calibrate"),
        ({"export": Path(__file__)}, "test_convert_mistakes.py exists"),
        ({"layers": ("a", "a")}, "'a'"),
        ({"recipe": "nvpf4"}, "nvpf4"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_a_model_is_read(
    options: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=name):
        cli.convert(**{"model": tmp_path / "nowhere", "recipe": "int4-g32", "out": tmp_path / "out"} | options)
