"""No file that is loaded runs code: not a pickle in a run's folder, not the Python of a checkpoint."""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import aoquant
from aoquant.integrations.finetune import master_adamw
from aoquant.integrations.finetune_checkpoints import NEWEST, Checkpoints
from aoquant.integrations.job import RESULTS, check_fingerprint, evaluation, load_checkpoint, load_float
from aoquant.integrations.job.records import write_json
from aoquant.integrations.text import assets

ROOT = Path(aoquant.__file__).parents[1]
SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": 2}


def dangerous(call: ast.Call) -> bool:
    """True for a call that runs what it is given, or may run what a file says."""
    name = ast.unparse(call.func)
    given = {k.arg: ast.unparse(k.value) for k in call.keywords}
    if name in ("eval", "exec", "os.system", "pickle.load", "pickle.loads", "yaml.load", "yaml.unsafe_load"):
        return True
    if "Unpickler" in name or name in ("joblib.load", "marshal.loads", "runpy.run_path"):
        return True
    if name == "torch.load":
        return given.get("weights_only") != "True"
    if name.split(".")[-1] == "from_pretrained" and any(
        auto in name for auto in ("AutoConfig", "AutoModel", "AutoTokenizer", "AutoProcessor")
    ):
        return given.get("trust_remote_code") != "False"
    return given.get("shell") == "True" or given.get("trust_remote_code") == "True"


def test_no_call_in_the_source_runs_what_it_loads() -> None:
    found = set()
    for path in (*(ROOT / "aoquant").rglob("*.py"), *(ROOT / "eval").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and dangerous(node):
                found.add((path.relative_to(ROOT).as_posix(), ast.unparse(node.func).split(".")[-1]))
    assert not found


class Planted:
    """A pickle that makes a file when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


def keeper(folder: Path) -> Checkpoints:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    return Checkpoints(folder, model, master_adamw(model, 0.1), torch.zeros(3))


def rewritten(step: str = "2", **changed: torch.Tensor | None) -> Callable[[Path, Path], None]:
    """Write the checkpoint again: other tensors by name, or None to leave one out."""

    def write(path: Path, mark: Path) -> None:
        tensors = {**load_file(path), **{name.replace("__", "."): t for name, t in changed.items()}}
        save_file({name: t for name, t in tensors.items() if t is not None}, path, {"step": step})

    return write


PLANTED: dict[str, Callable[[Path, Path], None]] = {
    "pickle": lambda path, mark: path.write_bytes(pickle.dumps(Planted(mark))) and None,
    "torch.save": lambda path, mark: torch.save(Planted(mark), path),
    "truncated": lambda path, mark: path.write_bytes(path.read_bytes()[:-40]) and None,
    "empty": lambda path, mark: path.write_bytes(b"") and None,
    "text": lambda path, mark: path.write_bytes(b"cbuiltins\nexec\n.") and None,
    "no number": rewritten(step="../../x"),
    "no step": rewritten(step="-1"),
    "left out": rewritten(master__bias=None),
    "of nobody": rewritten(other=torch.zeros(4)),
    "other shape": rewritten(master__bias=torch.zeros(5)),
    "other dtype": rewritten(master__bias=torch.zeros(4, dtype=torch.int32)),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_checkpoint_in_a_run_is_refused_and_not_run(tmp_path: Path, case: str) -> None:
    keeper(tmp_path).save(2)
    PLANTED[case](tmp_path / NEWEST, mark := tmp_path / "ran")
    with pytest.raises(ValueError, match=NEWEST):
        keeper(tmp_path).load()
    assert not mark.exists()


def test_a_run_goes_on_from_what_it_wrote(tmp_path: Path) -> None:
    first = keeper(tmp_path)
    first.losses += 1
    first.save(2)
    again = keeper(tmp_path)
    assert again.load() == 2 and torch.equal(again.losses, first.losses)


@pytest.fixture
def own_code(tmp_path: Path) -> tuple[Path, Path]:
    """A folder whose config.json names Python beside it, and the file that this Python makes."""
    mark, folder = tmp_path / "ran", tmp_path / "model"
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    aoquant.quantize_(model, "mxfp4")
    aoquant.save_pretrained(model, folder, transformers.AutoTokenizer.from_pretrained(assets()))
    (folder / "own.py").write_text(
        f"from pathlib import Path\nPath({str(mark)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class Own(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    config["model_type"] = "own"
    (folder / "config.json").write_text(json.dumps(config))
    return folder, mark


def test_python_of_a_checkpoint_is_not_run_and_nobody_is_asked(
    own_code: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, mark = own_code
    monkeypatch.setattr("builtins.input", lambda *a: pytest.fail("asked on stdin"))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        aoquant.load_pretrained(folder)
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        load_checkpoint(folder, "cpu")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"brings Python code of its own.*trust_remote_code=True"):
        load_float(str(folder), "auto", "cpu")
    with pytest.raises(ValueError, match=r"config\.json"):
        aoquant.convert_checkpoint(folder, "mxfp4", folder.parent / "out")
    assert not mark.exists()


def test_a_class_of_transformers_is_taken_in_place_of_a_checkpoints_own(own_code: tuple[Path, Path]) -> None:
    folder, mark = own_code
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "llama"
    (folder / "config.json").write_text(json.dumps(config))
    assert type(aoquant.load_pretrained(folder)) is transformers.LlamaForCausalLM
    assert not mark.exists()


@pytest.mark.parametrize("content", ["", "[]", "{}", "{", '{"logits_sha256": "x", "probe_ids": "y"}'])
def test_a_damaged_record_of_a_run_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / RESULTS).write_text(content)
    with pytest.raises(ValueError, match=RESULTS):
        evaluation(tmp_path, None, None, None, None)
    with pytest.raises(ValueError, match=RESULTS):
        check_fingerprint(LlamaForCausalLM(LlamaConfig(**SIZES)), tmp_path)


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(tmp_path / RESULTS, {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / RESULTS, {"b": object()})
    assert json.loads((tmp_path / RESULTS).read_text()) == {"a": 1}
    source = (ROOT / "aoquant/integrations/job/result.py").read_text()
    assert "write_json(folder / RESULTS" in source and "json.dump" not in source


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("no-such-model", "asked for it"),
        ("someone/no-such_model.1", "asked for it"),
        ("some one/model", "a folder that exists, or a hub id"),
        ("a/folder/that/is/gone", "a folder that exists, or a hub id"),
    ],
)
def test_what_is_neither_a_folder_nor_an_id_is_not_looked_for(
    model: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*args: Any, **kwargs: Any) -> None:
        raise OSError("asked for it")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", ask)
    with pytest.raises(ValueError, match=said):
        load_float(model, "auto", "cpu")
