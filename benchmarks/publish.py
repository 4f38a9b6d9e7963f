"""From the files of benchmarks/results to the tables of docs, between pairs of marks.

    python benchmarks/publish.py      # writes every table below; a test compares the committed pages with the files

Times of a layer are divided by those of nn.Linear in the same rounds, and of a model by bf16's in the same run. No
number of a table is typed by hand. Sentences that repeat numbers are compared by the test, not written.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from statistics import mean

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "eval")]

import pages  # noqa: E402
import scaling  # noqa: E402
from scaling import RESULTS, ROOT, Rows, newest  # noqa: E402

from aoquant.tools.markdown import table, wrapped  # noqa: E402

LINEAR = "`nn.Linear`"
NAMES = {"torchao:int4": "torchao int4", "torchao:mxfp4": "torchao mxfp4", "torchao:fp8": "torchao fp8", "bf16": "bf16",
         "nn.Linear": LINEAR, "torchao tensorwise": "torchao Float8Linear, tensorwise",
         "torchao rowwise": "torchao Float8Linear, rowwise"}  # fmt: skip
SHAPES = ((2048, 2048), (2048, 8192), (8192, 2048), (4096, 4096), (4096, 14336), (14336, 4096))  # K, N
SERVED = ("int4-g128", "nvfp4-weight", "nvfp4", "fp8", "fp8-scaled-mm")
GOALS = (  # rows, shapes (none: those with K or N of 2048), goal
    (16, (4096, 4096), 1.9), (16, (14336, 4096), 1.9), *((m, shape, goal) for m in (32, 64)
      for shape, goal in (((4096, 4096), 1.3), ((4096, 14336), 1.7), ((14336, 4096), 1.7), (None, 1.7))),
    *((128, shape, 1.05) for shape in ((4096, 4096), (4096, 14336), (14336, 4096), None)),
)  # fmt: skip
TAKE = {  # rows: what a reader should take
    1: "4-bit weights", **dict.fromkeys((8, 16, 32, 64), "4-bit weights, activations in bf16"),
    128: "4-bit weights; `fp8-scaled-mm` for wide layers", 256: "`fp8-scaled-mm`; packed weights for their memory",
}  # fmt: skip


def rows(name: str, **wanted: str) -> list[Mapping[str, str]]:
    """Return the rows of a results file that have these columns. Comments of the file are left out."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as opened:
        lines = csv.DictReader(line for line in opened if line.strip() and not line.startswith("#"))
        return [row for row in lines if all(row[key].startswith(value) for key, value in wanted.items())]


def only(found: Rows, **wanted: str) -> Mapping[str, str]:
    """Return the one row that has these columns; raise ValueError where none has, or several have."""
    (row,) = (row for row in found if all(row[key] == value for key, value in wanted.items()))
    return row


def ratio(value: str | float) -> str:
    """Return two digits behind the point, without a zero before it."""
    return str(Decimal(str(value)).quantize(Decimal("0.01"), ROUND_HALF_UP)).removeprefix("0")


def named(variant: str) -> str:
    """Return a variant as pages show it."""
    return NAMES.get(variant, f"`{variant}`")


def training_step() -> str:
    """Return time and memory of a model's training step."""
    found = rows("model_train", hidden="4096")
    lines = []
    for variant in ("int4-g128", "nvfp4", "fp8", "fp8-hybrid", "torchao:int4", "torchao:fp8"):
        eager, compiled = (only(found, variant=variant, how=how) for how in ("eager", "compiled blocks"))
        cells = (ratio(row[key]) for key in ("of_bf16_time", "of_bf16_peak") for row in (eager, compiled))
        lines.append((named(variant), *cells))
    return table(("recipe", "time, eager", "layers compiled", "peak memory, eager", "layers compiled"), lines)


def gemma_step() -> str:
    """Return speed and memory of a step of Gemma 3 270M's shape over bf16's, on all hosts, by the newest commits."""
    kinds = ("eager 8 16", "compiled blocks 8 16", "compiled blocks, kernels alone 8 2", "eager 32 2")
    shown = ("8 x 2048", "layers compiled", "their kernels alone", "32 x 2048")
    of, lines = defaultdict[str, list[Mapping[str, str]]](list), []
    for row in rows("model_train", hidden="640", command="python "):
        if row["steps"] != "16" or row["commit"] in {"eager": ("f7c320ad", "0ab02f8a")}.get(row["how"], ("40bf5c3e",)):
            of[" ".join(row[key] for key in ("variant", "how", "batch", "steps"))].append(row)
    for name in ("int4-g128", "nvfp4", "mxfp4", "fp8"):
        speeds = [sorted({ratio(r["speed"]) for r in of[f"{name} {kind}"]}, key=float) for kind in kinds]
        shares = (ratio(of[f"{name} {kinds[i]}"][-1]["of_bf16_peak"]) for i in (0, 1, 3))
        lines.append((named(name), *(" to ".join(dict.fromkeys((s[0], s[-1]))) for s in speeds), *shares))
    return table(("recipe", *shown, *("peak memory, " + shown[i] for i in (0, 1, 3))), lines)


def fsdp2() -> str:
    """Return time and memory of a training step on two GPUs."""
    names = ("int4-g128", "nvfp4", "mxfp4", "mxfp8", "fp8", "torchao:int4", "torchao:mxfp4")
    found = [only(rows("model_fsdp2", date="2026-11-22", gpus="2"), variant=name) for name in names]
    lines = [(named(row["variant"]), ratio(row["of_bf16_time"]), ratio(row["of_bf16_peak"])) for row in found]
    return table(("recipe", "time", "peak memory"), lines)


def whole_8b(gpus: str) -> str:
    """Return tokens, time and memory of a step at the shape of 8B: on one GPU each model alone, on two in turns."""
    lines = []
    for row in rows("model_fsdp2", gpus=gpus, vocabulary="128256"):
        room = re.search(r"total capacity of ([\d.]+) GiB", row["note"])
        if ("--alone" in row["command"]) == (gpus == "1") and row["ms"]:
            time = "1" if row["variant"] == "bf16" else ratio(row["of_bf16_time"])
            tokens = float(row["tokens_per_s"]) * int(row["gpus"])
            lines.append((named(row["variant"]), f"{tokens:,.0f}", time, f"{float(row['peak_MiB']) / 1024:.1f}"))
        elif room:
            lines.append((f"{named(row['variant'])}, alone", "does not fit", "", f"more than {float(room[1]):.1f}"))
    return table(("recipe", "tokens/s", "time", "peak memory, GiB"), lines)


def conversion() -> str:
    """Return time and memory of converting a model."""
    found = [(named(r["variant"]), float(r["ms"]), float(r["peak_MiB"])) for r in rows("model_convert")]
    return table(
        ("recipe", "time", "memory beside the model"), [(n, f"{ms:.0f} ms", f"{mib:.0f} MiB") for n, ms, mib in found]
    )


def layer_step() -> str:
    """Return a layer's training step over nn.Linear's of the same rounds."""
    variants = ("int4-g128", "int8-int4", "mxfp4", "mxfp8", "nvfp4", "torchao-fp8")
    asked = [(shape, how, "ratio", f"{shape.replace(' ', ' x ').replace('K', '').replace('N', '')}, {how}")
             for how in ("eager", "compiled") for shape in ("K4096 N14336", "K4096 N4096")]  # fmt: skip
    asked.append(("K4096 N4096", "compiled", "one_thread_ratio", "the same, backward in the caller's thread"))
    found = rows("speed_layer")
    lines = [
        (title, *(ratio(only(found, shape=shape, how=how, variant=variant)[column]) for variant in variants))
        for shape, how, column, title in asked
    ]
    return table(("K x N", *map(named, variants)), lines)


def layer_host() -> str:
    """Return a layer's training step in milliseconds, beside nn.Linear's of the same rounds, with the host's time."""
    found, lines = rows("speed_layer", shape="K4096 N4096"), []

    def first(**wanted: str) -> Mapping[str, str]:
        return next(row for row in found if all(row[key] == value for key, value in wanted.items()))

    for variant in ("nn.Linear", "int4-g128", "nvfp4", "mxfp8", "mxfp4", "int8-int4", "torchao-fp8"):
        both = [first(variant=variant, how=how) for how in ("eager", "compiled")]
        beside = first(group=both[0]["group"], variant="nn.Linear", how="eager")
        cells = [f"{float(row['ms_p50']):.3f}" for row in (beside, *both)] + [ratio(row["ratio"]) for row in both]
        cells += [ratio(row["one_thread_ratio"]) for row in both]
        cells += [f"{float(row[key]):.2f}" for key in ("cpu_ms", "one_thread_cpu_ms") for row in both]
        lines.append((named(variant), *cells, *(f"{float(row['peak_MiB']):.0f}" for row in both)))
    heads = [
        word
        for name in ("ms", "ratio", "ratio, one thread", "host ms", "host ms, one thread", "MiB")
        for word in (f"{name}: eager", "compiled")
    ]
    return table(("", f"{LINEAR}, ms", *heads), lines)


def few_rows() -> dict[tuple[int, int, int], dict[str, tuple[float, float]]]:
    """Return {(K, N, M): {variant: (microseconds, bf16's time over it)}}."""
    found = {}
    for line in (RESULTS / "few_rows_h200.txt").read_text("utf-8").splitlines():
        if at := re.match(r"K(\d+) N(\d+) M(\d+) ", line):
            cells = re.findall(r"(\S+) ([\d.]+) \(([\d.]+)\)", line)
            found[int(at[1]), int(at[2]), int(at[3])] = {name: (float(us), float(of)) for name, us, of in cells}
    return found


def packed_layers() -> str:
    """Return bf16's time over that of packed layers with 4-bit weights."""
    found, counts = few_rows(), (1, 8, 16, 32, 64, 128, 256)
    shapes = ((4096, 4096), (4096, 14336), (14336, 4096), (2048, 2048))
    lines = [
        (f"`{variant}`, {k} x {n}", *(ratio(found[k, n, m][variant][1]) for m in counts))
        for variant in ("int4-g128", "nvfp4-weight")
        for k, n in shapes
    ]
    return table(("weights, K x N", "M = 1", *map(str, counts[1:])), lines)


def one_row() -> str:
    """Return the time of one row, and bf16's time over it."""
    found, variants = few_rows(), SERVED[:4]
    lines = [
        (f"{k} x {n}", f"{found[k, n, 1]['bf16'][0]:.1f}",
         *(f"{us:.1f} ({ratio(of)})" for us, of in (found[k, n, 1][v] for v in variants)))
        for k, n in SHAPES
    ]  # fmt: skip
    return table(("K x N", "bf16", *map(named, variants)), lines)


def goals() -> str:
    """Return bf16's time over that of layers with 16 to 128 rows; what meets its goal is bold."""
    found, lines = few_rows(), []
    for m, shape, goal in GOALS:
        line = [f"{m}, {f'{shape[0]} x {shape[1]}' if shape else 'K or N of 2048'}", f"{goal:g}"]
        for variant in SERVED[:4]:
            reached = [found[k, n, m][variant][1] for k, n in ([shape] if shape else SHAPES[:3])]
            words = " to ".join(dict.fromkeys((ratio(min(reached)), ratio(max(reached)))))
            line.append(f"**{words}**" if min(reached) >= goal else words)
        lines.append(line)
    return table(("rows, K x N", "goal", *map(named, SERVED[:4])), lines)


def batch_sizes() -> str:
    """Return bf16's time over the layer's for each number of rows, and what to take."""
    found, prefill = few_rows(), rows("model_prefill", date="2026-11-23T15", hidden="4096")
    lines = [
        (str(m), *(", ".join(ratio(found[4096, n, m][v][1]) for n in (4096, 14336)) for v in SERVED), take)
        for m, take in TAKE.items()
    ]
    prompt = (ratio(only(prefill, variant=variant)["speed"]) for variant in SERVED)
    lines.append(("4096, one prompt of a model", *prompt, "`fp8-scaled-mm`"))
    return table(("rows", *map(named, SERVED), "take"), lines)


HOSTED = ("nn.Linear", "int4-g128", "nvfp4", "fp8", "mxfp4", "fp8-hybrid", "nvfp4-training")


def host_calls() -> str:
    """Return the host's microseconds of a call of one row, from the newest run."""
    found, lines = rows("host", kind="host", rows="1"), []
    for variant in HOSTED:
        cells = []
        for shape in ("K1024 N1024", "K4096 N4096"):
            for call in ("no grad", "fixed weights", "packed"):
                last = [r for r in found if (r["shape"], r["variant"], r["call"]) == (shape, variant, call)][-1:]
                cells += [f"{float(row['us']):.0f}" for row in last] or [""]
        lines.append((named(variant), *cells))
    calls = ("prepared", "inside `fixed_weights`", "converted")
    return table(("", f"1024 x 1024: {calls[0]}", *calls[1:], f"4096 x 4096: {calls[0]}", *calls[1:]), lines)


def idle_steps() -> str:
    """Return a layer's step from an idle GPU to an idle GPU over nn.Linear's eager one, from the newest run."""
    found, lines = rows("host", kind="graph", shape="K4096 N4096"), []
    for variant in HOSTED:
        cells = ([r for r in found if (r["variant"], r["call"]) == (variant, how)][-1]["to_linear"] for how in
                 ("eager", "compiled", "graph"))  # fmt: skip
        lines.append((named(variant), *map(ratio, cells)))
    return table(("", "eager", "compiled", "in a CUDA graph"), lines)


def on_a_cpu(name: str) -> str:
    """Return time over bf16's and torchao's, and memory over bf16's."""
    found, lines = rows(name), []
    for model, about in (("llama-1024", "Llama, 4 layers of 1024"), ("demo-256", "demo model, 4 layers of 256")):
        for variant in ("int4-g128", "int8-int4", "int8"):
            cells = (
                ratio(only(found, part=part, model=model, variant=variant)[key])
                for part in ("generate", "prefill")
                for key in ("of_bf16", "of_torchao", "peak_of_bf16")
            )
            lines.append((f"{about}, {named(variant)}" if variant == "int4-g128" else named(variant), *cells))
    return table(("", "generate: bf16", "torchao", "memory", "prefill: bf16", "torchao", "memory"), lines)


def hybrid_step() -> str:
    """Return a hybrid layer's step over nn.Linear's of the same rounds; graphs over graphs."""
    found, lines = rows("speed_hybrid", date="2026-11-23T19"), []
    for variant in ("fp8-hybrid", "mxfp8-hp", "nvfp4-hp", "nvfp4-training", "mxfp8-nvfp4", "nvfp4-mxfp8",
                    "torchao tensorwise", "torchao rowwise"):  # fmt: skip
        cells = []
        for shape in ("K4096 N4096", "K4096 N14336"):
            of = {
                how: only(found, shape=shape, variant=variant, how=how)
                for how in ("eager", "compiled", "reduce-overhead")
            }
            beside = only(found, shape=shape, variant="nn.Linear", how="reduce-overhead")
            cells += [ratio(of["eager"]["ratio"]), ratio(of["compiled"]["ratio"])]
            cells += [ratio(float(of["reduce-overhead"]["ms_p50"]) / float(beside["ms_p50"]))]
        lines.append((named(variant), *cells))
    heads = [
        f"4096 x {n}, eager" if how == "eager" else how
        for n in (4096, 14336)
        for how in ("eager", "compiled", "graphs")
    ]
    return table(("", *heads), lines)


def gradients() -> str:
    """Return the errors of a trained model's gradients, means over its layers."""
    found = defaultdict(list)
    for row in rows("gradients"):
        found[row["recipe"]].append(row)
    order = ("fp8-hybrid", "mxfp8-hp", "nvfp4-hp", "mxfp8-nvfp4", "nvfp4-mxfp8", "nvfp4-training")
    columns = ("output_dB", "dx_dB", "dW_dB")
    lines = [(named(mix), *(f"{mean(float(row[c]) for row in found[mix]):.1f}" for c in columns)) for mix in order]
    return table(("mix", "y", "dx", "dW"), lines)


def transforms() -> str:
    """Return the time of encoding behind a Hadamard transform, over that without one."""
    found, lines = rows("speed_encode", shape="8192x4096"), []
    for form in ("mxfp4", "nvfp4"):
        plain, *others = (
            float(only(found, variant=f"encode {mix}{form}")["ms_p50"]) * 1e3
            for mix in ("", *(f"hadamard{size}+" for size in (16, 32, 64, 128)))
        )
        lines.append((f"{named(form)}, us", f"{plain:.1f}", *(f"{us:.1f} ({us / plain:.2f}x)" for us in others)))
    return table(("", "none", "16", "32", "64", "128"), lines)


def outer_scales() -> str:
    """Return what NVFP4's outer scale of the activations costs and brings; the newest row of each."""
    newest_of = {row["activations"]: row for row in rows("outer_scales")}
    lines = []
    for name, row in newest_of.items():
        errors = ["" if row[key] == "inf" else f"{float(row[key]):.2f}" for key in ("normal_dB", "outliers_dB")]
        moved = "" if name == "float32" else f"{float(row['moved']):.2f}".replace("0.00", "0")
        lines.append((named(name), *errors, f"{float(row['word_perplexity']):.1f}", moved))
    return table(("activations", "SQNR, normal", "with outliers", "perplexity", "logits moved by the batch"), lines)


def encoders() -> str:
    """Return the time of csrc's encoders and Triton's."""
    found, lines = rows("speed_encode", shape="4096x4096"), []
    for form, scale in (("fouroversix", "0.125"), ("gridflip", "0.125"), ("gridflip-sided", "0.125"),
                        ("gridflip-search", "0.125"), ("nvfp4-search", "0.0001")):  # fmt: skip
        cells = []
        for by in ("cuda", "triton"):
            for name in (f"{form}-static:{scale}", form):
                row = [r for r in found if r["variant"] == f"encode {name} ({by})"]
                cells.append(f"{float(row[0]['ms_p50']) * 1e3:.1f}" if row else "")
        lines.append((named(form), *cells))
    known = ("amax known", "with its amax")
    return table(("format", *(f"{by}, {way}" for by in ("csrc", "Triton") for way in known)), lines)


MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B", "gpt-oss-20b": "gpt-oss-20b", "mixtral": "Mixtral"}
TOKENS = ("1", "4", "16", "64", "4096")


def expert_row(**wanted: str) -> Mapping[str, str]:
    """Return the newest measured row of experts.

    Raises:
        ValueError: there is none.
    """
    if (row := newest(rows("moe"), **wanted)) is None:
        raise ValueError(f"results/moe.csv has no measured row with {wanted}: run benchmarks/moe.py")
    return row


def trained_experts(shape: str, variant: str) -> Mapping[str, str]:
    """Return the training step of a block."""
    return expert_row(variant=variant, shape=shape, part="train", what="block", tokens="8192")


def packed_experts(shape: str, variant: str, tokens: str) -> Mapping[str, str]:
    """Return the two products of packed experts."""
    return expert_row(variant=variant, shape=shape, part="decode", what="products", tokens=tokens)


def experts() -> str:
    """Return the table of experts with int4 weights, with the days of all its cells."""
    used, lines = list[Mapping[str, str]](), []
    for shape, name in MODELS.items():
        cells = [packed_experts(shape, "int4-g32", n) for n in TOKENS if n != "4"]
        step = trained_experts(shape, "int4-g32")
        lines.append((name, ratio(step["of_bf16_time"]), *(ratio(row["speed"]) for row in cells)))
        used += [step, *cells]
    heads = ("`int4-g32` experts of", "training step, 8192 tokens, time", "packed, speed: 1 token", "16", "64", "4096")
    devices, dates = (
        ", ".join(sorted({row[key][:length] for row in used})) for key, length in (("gpu", None), ("date", 10))
    )
    words = (
        f"Blocks of three models' shapes, over bf16 with `torch._grouped_mm`. {devices}, {dates}, `python benchmarks/moe.py` "
        "([rows](../../benchmarks/results/moe.csv), [all tables and what holds them back](../moe.md#all-experts-at-once)):"
    )
    return f"{wrapped(words)}\n\n{table(heads, lines)}"


def trained_blocks() -> str:
    """Return the training step of a block with experts, over bf16's."""
    variants = ("int4-g32", "mxfp4-weight", "mxfp4", "nvfp4", "fp8", "hf-eager")
    lines = [
        (name, *(ratio(trained_experts(shape, variant)["of_bf16_time"]) for variant in variants))
        for shape, name in MODELS.items()
    ]
    return table(("experts of", *map(named, variants[:-1]), "bf16, HF's eager"), lines)


def packed_products() -> str:
    """Return bf16's time over that of packed experts."""
    lines = [
        (name if variant == "int4-g32" else "", named(variant),
         *(ratio(packed_experts(shape, variant, n)["speed"]) for n in TOKENS))
        for shape, name in MODELS.items()
        for variant in ("int4-g32", "mxfp4-weight", "nvfp4-weight")
    ]  # fmt: skip
    return table(("experts of", "recipe", "1 token", *TOKENS[1:]), lines)


def exact_cells() -> dict[str, dict[str, list[str]]]:
    """Return {config: {"routed", "reference", "torchao": cells of all shapes and M, "kernel": kernels}}."""
    found = dict[str, dict[str, list[str]]]()
    config = ""
    for line in (RESULTS / "exactness_h200.txt").read_text("utf-8").splitlines():
        at = re.match(r"(.{27}) (.{14}) (routed|reference|torchao) +(.+)", line)
        if at:
            config = at[1].strip() or config
            cells, of = at[4].split(), found.setdefault(config, defaultdict(list))
            of[at[3]] += cells[:5]
            of["kernel"] += cells[5:]
    return found


def decibels(cells: Sequence[str]) -> list[float]:
    """Return the numbers among the cells."""
    return [float(cell) for cell in cells if cell[0].isdigit()]


def exactness() -> str:
    """Return prepared against converted for each config of torchao's, on the kernels that deploy."""
    lines = []
    for config, of in exact_cells().items():
        if not of["torchao"]:
            continue
        assert set(of["routed"]) <= {"=", "raises"}, config
        routed = "equal, every M and shape" if set(of["routed"]) == {"="} else "equal, where torchao's layer runs"
        plain, theirs = decibels(of["reference"]), decibels(of["torchao"])
        span = f"{min(theirs):.1f} to {max(theirs):.1f} dB" if theirs else ""
        lines.append((
            config, " ".join(f"`{kernel}`" for kernel in dict.fromkeys(of["kernel"])), routed,
            f"{min(plain):.1f} dB or more" if plain else "equal",
            span or ("refused" if "refused" in of["torchao"] else "equal"),
        ))  # fmt: skip
    heads = ("config", "kernel", "prepared against converted", "the same in plain PyTorch", "torchao's prepare")
    return table(heads, lines)


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("results", "training step"): training_step,
    ("results", "gemma step"): gemma_step,
    ("results", "fsdp2"): fsdp2,
    ("results", "8b, one GPU"): lambda: whole_8b("1"),
    ("results", "8b, two GPUs"): lambda: whole_8b("2"),
    ("results", "scaling"): lambda: scaling.page(rows("model_fsdp2"), rows("communication"), 4096, 16),
    ("results", "conversion"): conversion,
    ("results", "moe"): experts,
    ("../moe", "training step"): trained_blocks,
    ("../moe", "packed"): packed_products,
    ("results", "layer step"): layer_step,
    ("results", "packed layers"): packed_layers,
    ("exactness", "configs"): exactness,
    ("training-speed", "layer step"): layer_host,
    ("training-speed", "idle"): idle_steps,
    ("serving-speed", "host"): host_calls,
    ("serving-speed", "one row"): one_row,
    ("serving-speed", "goals"): goals,
    ("serving-speed", "batch sizes"): batch_sizes,
    ("serving-speed", "cpu"): lambda: on_a_cpu("cpu_generate"),
    ("serving-speed", "cpu, avx2"): lambda: on_a_cpu("cpu_generate_avx2"),
    ("serving-speed", "cpu, amx"): lambda: on_a_cpu("cpu_generate_amx"),
    ("backward-formats", "hybrid step"): hybrid_step,
    ("backward-formats", "gradients"): gradients,
    ("fp4-and-mx", "outer scales"): outer_scales,
    ("fp4-and-mx", "transforms"): transforms,
    ("cuda-kernels", "encoders"): encoders,
}  # fmt: skip


def sentences() -> Sequence[tuple[str, str]]:
    """Return (page, sentence) of what repeats numbers of a file: it has to stand there, whatever the line breaks."""
    step, sharded = rows("model_train", hidden="4096"), rows("model_fsdp2", layers="16", date="2026-11-23T06")

    def of(found: Rows, key: str, **wanted: str) -> str:
        return ratio(only(found, **wanted)[key])

    ours, theirs = (
        [of(step, key, variant=variant, how="eager") for key in ("of_bf16_time", "of_bf16_peak")]
        for variant in ("int4-g128", "torchao:int4")
    )
    hybrid = [of(step, "of_bf16_time", variant=variant, how=how)
              for variant in ("fp8-hybrid", "torchao:fp8") for how in ("eager", "compiled blocks")]  # fmt: skip
    fsdp = [of(sharded, "of_bf16_time", variant="fp8-hybrid", how=how, gpus=gpus)
            for how, gpus in (("eager", "2"), ("eager", "1"), ("compiled blocks", "1"))]  # fmt: skip
    everywhere = [value for of in exact_cells().values() for value in decibels(of["torchao"])]
    return (
        ("README.md", f"torchao 0.18's QAT is {min(everywhere):.0f} to {max(everywhere):.0f} dB from its kernels"),
        ("README.md", f"takes {ours[0]} of bf16's time and {ours[1]} of its peak memory in int4; torchao's takes "
                      f"{theirs[0]} and {theirs[1]}"),
        ("docs/evidence/backward-formats.md",
         f"`fp8-hybrid` {hybrid[0]}, compiled {hybrid[1]}; torchao's fp8 QAT {hybrid[2]}, compiled {hybrid[3]}"),
        ("docs/evidence/backward-formats.md",
         f"by FSDP2 on two GPUs: {fsdp[0]}, on one {fsdp[1]}, compiled {fsdp[2]}"),
    )  # fmt: skip


def page(name: str) -> Path:
    """Return the file of a page of evidence."""
    return ROOT / "docs" / "evidence" / f"{name}.md"


if __name__ == "__main__":
    for (name, mark), made in TABLES.items():
        pages.between(page(name), mark, made())
