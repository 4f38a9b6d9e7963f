"""Exports that are killed, raced, cut short by a full disk, or damaged afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import save_file
from support.export_cases import byte_level, converted, llama
from support.killed import killed, operations

from aoquant import PackedWeightConfig, cli, convert_checkpoint, load_pretrained, save_pretrained
from aoquant.export import export, filled_folder, gguf_checksum, hf_folder
from aoquant.export.contents import values
from aoquant.export.source import config_of
from aoquant.export.verify import verify
from aoquant.files import atomic, checkpoint, checksums
from aoquant.files.safetensors_file import header

LAYOUTS = {"compressed-tensors": "intx4-g32", "modelopt": PackedWeightConfig("fp8-row", "fp8-row-vllm"), "gguf": "q4_0"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint for each layout, and one of the layout."""
    made = tmp_path_factory.mktemp("safety")
    found = {}
    for layout, weight in LAYOUTS.items():
        model = converted(weight)
        save_pretrained(model, made / f"{layout}-checkpoint", byte_level())
        export(made / f"{layout}-checkpoint", made / layout, layout, max_shard_size="120KB")
        found |= {layout: made / layout, f"{layout}-checkpoint": made / f"{layout}-checkpoint"}
    return found


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in atomic.LEFT}


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("layout", ["compressed-tensors", "gguf"])
def test_a_killed_export_is_whole_after_the_next_one(
    layout: str, there: bool, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder that exists may be a mount point: it is filled where it is."""
    monkeypatch.setattr(filled_folder, "FLUSHED", 1)
    out = tmp_path / "out"

    def call() -> None:
        export(folders[f"{layout}-checkpoint"], out, layout, max_shard_size="120KB")

    def clean() -> None:
        shutil.rmtree(out, ignore_errors=True)
        if there:
            out.mkdir()

    clean()
    number = operations(call)
    for at in range(number - 12 if layout == "compressed-tensors" else 0, number, 2):
        clean()
        killed(call, at)
        last = out / ("model.gguf" if layout == "gguf" else "config.json")
        if not last.exists() or (layout != "gguf" and atomic.POINTER in last.read_text()):
            call()
        assert content(out) == content(folders[layout])


@pytest.mark.parametrize("there", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("writer", ["export", "gguf", "convert"])
def test_two_writers_of_one_folder_are_refused(
    writer: str, there: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    out, source = tmp_path / "out", folders["gguf-checkpoint" if writer == "gguf" else "compressed-tensors-checkpoint"]
    calls: dict[str, Callable[[], Any]] = {
        "export": lambda: export(source, out),
        "gguf": lambda: export(source, out, "gguf"),
        "convert": lambda: convert_checkpoint(tmp_path / "float", "int8-weight", out),
    }
    llama().save_pretrained(tmp_path / "float")
    if there:
        out.mkdir()
    with (
        FileLock(out / ".aoquant-lock" if there else tmp_path / ".out.lock"),
        pytest.raises(ValueError, match="out is in use, another process writes it"),
    ):
        calls[writer]()
    calls[writer]()


def test_a_resumed_export_notices_another_source(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give other weights the names, sizes and times of the first."""
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(folders["compressed-tensors-checkpoint"], source)
    path = source / checkpoint.SINGLE
    stamp = path.stat()
    made: list[str] = []

    def stop(weight: Any) -> torch.Tensor:
        made.append(weight.name)
        if len(made) == 3:
            raise KeyboardInterrupt
        return values(weight)

    with monkeypatch.context() as patched:
        patched.setattr(filled_folder, "FLUSHED", 1)
        patched.setattr(hf_folder, "values", stop)
        with pytest.raises(KeyboardInterrupt):
            export(source, out)
    other = converted("intx4-g32")
    with torch.no_grad():
        for p in other.parameters():
            if type(p.data) is torch.Tensor and p.dim() == 1:
                p.mul_(1.5)
    save_pretrained(other, source)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert path.stat().st_size == stamp.st_size and path.stat().st_mtime_ns == stamp.st_mtime_ns
    export(source, out)
    export(source, tmp_path / "fresh")
    assert content(out) == content(tmp_path / "fresh")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_disk_leaves_nothing(
    layout: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "flush", full)
    monkeypatch.setattr(filled_folder, "flush", full)
    with pytest.raises(ValueError, match=r"out: cannot be written: .*No space left on device"):
        export(folders[f"{layout}-checkpoint"], tmp_path / "out", layout)
    assert list(tmp_path.iterdir()) == []


# ---- damage


def flip(path: Path, byte: int, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[byte] ^= 1 << bit
    path.write_bytes(raw)


def quantisation(folder: Path) -> range:
    """The bytes of quantization_config in config.json."""
    text = (folder / "config.json").read_text()
    start = text.index('"quantization_config"')
    return range(start, start + len(json.dumps(json.loads(text)["quantization_config"])))


@pytest.mark.parametrize("name", [*LAYOUTS, *(f"{layout}-checkpoint" for layout in LAYOUTS)])
def test_a_flipped_bit_is_named_by_its_file(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """In the header, between the tensors' names, in codes, scales and floats, in the index and in the config."""
    source = folders[name]
    loads = [verify] if name in ("gguf", "modelopt") else [verify, load_pretrained]
    for load in loads:
        load(source)
    generator = torch.Generator().manual_seed(0)
    weights = sorted([*source.glob("*.safetensors"), *source.glob("*.gguf")])
    cases: list[tuple[Path, int]] = []
    for path in weights:
        size = path.stat().st_size
        cases += [(path, i) for i in torch.randint(size, (4,), generator=generator).tolist()]
        if path.suffix == ".safetensors":
            start = min(t.start for t in header(path).tensors.values())
            key = path.read_bytes().index(b"aoquant_crc32")
            cases += [(path, i) for i in (0, 7, key + 12, *torch.randint(8, start, (6,), generator=generator).tolist())]
    for path in source.glob("*.index.json"):
        size = path.stat().st_size
        cases += [(path, i) for i in torch.randint(size, (6,), generator=generator).tolist()]
    if (source / "config.json").is_file():
        inside = quantisation(source)
        cases += [(source / "config.json", inside[i]) for i in torch.randint(len(inside), (12,), generator=generator)]
    if (source / "hf_quant_config.json").is_file():
        cases += [(source / "hf_quant_config.json", i) for i in (3, 20, 40)]
    copied = tmp_path / "copied"
    shutil.copytree(source, copied)
    for number, (path, byte) in enumerate(cases):
        flip(copied / path.name, byte, number % 7)
        for load in loads:
            with pytest.raises(ValueError, match=path.name.replace(".", r"\.")):
                load(copied)
        shutil.copy(path, copied / path.name)


def test_a_gguf_file_holds_its_crc_in_the_place_of_eight_zeros(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is read at a time: of a larger file the first piece alone holds the digits."""
    path = Path(shutil.copy(folders["gguf"] / "model.gguf", tmp_path))
    content = path.read_bytes()
    (digits,) = re.findall(rb"aoquant\.crc32\x08\0{3}\x08\0{7}([0-9a-f]{8})", content)
    assert int(digits, 16) == zlib.crc32(content.replace(digits, b"0" * 8))
    for size in (1 << 12, len(content) - 1):
        monkeypatch.setattr(gguf_checksum, "PIECE", size)
        gguf_checksum.verify(path)
        gguf_checksum.write(path)
        assert path.read_bytes() == content
    path.write_bytes(content.replace(b"aoquant.crc32", b"aoquant.crc00"))
    with pytest.raises(ValueError, match=r"model\.gguf: holds no checksum"):
        gguf_checksum.verify(path)


def test_vllm_reads_exports_by_itself(folders: dict[str, Path]) -> None:
    """Checksums alone do not make a folder aoquant's own checkpoint, which the plugin for vLLM reads."""
    from aoquant.integrations.vllm_plugin import is_ours

    found = {name: [str(p) for p in folder.glob("*.safetensors")] for name, folder in folders.items()}
    assert {name for name, files in found.items() if files and is_ours(files)} == {f"{n}-checkpoint" for n in LAYOUTS}


def test_users_edit_the_rest_of_the_config(folders: dict[str, Path], tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(folders["compressed-tensors"], copied)
    told = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**told, "rope_theta": 20000.0}, sort_keys=True))
    load_pretrained(copied)


def test_the_command_verifies(folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in folders:
        cli.main(["verify", str(folders[name])])
        assert "what was written" in capsys.readouterr().out
    llama().save_pretrained(tmp_path / "float")
    with pytest.raises(SystemExit):
        cli.main(["verify", str(tmp_path / "float")])
    assert "holds no checksums" in capsys.readouterr().err


def test_what_was_verified_is_counted(folders: dict[str, Path], tmp_path: Path) -> None:
    for name, folder in folders.items():
        files = list(folder.glob("*.safetensors"))
        tensors = sum(len(header(path).tensors) for path in files)
        numbers = [1] if name == "gguf" else [tensors, len(files)]
        assert [int(n) for n in re.findall(r"\d+", verify(folder).removeprefix(str(folder)))][: len(numbers)] == numbers
    run = tmp_path / "run"
    shutil.copytree(folders["modelopt-checkpoint"], run / "checkpoint")
    assert verify(run).startswith(str(run / "checkpoint"))
    with pytest.raises(ValueError, match=r"model\.gguf"):
        verify(folders["gguf"] / "model.gguf")


def test_a_name_too_long_for_a_file_is_refused(tmp_path: Path) -> None:
    save_pretrained(converted("intx4-g32"), tmp_path / "saved", max_shard_size="20KB")
    index = tmp_path / "saved" / checkpoint.INDEX
    content = json.loads(index.read_text())
    content["weight_map"][next(iter(content["weight_map"]))] = "x" * 300
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load_pretrained(tmp_path / "saved")


def test_checksums_without_an_end_of_depth_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"x": torch.zeros(1)}, path, metadata={"aoquant_crc32": "[" * 100_000})
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        checksums.verify([path])


@pytest.mark.parametrize(
    ("config", "said"),
    [("{", "JSON"), ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size.*wide"), ("[]", "model_type")],
)
def test_a_config_that_transformers_cannot_read_says_why_in_a_line(config: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=rf"config\.json: transformers cannot read it: .*{said}[^\n]*$"):
        config_of(tmp_path)
