"""A random Llama checkpoint of any size, written tensor by tensor, and one that is loaded whole, to compare with.

`python big_checkpoint.py MODEL OUT RECIPE MEGABYTES` converts MODEL under a limit on the process's own memory
(`limited`).
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import tempfile
from pathlib import Path

import torch
from support.models import llama_config
from transformers import AutoModelForCausalLM

from aoquant import cli
from aoquant.files.safetensors_file import reserve


def write(folder: Path, *, hidden: int, inner: int, layers: int, vocab: int) -> int:
    """Write a bf16 Llama with a shard per layer; returns its bytes."""
    config = llama_config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=vocab,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    folder.mkdir()
    config.save_pretrained(folder)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    del state["lm_head.weight"]
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in state.items():
        part = name.split(".")[2] if ".layers." in name else "rest"
        shards.setdefault(f"model-{part}.safetensors", {})[name] = tensor
    generator = torch.Generator().manual_seed(0)
    for file, tensors in shards.items():
        for place in reserve(folder / file, tensors, {"format": "pt"}).values():
            values = torch.randint(-0x7F7F, 0x7F7F, place.shape, dtype=torch.int16, generator=generator)
            place.write((values.float() * 2**-20).bfloat16())
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in shards.items() for name in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(t.numel() * t.dtype.itemsize for t in state.values())


def limited(model: str, out: str, recipe: str, megabytes: int) -> None:
    """Convert `model` with that much memory of the process's own, beyond the imports; then see that it does not load in
    that.

    The limit is RLIMIT_DATA: all private writable memory, in RAM or not, which is what cannot be given back when memory
    runs out; malloc fails at it. File pages, which can, and shared libraries do not count.
    """
    torch.set_num_threads(1)  # each has a stack
    with tempfile.TemporaryDirectory() as small, contextlib.redirect_stdout(io.StringIO()):
        write(Path(small) / "model", hidden=64, inner=64, layers=1, vocab=64)
        cli.main(["convert", "--model", f"{small}/model", "--recipe", recipe, "--out", f"{small}/out"])  # imports
    status = Path("/proc/self/status").read_text()
    used = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData"))
    limit = used + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    cli.main(["convert", "--model", model, "--recipe", recipe, "--out", out, "--max-shard-size", "10MB"])
    try:
        AutoModelForCausalLM.from_pretrained(model)
    except (MemoryError, RuntimeError) as error:
        print("whole:", "memory" in str(error) or isinstance(error, MemoryError))


if __name__ == "__main__":
    limited(*sys.argv[1:4], int(sys.argv[4]))  # type: ignore[call-arg]
