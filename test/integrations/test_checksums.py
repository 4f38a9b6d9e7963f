"""Damage that leaves a file readable is an error when it is loaded: every tensor has a checksum, whoever wrote the
file.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.convert_cases import llama
from transformers import AutoModelForCausalLM

from aoquant import NVFP4WeightConfig, convert_checkpoint, load_pretrained, quantize_, save_pretrained
from aoquant.export import export
from aoquant.files import checkpoint, checksums
from aoquant.files.safetensors_file import header, sort_metadata

QDATA = "model.layers.1.mlp.up_proj._weight_qdata"
IDS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model saved whole, in shards, and converted on disk."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("checksums")
    model = llama(tied=True)
    model.save_pretrained(folder / "float")
    quantize_(model, NVFP4WeightConfig())
    save_pretrained(model, folder / "whole")
    save_pretrained(model, folder / "shards", max_shard_size="60KB")
    convert_checkpoint(folder / "float", NVFP4WeightConfig(), folder / "converted", max_shard_size="60KB")
    return {name: folder / name for name in ("whole", "shards", "converted")}


def copy_of(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def invert(folder: Path, name: str) -> Path:
    """Invert every byte of a stored tensor; returns its file."""
    for path in folder.glob("*.safetensors"):
        if (place := header(path).tensors.get(name)) is not None:
            raw = bytearray(path.read_bytes())
            raw[place.start : place.start + place.size] = bytes(
                255 - b for b in raw[place.start : place.start + place.size]
            )
            path.write_bytes(raw)
            return path
    raise AssertionError(name)


@pytest.mark.parametrize("kind", ["whole", "shards", "converted"])
def test_every_tensor_has_a_checksum_and_an_intact_checkpoint_loads(kind: str, folders: dict[str, Path]) -> None:
    paths = sorted(folders[kind].glob("*.safetensors"))
    assert (len(paths) == 1) == (kind == "whole")
    stored = 14 * 3 + 8 + 5 + 1  # parts of the packed weights, biases, norms, and the tied embedding once
    assert checksums.verify(paths) == sum(len(header(p).tensors) for p in paths) == stored
    load_pretrained(folders[kind])


def test_equal_models_are_equal_files(folders: dict[str, Path], tmp_path: Path) -> None:
    """safetensors writes metadata in an order of its own at every call."""
    save_pretrained(load_pretrained(folders["whole"]), tmp_path)
    (before,), (after,) = (list(folder.glob("*.safetensors")) for folder in (folders["whole"], tmp_path))
    assert before.read_bytes() == after.read_bytes()
    for path in (after, *folders["shards"].glob("*.safetensors"), *folders["converted"].glob("*.safetensors")):
        metadata = list(header(path).metadata)
        assert len(metadata) > 10 and metadata == sorted(metadata)


def test_metadata_of_the_library_is_sorted_in_place(tmp_path: Path) -> None:
    """Names and text that are no ASCII, and quoted characters, take as many bytes as the library gave them."""
    path, said = tmp_path / "a.safetensors", {f"{i} é\u2028\x7f": '\n\x01"\\ü/' for i in range(20)}
    save_file({"wé": torch.arange(5)}, path, said)
    size = path.stat().st_size
    sort_metadata(path)
    assert path.stat().st_size == size and list(header(path).metadata.items()) == sorted(said.items())
    assert torch.equal(load_file(path)["wé"], torch.arange(5))


@pytest.mark.parametrize("name", [QDATA, "model.layers.0.input_layernorm.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("kind", ["whole", "shards", "converted"])
def test_inverted_bytes_are_noticed_by_both_loaders(
    kind: str, name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy_of(folders[kind], tmp_path / "copy")
    file = invert(folder, name)
    for load in (load_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=rf"{file.name}: {name} is damaged, its checksum is [0-9a-f]{{8}} and was"):
            load(folder)


@pytest.mark.parametrize("name", [QDATA, "model.layers.0.input_layernorm.weight"])
def test_export_does_not_write_a_damaged_checkpoint(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_of(folders["whole"], tmp_path / "copy")
    file = invert(folder, name)
    with pytest.raises(ValueError, match=rf"{file.name}: {name} is damaged"):
        export(folder, tmp_path / "served", "gguf")
    assert not (tmp_path / "served").exists()


def test_verification_can_be_left_out(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copy_of(folders["whole"], tmp_path / "copy")
    invert(folder, QDATA)
    load_pretrained(folder, verify_checksums=False)
    with checksums.not_verified():
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(ValueError, match="is damaged"):
        load_pretrained(folder)


@pytest.mark.parametrize("byte", [0, 17, -1])
def test_one_bit_is_enough(byte: int, folders: dict[str, Path], tmp_path: Path) -> None:
    path = copy_of(folders["whole"], tmp_path / "copy") / checkpoint.SINGLE
    place = header(path).tensors[QDATA]
    raw = bytearray(path.read_bytes())
    raw[place.start + byte % place.size] ^= 4
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=f"{QDATA} is damaged"):
        checksums.verify([path])


def test_dtype_shape_and_description_are_part_of_it(folders: dict[str, Path], tmp_path: Path) -> None:
    with safe_open(folders["whole"] / checkpoint.SINGLE, framework="pt") as file:
        tensors, metadata = {k: file.get_tensor(k) for k in file.keys()}, file.metadata()  # noqa: SIM118
    path = tmp_path / "other.safetensors"
    for change in (lambda t: t.view(torch.int8), lambda t: t.view(-1)):
        save_file({**tensors, QDATA: change(tensors[QDATA])}, path, metadata)
        with pytest.raises(ValueError, match=f"{QDATA} is damaged"):
            checksums.verify([path])
    description = metadata["model.layers.0.mlp.up_proj.weight"]
    save_file(
        tensors, path, {**metadata, "model.layers.0.mlp.up_proj.weight": description.replace("nvfp4", "nvfp5", 1)}
    )
    with pytest.raises(ValueError, match="its header is damaged, the metadata's checksum differs"):
        checksums.verify([path])


@pytest.mark.parametrize("original", [True, False], ids=["original names", "the model's names"])
def test_a_model_that_transformers_loaded_can_be_saved_again(
    original: bool, folders: dict[str, Path], tmp_path: Path
) -> None:
    first = AutoModelForCausalLM.from_pretrained(folders["whole"])
    first.save_pretrained(tmp_path / "again", save_original_format=original)
    config = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "torchao"
    assert "import aoquant" in config["requires"]
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert checksums.verify([tmp_path / "again" / checkpoint.SINGLE]) > 14 * 3
    with torch.no_grad():
        assert torch.equal(second(IDS).logits, first(IDS).logits)
    third = load_pretrained(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(third(IDS).logits, first(IDS).logits)


def test_a_newer_format_is_refused_and_an_unmarked_one_is_read(folders: dict[str, Path], tmp_path: Path) -> None:
    for version in ("00000002", None):
        folder = copy_of(folders["whole"], tmp_path / str(version))
        file = folder / "model.safetensors"
        metadata = dict(header(file).metadata)
        table = json.loads(metadata[checksums.KEY])
        assert table.pop("__format__") == f"{checksums.VERSION:08x}"
        if version is not None:
            table["__format__"] = version
        save_file(load_file(file), file, {**metadata, checksums.KEY: json.dumps(table)})
        if version is None:
            assert torch.equal(load_pretrained(folder)(IDS).logits, load_pretrained(folders["whole"])(IDS).logits)
        else:
            with pytest.raises(ValueError, match=str(file)):
                load_pretrained(folder)
