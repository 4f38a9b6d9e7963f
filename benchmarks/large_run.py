"""`aoquant run` at the shape of a large model, on all GPUs of a machine: time and memory of each stage.

    python benchmarks/large_run.py                      # 8b, 30b-a3b, and a run that is stopped and goes on
    python benchmarks/large_run.py 8b --layers 8 --recipe nvfp4

Weights are random, so perplexities mean nothing; prepared equals converted, and the checkpoint is loaded again, as in
any run. A shape has as many of its layers as fit by the run's own estimate, and the rows say how many. The command is
torchrun's; the stage "float, fine-tuned" is bf16 training by the same loop, and the ratio of QAT's tokens a second to
its is `of_bf16`. peak_GB is rank 0's.

    8b          Llama 3.1 8B
    30b-a3b     Qwen3 30B-A3B, whose experts are quantised too
    stopped     four layers of 8b without training embedding and head: SIGINT in QAT on all GPUs, then the same command
                in one process with the first GPU alone. steps: how many each of them trained

Rows are appended to benchmarks/results/large_run.csv. Models and runs stand in a temporary folder of --work, which
needs room for 6 bytes a parameter, and are removed. With --quick two processes on a CPU run tiny shapes, for the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from beside import Row, Table
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from aoquant.integrations import docstrings
from aoquant.integrations.finetune_checkpoints import NEWEST
from aoquant.integrations.job.needs import estimate
from aoquant.integrations.job.options import Options
from aoquant.integrations.text import assets

SHAPES = ("8b", "30b-a3b", "stopped")
TUNED, PREPARED = "float, fine-tuned", "QAT, prepared"
_POSITIONS = {"max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_8B: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "vocab_size": 128_256,
                       "num_key_value_heads": 8, "num_hidden_layers": 32}  # fmt: skip
_30B: dict[str, Any] = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "head_dim": 128,
                        "num_key_value_heads": 4, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
                        "vocab_size": 151_936}  # fmt: skip
_QUICK = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_attention_heads": 2,
          "num_key_value_heads": 1, "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64,
          "vocab_size": 8192}  # fmt: skip


def config_of(shape: str, layers: int | None, quick: bool) -> PreTrainedConfig:
    """Return the config of a shape."""
    kind, sizes = (Qwen3MoeConfig, _30B) if shape == "30b-a3b" else (LlamaConfig, _8B)
    sizes = {name: _QUICK[name] for name in sizes} if quick else dict(sizes)
    sizes["num_hidden_layers"] = layers or sizes["num_hidden_layers"]
    return kind(**sizes, **_POSITIONS, tie_word_embeddings=False, dtype="bfloat16")


def write_model(folder: Path, config: PreTrainedConfig, device: str) -> int:
    """Write random weights in bfloat16, a file a decoder layer; returns how many parameters they are."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, p in model.state_dict().items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        files.setdefault(f"layer-{layer[1]}" if layer else "rest", {})[name] = p
    index: dict[str, str] = {}
    torch.manual_seed(0)
    for file, tensors in files.items():
        made = {
            name: torch.randn(p.shape, dtype=p.dtype, device=device).mul_(0.02)
            if p.dim() > 1
            else torch.ones_like(p, device=device)
            for name, p in tensors.items()
        }
        save_file({name: t.cpu() for name, t in made.items()}, folder / f"{file}.safetensors", {"format": "pt"})
        index |= dict.fromkeys(made, f"{file}.safetensors")
    size = sum(p.nbytes for p in model.parameters())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    )
    return sum(p.numel() for p in model.parameters())


def write_config(folder: Path, config: PreTrainedConfig) -> None:
    """Write what a folder has beside weights. The tokenizer is that of the embedded model."""
    config.architectures = ["Qwen3MoeForCausalLM" if isinstance(config, Qwen3MoeConfig) else "LlamaForCausalLM"]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(assets()).save_pretrained(folder)


class Job:
    """Run `aoquant run` at one shape, in a folder of its own."""

    def __init__(self, o: argparse.Namespace, work: Path, shape: str) -> None:
        self.o, self.shape, self.work = o, shape, work
        self.model, self.out = work / "model", work / "run"
        for folder in (self.model, work / "text"):
            folder.mkdir()
        train, held_out = docstrings.write(work / "text")
        held_out.rename(work / "text" / "test.jsonl")
        ranks, block = o.ranks, 64 if o.quick else 1024
        self.options = Options(
            model=str(self.model), device=o.device, dtype="bfloat16", recipe=o.recipe, loss="ce", steps=o.steps,
            batch_size=4 * ranks, block=block, learning_rate=1e-5, train_text=[train], out=self.out,
            wikitext=str(work / "text"), window=block, limit=2 * ranks,
            freeze=["model.embed_tokens", "lm_head"] if shape == "stopped" else [],
        )  # fmt: skip

    def fit(self) -> int:
        """Write the config with as many layers as fit, or those that were asked for; returns their number."""
        most = config_of(self.shape, None, self.o.quick).num_hidden_layers
        if self.o.layers or self.shape == "stopped":
            most = min(most, self.o.layers or 4)
            write_config(self.model, config_of(self.shape, most, self.o.quick))
            return most
        fits, below = 0, most + 1
        while below - fits > 1:
            layers = most if below > most else (fits + below) // 2
            write_config(self.model, config_of(self.shape, layers, self.o.quick))
            needs = estimate(self.options, self.o.ranks)
            if needs is None:
                raise ValueError(f"{self.shape}: its memory cannot be estimated; give --layers")
            fits, below = (layers, below) if needs.needed < needs.available else (fits, layers)
        if not fits:
            raise ValueError(f"{self.shape}: no layer fits; {needs}")
        write_config(self.model, config_of(self.shape, fits, self.o.quick))
        return fits

    def command(self, launcher: list[str]) -> list[str]:
        """Return the command line of the run."""
        o = self.options
        more = [word for name in o.freeze for word in ("--freeze", name)]
        return [
            *launcher, "-m", "aoquant", "run", "--model", str(o.model), "--recipe", o.recipe, "--loss", "ce", *more,
            "--steps", str(o.steps), "--batch-size", str(o.batch_size), "--block", str(o.block), "--device", o.device,
            "--learning-rate", str(o.learning_rate), "--train-text", str(o.train_text[0]), "--wikitext",
            str(o.wikitext), "--window", str(o.window), "--limit", str(o.limit), "--dtype", "bfloat16",
            "--out", str(o.out),
        ]  # fmt: skip

    def run(self, launcher: list[str], stop: bool = False, **environment: str) -> None:
        """Run to the end, or to a signal after the first steps of QAT.

        Raises:
            ValueError: it failed; with its last lines.
        """
        command, began = self.command(launcher), time.monotonic()
        print(shlex.join(command), flush=True)
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | environment, start_new_session=True
        )
        late = threading.Timer(self.o.limit, process.terminate)  # torchrun ends its ranks
        late.start()
        last: list[str] = []
        stopped = False
        assert process.stderr is not None
        try:
            for line in process.stderr:
                last = [*last[-40:], line]
                print(f"{time.monotonic() - began:6.1f} s  {line}", end="", flush=True)
                if stop and not stopped and re.match(r"QAT [^:]*: [1-9]\d* of", line):
                    process.send_signal(signal.SIGINT)
                    stopped = True
            code = process.wait()
        finally:
            late.cancel()
            if process.poll() is None:  # this script was interrupted
                process.terminate()
                process.wait()
        saved = (self.out / "stages" / "QAT_prepared" / NEWEST).is_file()
        if not (saved if stopped else code == 0):
            raise ValueError(f"{self.shape}: exit code {code} after {time.monotonic() - began:.0f} s\n{''.join(last)}")

    def record(self) -> dict[str, Any]:
        """Return the run's record; of one that did not end, the stages that are done."""
        found: dict[str, Any] = {}
        if (path := self.out / "aoquant_run.json").is_file():
            found = json.loads(path.read_text())
        files = sorted((self.out / "stages").glob("*.json"), key=lambda file: file.stat().st_mtime)
        return found or {"stages": [s for s in (json.loads(file.read_text()) for file in files) if "perplexity" in s]}


def rows_of(record: dict[str, Any], columns: Row) -> list[Row]:
    """Return a row for each stage."""
    found = [
        columns
        | {"stage": s["name"], "seconds": s["seconds"], "peak_GB": s["peak_bytes"] / 1e9}
        | {"tokens_per_s": s["tokens_per_s"] or "", "of_bf16": "", "note": ""}
        for s in record["stages"]
    ]
    speed = {row["stage"]: row for row in found if row["tokens_per_s"]}
    if len(speed) == 2 and columns["shape"] != "stopped":  # which trained on other GPUs each
        speed[PREPARED]["of_bf16"] = speed[PREPARED]["tokens_per_s"] / speed[TUNED]["tokens_per_s"]
    if "finish_seconds" in record:
        verdict = f"prepared == converted: {record['min_sqnr_db']} dB; reloaded: {record['reload']}"
        last = {"stage": "checkpoint and report", "seconds": record["finish_seconds"]}
        last |= {"peak_GB": record["finish_peak_bytes"] / 1e9, "tokens_per_s": "", "of_bf16": "", "note": verdict}
        found.append(columns | last)
    return found


def measure(o: argparse.Namespace, shape: str, table: Table) -> None:
    """Run a shape and add its rows."""
    with tempfile.TemporaryDirectory(prefix="aoquant-large-", dir=o.work) as folder:
        job = Job(o, Path(folder), shape)
        layers, began = job.fit(), time.monotonic()
        parameters = write_model(job.model, config_of(shape, layers, o.quick), o.device)
        if o.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{shape}: {layers} layers, {parameters:,} parameters in {time.monotonic() - began:.0f} s", flush=True)
        columns: Row = {"shape": shape, "layers": layers, "parameters": parameters, "recipe": o.recipe}
        columns |= {"gpus": o.ranks, "batch": job.options.batch_size, "tokens": job.options.block, "steps": o.steps}
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(o.ranks)]
        try:
            if shape == "stopped":
                columns["gpus"] = f"{o.ranks}, then 1"
                job.run(ranks, stop=True, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="120")
                job.run([sys.executable], CUDA_VISIBLE_DEVICES="0" if o.device == "cuda" else "")
            else:
                job.run(ranks)
        finally:  # a run that fails or takes too long has done some stages
            for row in rows_of(job.record(), columns):
                table.add(row)


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", choices=[[], *SHAPES], help="default: all")
    parser.add_argument("--recipe", default="int4-g128")
    parser.add_argument("--layers", type=int, help="default: as many as fit")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="of one run")
    parser.add_argument("--work", type=Path, help="folder for models and runs; default: the system's")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "large_run.csv")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    o = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # which ends the run, too
    o.device = "cuda" if torch.cuda.is_available() and not o.quick else "cpu"
    o.ranks = torch.cuda.device_count() if o.device == "cuda" else 2
    table, failed = Table(o.out, torch.device(o.device)), 0
    for shape in o.shapes or SHAPES:
        try:
            measure(o, shape, table)
        except ValueError as error:  # the other shapes go on
            print(error, file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
