"""Decode over a quantised KV cache beside transformers' bf16 cache, and the cost of KV fake quantisation in training.

    python benchmarks/kv_decode.py [--formats fp8 ...] [--parts check attend step train] [--quick] [--out FILE]

Layers have the shape of Llama 3.1 8B (32 query heads, 8 key-value heads, head_dim 128), four of them, in bfloat16 with
random weights. Caches are filled directly. First the checks: the writer's bytes against the reference on the CPU, the
kernel's attention against float64, and `generate` of the prepared model against the converted one, by equality. A check
that fails ends the run. Then, in turns:

    attend  attention of one layer alone in a CUDA graph: the kernel, or F.scaled_dot_product_attention in bf16 with
            grouped queries, by flash-attention and by cuDNN
    step    one decoding step of the model, eager and in a CUDA graph. The bf16 cache has room for the new token too, so
            that no step copies it, and flash-attention, because cuDNN makes a plan for each new length
    train   forward and backward of the prepared model; ratio is its time over that of the float model

The ratio of attend and step is the fastest bf16 time over the row's. Rows go to benchmarks/results/kv_decode.csv as
they are made.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record_golden import versions
from run import interleaved, percentiles
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from aoquant import KVCacheConfig, QATConfig, quantize_
from aoquant.formats import get_kv_format
from aoquant.ops import kv

BF16, CUDA = torch.bfloat16, torch.device("cuda")
FORMATS = ("fp8", "fp8-token-head", "int8-token-head", "int4-token-head")
CELLS = ((1, 4096), (16, 32768))  # batch, tokens in the cache
HEADS, KV_HEADS, DIM, LAYERS = 32, 8, 128, 4
STEPS = 16  # of decoding, in one timed run
SCALE = 2.0**-5
BACKENDS = {"bf16 flash": SDPBackend.FLASH_ATTENTION, "bf16 cudnn": SDPBackend.CUDNN_ATTENTION}
UNMASKED = "sdpa_unmasked"
PARTS = ("check", "attend", "step", "train")
Row = dict[str, Any]


def model(layers: int = LAYERS, hidden: int = 4096) -> LlamaForCausalLM:
    """Return a float model with 8B's layers and a small vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=hidden // DIM, num_key_value_heads=hidden // DIM // 4, head_dim=DIM, pad_token_id=0,
        max_position_embeddings=1 << 17,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    with CUDA:
        return LlamaForCausalLM._from_config(config, dtype=BF16).eval()


def config_of(name: str) -> KVCacheConfig:
    """Return a config of the format, with a static scale where it takes one."""
    return KVCacheConfig(name, scale=SCALE) if get_kv_format(name).static else KVCacheConfig(name)


def scale_of(name: str) -> Tensor | None:
    return torch.tensor([SCALE], device=CUDA) if get_kv_format(name).static else None


def rows_of(batch: int, tokens: int) -> Tensor:
    """Return random keys or values (batch, heads, tokens, head_dim)."""
    return torch.randn(batch, KV_HEADS, tokens, DIM, device=CUDA, dtype=BF16)


def check_writer(name: str) -> Row:
    """Count the bytes and scales in which the GPU's writer and the reference on the CPU differ."""
    f, scale = get_kv_format(name), scale_of(name)
    x = rows_of(4, 2048) * torch.rand(4, KV_HEADS, 2048, 1, device=CUDA).exp2().to(BF16)
    packed, wanted = kv.pack(x, f, scale), f.pack(x.cpu(), None if scale is None else scale.cpu())
    n = f.row_bytes(DIM)
    differs = packed.cpu() != wanted
    read = f.unpack(packed, scale, BF16)
    assert torch.equal(kv.values(x, f, scale), read), f"{name}: fake quantisation is not what reading gives"
    return {"part": "writer", "format": name, "tokens": x.numel() // DIM, "differing": int(differs[..., :n].sum()),
            "of": wanted[..., :n].numel(), "differing_scales": int(differs[..., n:].any(-1).sum())}  # fmt: skip


def check_attention(name: str) -> Row:
    """Compare the kernel with float64 attention over the values that the bytes stand for."""
    f, scale = get_kv_format(name), scale_of(name)
    worst = 0.0
    for batch, tokens in ((1, 1), (2, 77), (1, 4096), (3, 1000)):
        q = torch.randn(batch, HEADS, 1, DIM, device=CUDA, dtype=BF16)
        packed = [kv.pack(rows_of(batch, tokens), f, scale) for _ in range(2)]
        got = kv.attend(q, packed[0], packed[1], f, f, scale, scale, None, DIM**-0.5)
        k, v = (f.unpack(p, scale, torch.float32).double().repeat_interleave(HEADS // KV_HEADS, 1) for p in packed)
        p = (q.double() @ k.mT * DIM**-0.5).softmax(-1)
        error = ((got.double() - (p @ v).transpose(1, 2)).abs() - 1e-6).clamp(min=0)  # a rotated 0 is 1e-8 or so
        worst = max(worst, (error / (p @ v.abs()).transpose(1, 2).clamp(min=1e-30)).max().item())
    bound = 2.0**-7  # of sum p |v|
    assert worst <= bound, f"{name}: attention differs by {worst} of sum p |v|, and {bound} was allowed"
    return {"part": "attention", "format": name, "error": worst, "bound": bound}


def check_generate(name: str) -> Row:
    """Compare prepared with converted: tokens and logits of `generate`, a padded batch included."""
    made = model(2, 1024)
    quantize_(made, QATConfig(config_of(name), step="prepare"))
    ids = torch.randint(1, 1024, (2, 40), device=CUDA)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0

    def run() -> list[Tensor]:
        found = []
        for m in (None, mask):
            out: Any = made.generate(
                ids,
                attention_mask=m,
                max_new_tokens=12,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            found += [out.sequences, torch.stack(out.logits)]
        return found

    before = run()
    quantize_(made, QATConfig(step="convert"))
    assert all(map(torch.equal, before, run())), f"{name}: converted generates other tokens or logits than prepared"
    return {"part": "generate", "format": name, "equal": True}


class Roomy(DynamicLayer):
    """Cache layer in bf16 that writes tokens into memory with room for more, as a packed cache does."""

    def __init__(self, keys: Tensor, values: Tensor, room: int = 1024) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        self.memory = [F.pad(t, (0, 0, 0, room)) for t in (keys, values)]
        self.keys, self.values = (m[:, :, : keys.shape[2]] for m in self.memory)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        used = self.keys.shape[2]
        end = used + key_states.shape[2]
        for memory, new in zip(self.memory, (key_states, value_states), strict=True):
            memory[:, :, used:end] = new
        self.keys, self.values = (m[:, :, :end] for m in self.memory)
        return self.keys, self.values


def filled(made: LlamaForCausalLM, name: str | None, batch: int, tokens: int) -> Any:
    """Return a cache with random tokens: bf16's, or a converted model's."""
    cache: Any = DynamicCache(config=made.config)
    for i in range(LAYERS):
        k, v = rows_of(batch, tokens), rows_of(batch, tokens)
        if name is None:
            cache.layers[i] = Roomy(k, v)
        else:
            f, scale = get_kv_format(name), scale_of(name)
            cache.update(kv.pack(k, f, scale), kv.pack(v, f, scale), i)
    return cache


def stepping(made: LlamaForCausalLM, cache: Any, batch: int) -> Callable[[], None]:
    ids = torch.ones(batch, 1, dtype=torch.long, device=CUDA)

    def run() -> None:
        with torch.no_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for _ in range(STEPS):
                made(ids, past_key_values=cache, use_cache=True)

    return run


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """Return the replay of a CUDA graph of run."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def peak(run: Callable[[], None]) -> int:
    """Return the bytes that a warm run takes at most, beyond what is there before."""
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_steps(formats: list[str], batch: int, tokens: int, rounds: int) -> list[Row]:
    """Time decoding steps, with the bytes of the caches and the peak of a step."""
    # in a CUDA graph transformers gives sdpa a mask, which flash-attention refuses; a function of another name has none
    ALL_ATTENTION_FUNCTIONS.register(UNMASKED, sdpa_attention_forward)
    floats = model()
    models: dict[str, LlamaForCausalLM] = {"bf16 flash": floats}
    for name in formats:
        models[name] = model()
        for own, shared in zip(models[name].parameters(), floats.parameters(), strict=True):
            own.data = shared.data
        quantize_(models[name], config_of(name))
    for made in models.values():
        made.config._attn_implementation = UNMASKED
    eager, stored, peaks = {}, {}, {}
    for name, made in models.items():
        cache = filled(made, None if made is floats else name, batch, tokens)
        stored[name] = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
        eager[name] = stepping(made, cache, batch)
        peaks[name] = peak(eager[name])
    rows = []
    # graphs first: eager steps may move a cache that has no room left, and a graph would go on with the old memory
    for part, runs in (("step graph", {n: captured(run) for n, run in eager.items()}), ("step eager", eager)):
        for row in timed(part, runs, batch, tokens, rounds):
            name = row["format"]
            more = {"cache_MiB": stored[name] / 2**20, "peak_MiB": peaks[name] / 2**20} if part == "step eager" else {}
            rows.append(row | {"tokens_per_s": 1e3 * batch / row["ms"]} | more)
    return rows


def timed(part: str, runs: dict[str, Callable[[], None]], batch: int, tokens: int, rounds: int) -> list[Row]:
    """Time runs of `STEPS` steps in turns; the fastest bf16 is what ratios compare with."""
    times = {name: [t / STEPS for t in percentiles(ts)] for name, ts in interleaved(runs, rounds).items()}
    base = min(p50 for name, (_, p50, _) in times.items() if name.startswith("bf16"))
    return [
        {"part": part, "format": name, "batch": batch, "tokens": tokens, "ms_p20": p20, "ms": p50, "ms_p80": p80, "ratio": base / p50}
        for name, (p20, p50, p80) in times.items()
    ]  # fmt: skip


def measure_attend(formats: list[str], batch: int, tokens: int, rounds: int) -> list[Row]:
    """Time attention of one query token in one layer."""
    q = torch.randn(batch, HEADS, 1, DIM, device=CUDA, dtype=BF16)
    copies = max(1, (200 << 20) // (batch * KV_HEADS * tokens * DIM * 2))  # beyond the L2 cache
    k, v = ([rows_of(batch, tokens) for _ in range(copies)] for _ in range(2))

    def plain(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            for i in range(STEPS):
                F.scaled_dot_product_attention(q, k[i % copies], v[i % copies], enable_gqa=True)

    runs: dict[str, Callable[[], None]] = {name: partial(plain, backend) for name, backend in BACKENDS.items()}
    moved = dict.fromkeys(runs, 2 * k[0].nbytes)
    for name in formats:
        f, scale = get_kv_format(name), scale_of(name)
        parts = [(kv.pack(a, f, scale), kv.pack(b, f, scale)) for a, b in zip(k, v, strict=True)]

        def run(f: Any = f, scale: Any = scale, parts: Any = parts) -> None:
            for i in range(STEPS):
                kv.attend(q, *parts[i % len(parts)], f, f, scale, scale, None, DIM**-0.5)

        runs[name], moved[name] = run, 2 * parts[0][0].nbytes
    rows = timed("attend", {name: captured(run) for name, run in runs.items()}, batch, tokens, rounds)
    return [row | {"GB/s": moved[row["format"]] / row["ms"] / 1e6} for row in rows]


def measure_training(formats: list[str], rounds: int) -> list[Row]:
    """Time forward and backward of one sequence of 4096 tokens, prepared against float."""
    ids = torch.randint(1, 1024, (1, 4096), device=CUDA)
    floats = model().train()

    def trains(made: LlamaForCausalLM) -> Callable[[], None]:
        def run() -> None:
            made.zero_grad(set_to_none=True)
            made(ids, labels=ids, use_cache=False).loss.backward()

        return run

    runs = {"bf16": trains(floats)}
    for name in formats:
        made = model().train()
        for own, shared in zip(made.parameters(), floats.parameters(), strict=True):
            own.data = shared.data
        quantize_(made, QATConfig(config_of(name), step="prepare"))
        runs[name] = trains(made)
    peaks = {name: peak(run) for name, run in runs.items()}
    times = interleaved(runs, rounds)
    base = percentiles(times["bf16"])[1]
    rows = []
    for name, ts in times.items():
        p20, p50, p80 = percentiles(ts)
        rows.append({"part": "train", "format": name, "batch": 1, "tokens": 4096, "ms_p20": p20, "ms": p50, "ms_p80": p80,
                     "ratio": p50 / base, "peak_MiB": peaks[name] / 2**20})  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results" / "kv_decode.csv")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("kv_decode.py needs a CUDA device")
    meta = versions(CUDA)
    print("\n".join(f"{key:12}{value}" for key, value in meta.items()) + "\n")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    rounds, began, rows = 5 if args.quick else 15, time.monotonic(), []

    def take(found: list[Row]) -> None:
        rows.extend(found)
        for row in found:
            cells = " ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
            print(f"{time.monotonic() - began:5.1f} s  {cells}", flush=True)
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with args.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*meta, *columns], lineterminator="\n")
            writer.writeheader()
            writer.writerows(
                meta | {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows
            )
        torch.cuda.empty_cache()

    for name in args.formats if "check" in args.parts else ():
        take([check_writer(name)])
        take([check_attention(name)])
        take([check_generate(name)])
    for batch, tokens in CELLS:
        if "attend" in args.parts:
            take(measure_attend(args.formats, batch, tokens, rounds))
        if "step" in args.parts:
            take(measure_steps(args.formats, batch, tokens, rounds))
    if "train" in args.parts:
        take(measure_training(args.formats, rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
