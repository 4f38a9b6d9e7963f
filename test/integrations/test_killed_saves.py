"""A save over an existing checkpoint that is killed at any operation on files leaves the old model or the new one."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import models as small
from support.killed import killed, left_by_kills, operations
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from aoquant import NVFP4WeightConfig, PackedWeightConfig, QATConfig, load_pretrained, quantize_, save_pretrained
from aoquant.files import atomic, checkpoint
from aoquant.files.atomic import LEFT, Staged
from aoquant.integrations import pretrained_model

FOREIGN = ("optimizer.pt", "adapter_model.safetensors", "README.md", "sub/notes.txt")
COUNTS = ((1, 1), (1, 3), (3, 1), (3, 2), (2, 3), (3, 3))


def put_foreign(folder: Path) -> None:
    for name in FOREIGN:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)


def check_foreign(folder: Path) -> None:
    assert [(folder / name).read_text() for name in FOREIGN] == list(FOREIGN)


@pytest.fixture
def no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no disk: a kill loses nothing that was not on it."""
    monkeypatch.setattr(atomic, "flush", lambda path: None)


def test_a_renamed_file_and_its_name_are_on_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done, rename, new = list[Any](), os.replace, tmp_path / "new"
    monkeypatch.setattr(atomic, "flush", done.append)
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append(paths), rename(*paths)))
    new.write_text("text")
    atomic.give_place(new, tmp_path / "named")
    assert done == [new, (new, tmp_path / "named"), tmp_path]


# ---- every operation, with small files in the place of a model


def write(folder: Path, value: int, shards: int) -> None:
    """A checkpoint whose config and tensors all say `value`."""
    (folder / "config.json").write_text(json.dumps({"value": value}))
    (folder / "generation_config.json").write_text(json.dumps({"value": value}))
    if shards == 1:
        save_file({f"t{i}": torch.tensor([value]) for i in range(3)}, folder / checkpoint.SINGLE)
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    names = {f"t{i}": files[i % shards] for i in range(3)}
    for file in files:
        save_file({n: torch.tensor([value]) for n, f in names.items() if f == file}, folder / file)
    (folder / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def save(folder: Path, value: int, shards: int) -> None:
    with Staged(folder) as staged:
        staged.begin()
        write(staged.path, value, shards)
        staged.publish()


def value_of(folder: Path) -> int:
    """The value of config and tensors, as transformers and aoquant find them."""
    found = [json.loads((folder / "config.json").read_text())["value"]]
    tensors: dict[str, torch.Tensor] = {}
    for path in checkpoint.files(folder):
        tensors |= load_file(path)
    assert len(tensors) == 3
    found += [int(t) for t in tensors.values()]
    assert len(set(found)) == 1, found
    return int(found[0])


def no_links(*_: Any) -> None:
    raise OSError("no hard links here")


@pytest.mark.usefixtures("no_flush")
@pytest.mark.parametrize(("before", "after", "links"), [*((*c, True) for c in COUNTS), (3, 2, False)])
def test_a_kill_at_any_operation_leaves_old_or_new(
    before: int, after: int, links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    old, target, folder = tmp_path / "old", tmp_path / "target", tmp_path / "folder"
    save(old, 1, before)
    put_foreign(old)
    folder.symlink_to(target)  # a folder behind a symlink is replaced where it is
    shutil.copytree(old, target)
    seen = []
    for left in left_by_kills(lambda: save(folder, 2, after), target, tmp_path / "left"):
        shutil.rmtree(target)
        left.rename(target)
        seen.append(value_of(folder))
        check_foreign(folder)
        save(folder, 3, before)
        assert value_of(folder) == 3 and json.loads((folder / "generation_config.json").read_text()) == {"value": 3}
        assert {p.name for p in folder.iterdir()} == {p.name for p in old.iterdir()}
        check_foreign(folder)
    assert seen == sorted(seen) and set(seen) == {1, 2}
    assert folder.is_symlink()


def tree(folder: Path) -> dict[Path, tuple[bytes, int] | None]:
    """Bytes of each file in a folder, and how many names the file has; None for folders."""
    return {
        path.relative_to(folder): (path.read_bytes(), path.stat().st_nlink) if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.usefixtures("no_flush")
@pytest.mark.parametrize("links", [True, False], ids=["links", "copies"])
def test_a_kill_leaves_the_copies_that_other_tests_look_at(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr(os, "link", no_links)
    old, folder = tmp_path / "old", tmp_path / "folder"
    save(old, 1, 3)
    shutil.copytree(old, folder)
    for at, left in enumerate(left_by_kills(lambda: save(folder, 2, 2), folder, tmp_path / "left")):
        if at % 6:
            continue
        shutil.rmtree(folder)
        shutil.copytree(old, folder)
        killed(lambda: save(folder, 2, 2), at)
        assert tree(folder) == tree(left), at


@pytest.mark.usefixtures("no_flush")
def test_a_kill_while_a_save_is_finished_is_finished_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next save first finishes what the killed one committed, and may be killed there."""
    folder = tmp_path / "folder"
    save(folder, 1, 3)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(atomic, "_finish", stop)
        with pytest.raises(KeyboardInterrupt):
            save(folder, 2, 2)
    assert value_of(folder) == 2
    for left in left_by_kills(lambda: save(folder, 3, 1), folder, tmp_path / "left"):
        assert value_of(left) in (2, 3)
        save(left, 4, 1)
        assert sorted(p.name for p in left.iterdir()) == ["config.json", "generation_config.json", checkpoint.SINGLE]
    save(folder, 4, 1)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "generation_config.json", checkpoint.SINGLE]


@pytest.mark.usefixtures("no_flush")
def test_a_new_folder_appears_whole(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    for left in left_by_kills(lambda: save(parent / "folder", 1, 2), parent, tmp_path / "left"):
        if (left / "folder").exists():
            assert value_of(left / "folder") == 1
        save(left / "folder", 2, 2)
        assert value_of(left / "folder") == 2 and [p.name for p in left.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", ["config.json", checkpoint.SINGLE, "generation_config.json"])
def test_what_cannot_be_replaced_is_found_before_anything_is_written(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    save(folder, 1, 1)
    (folder / name).unlink()
    (folder / name).mkdir()
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=f"{name}: is a folder, and a file has to be written in its place"):
        save(folder, 2, 1)
    assert sorted(folder.rglob("*")) == before


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "folder", 1, 2)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic, "flush", full)
    with pytest.raises(ValueError, match=r"folder: cannot be written: .*No space left on device"):
        save(tmp_path / "folder", 2, 1)
    assert value_of(tmp_path / "folder") == 1 and not {p.name for p in (tmp_path / "folder").iterdir()} & set(LEFT)


# ---- models


def tiny(seed: int, config: Any, step: str | None = None) -> Any:
    torch.manual_seed(seed)
    size = {**small.SMALL, "num_hidden_layers": 1}
    model = LlamaForCausalLM._from_config(LlamaConfig(**size), dtype=torch.bfloat16).eval()
    quantize_(model, config if step is None else QATConfig(config, step=step))
    return model


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12).view(2, 6)).logits
    return found


def check_kills(old: Path, folder: Path, call: Callable[[], None], step: int, wanted: list[Any]) -> None:
    shutil.copytree(old, folder)
    seen = []
    for left in left_by_kills(call, folder, folder.with_name("left"))[::step]:
        for load in (load_pretrained, AutoModelForCausalLM.from_pretrained):
            found = logits(load(left))
            seen.append([torch.equal(found, w) for w in wanted].index(True))
        check_foreign(left)
    assert seen == sorted(seen) and set(seen) == {0, 1}


@pytest.mark.usefixtures("no_flush")
@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", [("5GB", "60KB"), ("60KB", "5GB")], ids=["to shards", "to one file"])
def test_models_load_after_a_kill(sizes: tuple[str, str], step: int, tmp_path: Path) -> None:
    """Old and new have other formats, so that the old config with the new weights is no model."""
    old, new = tiny(0, NVFP4WeightConfig()), tiny(1, PackedWeightConfig("int4-g32"))
    save_pretrained(old, tmp_path / "old", max_shard_size=sizes[0])
    put_foreign(tmp_path / "old")

    def call() -> None:
        save_pretrained(new, tmp_path / "folder", max_shard_size=sizes[1])

    check_kills(tmp_path / "old", tmp_path / "folder", call, step, [logits(old), logits(new)])


def test_a_save_is_staged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours calls transformers' own method, which stages saves of our models, too."""
    made = list[Path]()

    def staged(folder: Path) -> Staged:
        made.append(folder)
        return Staged(folder)

    monkeypatch.setattr(pretrained_model, "Staged", staged)
    model = tiny(0, NVFP4WeightConfig())
    save_pretrained(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert made == [tmp_path / "ours", tmp_path / "theirs"]


def test_saves_of_the_trainer_are_staged(tmp_path: Path) -> None:
    """The Trainer calls the model's own method, for a converted model and for one in training."""
    for model in (tiny(0, NVFP4WeightConfig()), tiny(0, NVFP4WeightConfig(), "prepare")):
        folder = tmp_path / type(model.model.layers[0].mlp.up_proj).__name__
        if "Packed" in folder.name:
            save_pretrained(model, folder)
        trainer = Trainer(model, TrainingArguments(str(tmp_path / "run"), report_to=[], use_cpu=True))
        trainer.save_model(str(folder))
        put_foreign(folder)
        number = operations(lambda trainer=trainer, folder=folder: trainer.save_model(str(folder)))
        for at in range(0, number, 6):
            killed(lambda trainer=trainer, folder=folder: trainer.save_model(str(folder)), at)
            checkpoint.files(folder)
            check_foreign(folder)
        trainer.save_model(str(folder))
        assert not {p.name for p in folder.iterdir()} & set(LEFT)
