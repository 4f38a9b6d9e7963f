"""A folder whose files are damaged, or were made to mislead, is a ValueError that names it, by every road."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import aoquant
from aoquant.files import checkpoint
from aoquant.files.safetensors_file import header
from aoquant.integrations.text import assets

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "num_attention_heads": 2}
JUNK: list[Any] = [None, True, -1, 1.5, 1e400, "", "../x", "é", [], [1], {}, {"a": 1}, [[[]]], "e" * 50]


def made() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of aoquant's, one in shards, a float one, and a compressed-tensors one."""
    base = tmp_path_factory.mktemp("folders")
    paths = {name: base / name for name in ("saved", "shards", "float", "exported")}
    model = made()
    model.save_pretrained(paths["float"])
    AutoTokenizer.from_pretrained(assets()).save_pretrained(paths["float"])
    aoquant.quantize_(model, "vllm-w4a16-g32")
    aoquant.save_pretrained(model, paths["saved"])
    aoquant.save_pretrained(model, paths["shards"], max_shard_size="8KB")
    aoquant.export(model, paths["exported"])
    return paths


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to, dirs_exist_ok=True))


def roads(folder: Path, out: Path) -> list[Callable[[], Any]]:
    """Every way of reading a folder that this kind of folder can be read in."""
    kinds = {
        "float": [lambda: aoquant.convert_checkpoint(folder, "mxfp4", out)],
        "exported": [lambda: aoquant.load_pretrained(folder)],
    }
    own = [
        lambda: aoquant.load_pretrained(folder, verify_checksums=False),
        lambda: aoquant.export(folder, out),
    ]
    return kinds.get(folder.name, own)


def tried(folder: Path, out: Path) -> list[str]:
    """Return what the roads say of a folder that they refuse; other errors than a ValueError fail the test."""
    said = []
    for road in roads(folder, out):
        shutil.rmtree(out, ignore_errors=True)
        try:
            road()
        except ValueError as error:
            said.append(str(error))
    return said


def places(content: Any) -> list[tuple[Any, Any]]:
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    return [place for key in keys for place in ((content, key), *places(content[key]))]


def rewritten(path: Path, draw: random.Random) -> None:
    """Write a JSON file, or the header of a safetensors file, with one value replaced or removed."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little") if path.suffix == ".safetensors" else 0
    content = json.loads(raw[8 : 8 + length] if length else raw)
    owner, key = draw.choice(places(content))
    if draw.random() < 0.2:
        del owner[key]
    elif isinstance(owner[key], str) and owner[key].startswith("{") and draw.random() < 0.8:  # JSON in a header
        inner = json.loads(owner[key])
        below, name = draw.choice(places(inner))
        below[name] = draw.choice(JUNK)
        owner[key] = json.dumps(inner)
    else:
        owner[key] = draw.choice(JUNK)
    text = json.dumps(content).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :] if length else text)


def damaged(path: Path, draw: random.Random) -> None:
    """Truncate a file, or change bytes of its first 4 kB."""
    raw = bytearray(path.read_bytes())
    if draw.random() < 0.4:
        raw = raw[: draw.randrange(len(raw))]
    for _ in range(draw.randrange(4)):
        if raw:
            raw[draw.randrange(min(len(raw), 4096))] = draw.randrange(256)
    path.write_bytes(raw)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["saved", "shards", "float", "exported"])
@pytest.mark.parametrize("change", [rewritten, damaged])
def test_damage_is_an_error_with_the_folders_name(
    folders: dict[str, Path], kind: str, change: Callable[[Path, random.Random], None], tmp_path: Path
) -> None:
    draw, said = random.Random(f"{kind} {change.__name__}"), list[str]()
    names = sorted(p.name for p in folders[kind].iterdir() if p.name == "config.json" or ".safetensors" in p.name)
    folder = tmp_path / kind
    for _ in range(12):
        shutil.rmtree(folder, ignore_errors=True)
        copied(folders[kind], folder)
        change(folder / draw.choice(names), draw)
        said += tried(folder, tmp_path / "out")
    assert len(said) >= 5 and [text for text in said if str(folder) not in text] == []


DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000
HEADERS = {
    "no offsets": {"a": {"dtype": "F32", "shape": [1], "data_offsets": []}},
    "one offset": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
    "text": {"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}},
    "negative": {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}},
    "truth": {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
    "float": {"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
    "too long": {"a": {"dtype": "F32", "shape": [10**30, 0], "data_offsets": [0, 0]}},
    "list": {"a": []},
    "dtype": {"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}},
    "metadata": {"__metadata__": {"a": 1}},
    "metadata list": {"__metadata__": ["a"]},
    "array": [],
    "number": 1,
}


@pytest.mark.parametrize(
    "content", [*(json.dumps(h).encode() for h in HEADERS.values()), DEEP, b""], ids=[*HEADERS, "deep", "empty"]
)
def test_a_malformed_header_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(4))
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged or truncated"):
        header(path)


@pytest.mark.parametrize("cut", [1, 7])
def test_a_header_that_was_cut_off_is_given_with_both_lengths(cut: int, tmp_path: Path) -> None:
    path, content = tmp_path / "model.safetensors", b"{}" + bytes(6).replace(b"\0", b" ")
    path.write_bytes(len(content).to_bytes(8, "little") + content)
    assert header(path).tensors == {}
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ValueError, match=rf"\b{len(content)} .*\b{8 + len(content) - cut}\b"):
        header(path)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/x.safetensors", "a/../../b", "..\\b", "C:\\b", "", ".", "a//b"]
)
def test_names_in_an_index_stay_in_the_folder(folders: dict[str, Path], name: str, tmp_path: Path) -> None:
    folder = copied(folders["shards"], tmp_path / "shards")
    index = json.loads((folder / checkpoint.INDEX).read_text())
    key = next(iter(index["weight_map"]))
    moved = folder / index["weight_map"][key]
    shutil.copyfile(moved, tmp_path / "model.safetensors")
    index["weight_map"] = {k: name if folder / f == moved else f for k, f in index["weight_map"].items()}
    (folder / checkpoint.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json: names .* no file of its folder"):
        aoquant.load_pretrained(folder)


def hub_cache(folder: Path, at: Path) -> Path:
    """The folder as the hub's cache keeps it: each file a link to a blob."""
    snapshot, blobs = at / "models--a--b" / "snapshots" / "0123", at / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


def test_float_weights_are_a_checkpoint_where_its_config_promises_no_others(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model, folder = made(), tmp_path / "saved"
    aoquant.quantize_(model, aoquant.QATConfig(None, kv_cache=aoquant.KVCacheConfig("fp8", scale=1.0)))
    aoquant.quantize_(model, aoquant.QATConfig(step="convert"))
    aoquant.save_pretrained(model, folder)
    ids = torch.arange(8).view(1, 8)
    assert torch.equal(aoquant.load_pretrained(folder)(ids).logits, model(ids).logits)
    shutil.copy(folders["saved"] / "config.json", folder)
    with pytest.raises(ValueError, match=f"{folder}.*float"):
        aoquant.load_pretrained(folder)
    assert len(tried(folder, tmp_path / "out")) == len(roads(folder, tmp_path / "out"))


@pytest.mark.parametrize("kind", ["saved", "shards"])
def test_a_cache_of_the_hub_loads(folders: dict[str, Path], kind: str, tmp_path: Path) -> None:
    aoquant.load_pretrained(hub_cache(folders[kind], tmp_path))
    aoquant.export(tmp_path / "models--a--b/snapshots/0123", tmp_path / "out")


def test_a_cache_of_the_hub_is_converted_with_its_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    aoquant.convert_checkpoint(hub_cache(folders["float"], tmp_path), "mxfp4", tmp_path / "out")
    copy = tmp_path / "out" / "tokenizer.json"
    assert not copy.is_symlink() and copy.read_bytes() == (folders["float"] / "tokenizer.json").read_bytes()


def test_weights_that_are_links_to_another_disk_load(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(folders["saved"], tmp_path / "saved")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    aoquant.load_pretrained(folder)


@pytest.mark.parametrize("kind", ["float", "saved"])
@pytest.mark.parametrize("target", ["/etc/hostname", "../secret", "../snapshots/blobs/../../secret"])
def test_what_a_link_leads_to_is_not_copied(folders: dict[str, Path], kind: str, target: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "snapshots" / "blobs").mkdir(parents=True)
    folder = copied(folders[kind], tmp_path / kind)
    (folder / "notes.txt").symlink_to(target)
    with pytest.raises(ValueError, match=r"notes\.txt: is a link to"):
        roads(folder, tmp_path / "out")[-1]()
    assert not (tmp_path / "out").exists()
    (folder / "notes.txt").unlink()
    (folder / "README.md").write_text("text")
    (folder / "notes.txt").symlink_to("README.md")
    roads(folder, tmp_path / "out")[-1]()
    assert (tmp_path / "out" / "notes.txt").read_text() == "text"
