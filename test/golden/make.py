"""Write the golden folders of the commit that is checked out: what users have on disk, and what it gives.

`python test/golden/make.py OUT.tar.xz` writes them and `test/model/test_golden_folders.py` loads every archive in this
folder, made at whichever commit, for ever. To make them with the code of an older commit, let PYTHONPATH begin with a
checkout of it. `python test/golden/make.py --same OTHER.tar.xz` makes them again and names what differs: run it under
ATEN_CPU_CAPABILITY, MKL_CBWR and ONEDNN_MAX_CPU_ISA to see that numbers are no CPU's own.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from safetensors.torch import load_file, save_file
from support import golden_cases as cases
from torchao.core.config import config_to_dict
from transformers import AutoModelForCausalLM

import aoquant
from aoquant import QATConfig, quantize_


def make(root: Path) -> dict[str, Any]:
    """Write every folder and file under `root`; returns what is expected of them."""
    expected: dict[str, Any] = {"cpu": torch.backends.cpu.get_cpu_capability(), "torch": torch.__version__}
    logits: dict[str, torch.Tensor] = {}
    expected["recipes"] = {}
    for recipe in cases.STORED:
        folder = root / "recipes" / recipe
        aoquant.save_pretrained(cases.converted(recipe), folder)
        expected["recipes"][recipe] = loaded = see_folder(folder, recipe not in cases.NOT_RUN_ON_CPU)
        if "outputs" in loaded:
            logits[recipe] = loaded.pop("logits")
    expected["keys"] = {}
    for recipe in cases.RECIPES:
        found = expected["keys"][recipe] = {}
        if recipe not in (*cases.NOT_RUN_ON_CPU, *cases.NOT_PACKED_ON_CPU):
            found["prepared"] = cases.keys(cases.prepared(recipe))
        if recipe in cases.PACKED:
            found["converted"] = cases.keys(cases.converted(recipe))
    expected["trained"] = {}
    for name in cases.TRAINED:
        model = cases.student(name)
        before = cases.train(model, model, 0, 2)
        save(model.state_dict(), root / "trained" / f"{name}.pt")
        at = cases.state(model)
        after = cases.train(model, model, 2, 2)
        expected["trained"][name] = {"before": before, "state": at, "after": after, "end": cases.state(model)}
        quantize_(model, QATConfig(step="convert"))
        save(model.state_dict(), root / "converted" / f"{name}.pt")
        expected["trained"][name]["converted"] = cases.seen_of(model)
    expected["masters"] = {}
    for name in cases.MASTERS:
        model, masters = cases.masters_of(name)
        cases.train(model, masters, 0, 2)
        save(masters.state_dict(), root / "masters" / f"{name}.pt")
        at = cases.state(masters)
        expected["masters"][name] = {
            "state": at, "after": cases.train(model, masters, 2, 2), "end": cases.state(masters)
        }  # fmt: skip
    expected["exports"] = {}
    for format, recipes in cases.EXPORTS.items():
        for recipe in recipes:
            out = cases.exported(recipe, format, root / "exports" / format / recipe)
            found = expected["exports"][f"{format}/{recipe}"] = see_export(out, format)
            if "logits" in found:
                logits[f"{format}/{recipe}"] = found.pop("logits")
    expected["trainer"] = train(root / "trainer")
    expected["pickles"], names = {}, set()
    for name, thing in cases.pickled():
        file = root / "pickles" / f"{name}.pt"
        save(thing, file)
        expected["pickles"][name] = cases.seen_of(torch.load(file, weights_only=False))
    for file in root.rglob("*.pt"):
        names |= {entry for entry in cases.globals_of(file) if entry[0].split(".")[0] == "aoquant"}
    expected["globals"] = sorted(names)
    expected["types"] = sorted(set().union(*(cases.types_in(f) for f in root.rglob("config.json"))))
    expected["configs"] = {name: config_to_dict(config) for name, config in cases.CONFIGS.items()}
    save_file({k: v.contiguous() for k, v in logits.items()}, root / "logits.safetensors")
    (root / "expected.json").write_text(json.dumps(expected, indent=1, default=str))
    return expected


def see_folder(folder: Path, runs: bool) -> dict[str, Any]:
    model = aoquant.load_pretrained(folder)
    found: dict[str, Any] = {"state": cases.state(model)}
    if runs:
        seen = cases.outputs(model, cases.IDS)
        found |= {"logits": seen["model"].clone(), "outputs": {name: cases.digest(y) for name, y in seen.items()}}
    return found


def see_export(out: Path, format: str) -> dict[str, Any]:
    """compressed-tensors: as `load_pretrained` reads it. gguf: as transformers does. modelopt: its tensors."""
    if format == "compressed-tensors":
        return see_folder(out, True)
    if format == "gguf":
        return {"state": cases.state(AutoModelForCausalLM.from_pretrained(out.parent, gguf_file=out.name))}
    return {"state": {name: cases.digest(t) for name, t in load_file(out / "model.safetensors").items()}}


def save(thing: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(thing, file)


def train(folder: Path) -> dict[str, Any]:
    """A run that stops after its second step; what it is after the third."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as elsewhere:
        os.chdir(elsewhere)  # the Trainer writes its folder's name into its files
        run = cases.trainer(Path("run"))
        run.train()
        os.chdir(here)
        folder.mkdir(parents=True)
        (Path(elsewhere) / "run" / "checkpoint-2").rename(folder / "checkpoint-2")
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    return {"losses": losses, "end": cases.state(run.model)}


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for key in sorted({*a, *b}) for d in differences(a.get(key), b.get(key), f"{path}/{key}")]
    return [] if a == b else [path]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(Path(aoquant.__file__).parent, torch.__version__, torch.backends.cpu.get_cpu_capability())
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "golden"
        root.mkdir()
        expected = json.loads(json.dumps(make(root), default=str))
        if sys.argv[1] == "--same":
            with tarfile.open(sys.argv[2]) as archive:
                before = json.loads(archive.extractfile("expected.json").read())  # type: ignore[union-attr]
            print(*differences(before, expected), sep="\n")
            return
        with lzma.open(sys.argv[1], "wb", preset=9 | lzma.PRESET_EXTREME) as packed, tarfile.open(
            fileobj=packed, mode="w"
        ) as archive:  # fmt: skip
            for file in sorted(root.rglob("*"), key=lambda f: (f.suffix, f.name, str(f))):
                if file.is_file():
                    archive.add(file, str(file.relative_to(root)), filter=anonymous)
    print(Path(sys.argv[1]).stat().st_size, "bytes")


def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    main()
