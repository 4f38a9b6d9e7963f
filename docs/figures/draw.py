"""The drawn figures of the documentation, as SVG text: `python docs/figures/draw.py` writes them beside this file.

Four are plots of files in benchmarks/results: recover.svg of recover_h200.csv (perplexity of float, PTQ and QAT),
bits.svg of experiments.csv (perplexity by bits a weight), gradients.svg of gradients.csv (what a backward costs each
layer) and mixes.svg of pretrain_mixes_h200.csv (what mixes cost in loss). tiers.svg shows the package's tiers,
operands.svg the six operands of a linear layer. Each has its own background, and colours for light and for dark, so it
can be read on any page. Text is drawn as text, so a reader can search and select it. The test suite compares the files
with what this script draws.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
RUNS, EXPERIMENTS, GRADIENTS, MIXES = (
    RESULTS / f"{name}.csv" for name in ("recover_h200", "experiments", "gradients", "pretrain_mixes_h200")
)
FAR = 3.0  # a PTQ so many times as far from float as the worst QAT, in log perplexity, lies beyond the axis
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2430 }
.small { font-size: 12px; fill: #566 } .head { font-size: 15px; font-weight: 600 } .code { font-family: ui-monospace, monospace }
.code.small { font-size: 11.5px }
.middle { text-anchor: middle } .end { text-anchor: end }
.page { fill: #fdfdfd; stroke: #d5d8de } .box { fill: #eef1f6; stroke: #aab2c0 } .warm { fill: #fbeedd; stroke: #d3a566 }
.cool { fill: #e3effa; stroke: #74a3cf } .line { stroke: #566; fill: none } .curve { fill: none; stroke-width: 1.6 }
.c0 { stroke: #3173b8 } .c1 { stroke: #2f9e77 } .c2 { stroke: #d98841 } .c3 { stroke: #b0508f } .c4 { stroke: #7a6bd0 } .c5 { stroke: #c2483d }
.line { stroke: #566; fill: none } .grid { stroke: #e1e4ea }
.float { fill: #9aa3b2 } .hollow { fill: none; stroke: #6b7484; stroke-width: 2 } .ptq { fill: #d98841 } .qat { fill: #3173b8 } .tip { fill: #566 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e8ee } .small { fill: #a9b0bd } .page { fill: #1c1f27; stroke: #3a3f4b }
.box { fill: #2a2f3a; stroke: #5b6475 } .warm { fill: #40321f; stroke: #a57d45 } .cool { fill: #1f3347; stroke: #4d7ba6 }
.line { stroke: #a9b0bd } .grid { stroke: #333946 } .tip { fill: #a9b0bd }
.float { fill: #7d8696 } .ptq { fill: #e09a58 } .qat { fill: #5b9bdc } }
"""


def text(x: float, y: float, content: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}">{escape(content)}</text>'


def rect(x: float, y: float, width: float, height: float, style: str, corner: float = 6) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{corner:g}" class="{style}"/>'


def line(x1: float, y1: float, x2: float, y2: float, style: str = "line", *, arrow: bool = False) -> str:
    tip = ' marker-end="url(#tip)"' if arrow else ""
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" class="{style}"{tip}/>'


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    marker = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        f'<defs>{marker}<path d="M0 0L8 4L0 8z" class="tip"/></marker></defs>',
        rect(0.5, 0.5, width - 1, height - 1, "page", 8),
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def perplexities() -> tuple[float, dict[str, dict[str, list[float]]]]:
    """(float's, recipe -> stage -> one number a run): distilled runs alone, cross entropy's are left out."""
    base, found = 0.0, defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
    with RUNS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            value = float(row["word_perplexity"])
            if row["stage"] == "float":
                base = value
            elif row["stage"] == "PTQ":
                found[row["recipe"]]["PTQ"] = [value]
            elif row["stage"] == "QAT" and row["loss"] == "kl":
                found[row["recipe"]]["QAT"].append(value)
    return base, found


def recover() -> str:
    """Bars, and a dot for each seed."""
    base, found = perplexities()
    low, high, left, right, top, bottom = 0.0, 190.0, 60, 700, 64, 290

    def y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    parts = [text(20, 30, "WikiText-2 word perplexity of a 4.85 M-parameter Llama (lower is better)", "head")]
    for tick in range(0, 181, 30):
        parts += [
            line(left, y(tick), right, y(tick), "grid"),
            text(left - 8, y(tick) + 4, str(tick), "small end"),
        ]
    for i, recipe in enumerate(("int4-g32", "nvfp4", "mxfp4")):
        centre = 170 + i * 210
        stages = [
            ("float", "float", [base]),
            ("PTQ", "ptq", found[recipe]["PTQ"]),
            ("QAT", "qat", found[recipe]["QAT"]),
        ]
        for j, (label, style, values) in enumerate(stages):
            x, value = centre - 84 + j * 58, mean(values)
            parts += [
                rect(x, y(value), 50, bottom - y(value), style, 2),
                text(x + 25, y(max(values)) - 8, f"{value:.1f}", "small middle"),
                text(x + 25, bottom + 16, label, "small middle"),
            ]
            if len(values) > 1:
                parts += [f'<circle cx="{x + 25}" cy="{y(v):.1f}" r="2.5" class="tip"/>' for v in values]
        parts.append(text(centre, bottom + 38, recipe, "middle code"))
    note = "QAT: 300 steps, distilled, then converted; mean of three seeds (dots). H200, 2026-11-20."
    parts.append(text(20, bottom + 64, note, "small"))
    return svg(740, 372, "Perplexity of float, PTQ and QAT", parts)


def bits() -> str:
    """bits.svg of the file in benchmarks/results."""
    with EXPERIMENTS.open(encoding="utf-8", newline="") as file:
        return bits_of(list(csv.DictReader(file)))


def bits_of(rows: list[dict[str, str]]) -> str:
    """A line for each of our recipes that was trained, fewest bits first: PTQ, QAT, and the QAT of torchao that it is
    compared with, along one axis of perplexity. A PTQ beyond the axis is an arrow with its number.
    """
    published = {r["row"]: r for r in rows if r["published"] == "True"}
    ours = [r for r in published.values() if r["plain"] == "True" and r["PTQ"]]
    ours.sort(key=lambda r: (float(r["bits"]), r["row"]))
    base, left, right, top = float(ours[0]["float"]), 200, 690, 84
    bottom = top + 34 * len(ours)
    theirs = [published.get(r["against"]) for r in ours]
    torchao = [r if r and r["kind"] == "torchao" else None for r in theirs]
    drawn = [*(r for r in torchao if r), *ours]
    high = math.log(max(float(r["QAT"]) for r in drawn) / base)
    near = [math.log(float(r["PTQ"]) / base) for r in ours]
    high = 1.04 * max(high, *(nats for nats in near if nats <= FAR * high), 1e-9)

    def x(perplexity: float) -> float:
        return left + math.log(perplexity / base) / high * (right - left)

    parts = [text(20, 30, "WikiText-2 word perplexity after quantisation, by bits a weight (lower is better)", "head")]
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100) if base * (math.exp(high) - 1) / s <= 8)
    for tick in range(math.ceil(base / step) * step, math.floor(base * math.exp(high)) + 1, step):
        parts += [
            line(x(tick), top - 16, x(tick), bottom, "grid"),
            text(x(tick), bottom + 18, str(tick), "small middle"),
        ]
    parts += [line(left, top - 16, left, bottom), text(left, top - 22, f"float {base:.1f}", "small middle")]
    for i, (r, other) in enumerate(zip(ours, torchao, strict=True)):
        y, after = top + 34 * i + 8, x(float(r["QAT"]))
        parts += [text(20, y + 4, r["row"], "code small"), text(184, y + 4, f"{float(r['bits']):.2f}", "small end")]
        if near[i] > high:
            parts += [
                line(after, y, right + 16, y, arrow=True),
                text(right + 16, y + 16, f"PTQ {float(r['PTQ']):.0f}", "small end"),
            ]
        else:
            before = x(float(r["PTQ"]))
            parts += [line(before, y, after, y), f'<circle cx="{before:.1f}" cy="{y}" r="4" class="ptq"/>']
        if other is not None:
            style = "hollow" if other["as prepared"] else "float"
            at = x(float(other["QAT"])) - 3
            parts.append(f'<rect x="{at:.1f}" y="{y - 9}" width="6" height="18" class="{style}"/>')
        parts.append(f'<circle cx="{after:.1f}" cy="{y}" r="5" class="qat"/>')
        parts.append(text(after, y - 9, f"{float(r['QAT']):.1f}", "small middle"))
    for i, (style, label) in enumerate((("ptq", "PTQ"), ("qat", "QAT, aoquant"))):
        parts.append(f'<circle cx="{left + i * 110}" cy="{bottom + 42}" r="5" class="{style}"/>')
        parts.append(text(left + 12 + i * 110, bottom + 46, label, "small"))
    parts.append(f'<rect x="{left + 250}" y="{bottom + 33}" width="6" height="18" class="float"/>')
    parts.append(text(left + 264, bottom + 46, "QAT, torchao, at the same budget", "small"))
    if any(r and r["as prepared"] for r in torchao):
        parts.append(f'<rect x="{left + 250}" y="{bottom + 57}" width="6" height="18" class="hollow"/>')
        parts.append(text(left + 264, bottom + 70, "the same, scored as prepared", "small"))
        bottom += 24
    return svg(740, bottom + 64, "Perplexity by bits a weight", parts)


def gradients() -> str:
    """dx and dW of each layer under each mix, in dB against float: a panel each, layers in the model's order."""
    found: dict[str, list[dict[str, str]]] = defaultdict(list)
    with GRADIENTS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            found[row["recipe"]].append(row)
    top, bottom, width, highest = 64, 300, 310, 60.0
    parts = [text(20, 30, "Gradients of a trained Llama's layers, SQNR against float in dB (higher is better)", "head")]
    for panel, (key, name) in enumerate((("dx_dB", "dx"), ("dW_dB", "dW"))):
        left = 50 + panel * 350
        for tick in range(0, 61, 10):
            y = bottom - tick / highest * (bottom - top)
            parts += [line(left, y, left + width, y, "grid"), text(left - 6, y + 4, str(tick), "small end")]
        for i, rows in enumerate(found.values()):
            step = width / (len(rows) - 1)
            points = " ".join(
                f"{left + j * step:.1f},{bottom - float(r[key]) / highest * (bottom - top):.1f}"
                for j, r in enumerate(rows)
            )
            parts.append(f'<polyline points="{points}" class="curve c{i}"/>')
        parts.append(
            text(left + width / 2, bottom + 20, f"{name}, layers from the first block to the last", "small middle")
        )
    for i, recipe in enumerate(found):
        x = 50 + i % 3 * 220
        y = bottom + 44 + i // 3 * 20
        parts += [line(x, y - 4, x + 24, y - 4, f"curve c{i}"), text(x + 32, y, recipe, "code small")]
    return svg(740, 380, "SQNR of dx and dW, layer by layer", parts)


def mixes() -> str:
    """Held-out loss less bf16's of the same seed, by tokens: the mean of the seeds, and its standard error."""
    with MIXES.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    loss = {(row["variant"], int(row["tokens"]), row["seed"]): float(row["held_out_loss"]) for row in rows}
    tokens, seeds = sorted({key[1] for key in loss}), sorted({key[2] for key in loss})
    left, right, top, bottom, most = 60, 520, 46, 306, 0.11

    def place(count: float, difference: float) -> tuple[float, float]:
        return left + (right - left) * count / tokens[-1], bottom - (bottom - top) * max(difference, -0.01) / most

    parts = [text(20, 30, "Held-out loss less bf16's, nats a token", "head")]
    for i in range(0, 12, 2):
        _, y = place(0, i / 100)
        parts += [line(left, y, right, y, "grid"), text(left - 8, y + 4, f".{i:02}", "small end")]
    for count in tokens:
        x, _ = place(count, 0)
        parts.append(text(x, bottom + 34, f"{count / 1e6:.0f} M", "small middle"))
    ends = []
    names = sorted({key[0] for key in loss} - {"bf16"}, key=lambda name: mean(loss[name, tokens[-1], s] for s in seeds))
    for i, name in enumerate(names):
        points = []
        for count in tokens:
            found = [loss[name, count, seed] - loss["bf16", count, seed] for seed in seeds]
            error = stdev(found) / math.sqrt(len(found))
            (x, low), (_, high), (_, y) = (place(count, mean(found) + sign * error) for sign in (-1, 1, 0))
            points.append((x, y))
            parts.append(line(x, low, x, high, f"curve c{i}"))
        parts.append(f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" class="curve c{i}"/>')
        ends.append((points[-1][1], i, name))
    y = bottom + 40.0
    for end, i, name in sorted(ends, reverse=True):  # from below, each label above the one before
        y = min(end, y - 16)
        parts += [line(right + 4, end, right + 20, y, f"curve c{i}"), text(right + 26, y + 4, name, "code small")]
    parts.append(text((left + right) / 2, bottom + 56, "tokens", "small middle"))
    return svg(740, 376, "Held-out loss of six mixes less bf16's", parts)


def tiers() -> str:
    rows = [
        ("4", "Edges", "cli   integrations/   export/", "Hugging Face, peft, lm-eval, engines, the command line", "warm"),
        ("3", "User surface", "config  quantize  calibrate  recipes  report/  planning/  targets/  tools/",
         "configs in, plans, comparisons out; speaks torchao", "cool"),
        ("2", "Layers", "files/   experts/   linear/   distributed/", "one page: the prepared layer and its packed tensor", "cool"),
        ("1", "Operations", "ops/   ops/gemm/   ops/triton/   csrc", "one schema, many backends, a router with reasons", "box"),
        ("0", "Numbers", "formats/   transforms/", "encode, decode, operand: torch alone", "box"),
    ]  # fmt: skip
    parts = [text(20, 30, "A file imports from its own tier and from lower ones", "head")]
    for i, (number, name, modules, what, style) in enumerate(rows):
        y = 48 + i * 66
        parts += [
            rect(20, y, 650, 56, style),
            text(38, y + 34, number, "head"),
            text(64, y + 23, name, "head"),
            text(64, y + 43, what, "small"),
            text(184, y + 23, modules, "code small"),
        ]
    parts += [line(700, 60, 700, 362, arrow=True), text(678, 394, "imports", "small")]
    return svg(740, 410, "The tiers of the package", parts)


def operands() -> str:
    """Three GEMMs in a row each: two operands, each of which may have a format, and what comes out."""
    rows = [
        ("fprop", "y = x Wᵀ", ("input  x", "along K"), ("weight  W", "along K"), "y", "K", "cool"),
        ("dgrad", "dx = dy W", ("grad_output  dy", "along N"), ("weight  Ŵ", "along N"), "dx", "N", "warm"),
        ("wgrad", "dW = dyᵀ x", ("grad_output  dy", "along M"), ("input  x̂", "along M"), "dW", "M", "warm"),
    ]
    parts = [
        text(20, 30, "Six operands, each with a format of its own", "head"),
        text(20, 50, "M tokens, N outputs, K inputs. x̂, Ŵ: the values that fprop multiplied, or the originals.", "small"),
    ]  # fmt: skip
    for i, (name, formula, first, second, out, axis, style) in enumerate(rows):
        y = 70 + i * 104
        parts += [text(20, y + 38, name, "head"), text(20, y + 58, formula, "code small")]
        for j, (what, along) in enumerate((first, second)):
            x = 130 + j * 180
            parts += [
                rect(x, y, 160, 84, style),
                text(x + 80, y + 24, what, "middle"),
                text(x + 80, y + 46, "transform, scale, round", "small middle"),
                text(x + 80, y + 66, f"quantised {along}", "small middle"),
            ]
        parts += [
            text(300, y + 47, "×", "middle"),
            line(470, y + 42, 500, y + 42, arrow=True),
            rect(504, y + 6, 150, 72, "box"),
            text(579, y + 30, f"GEMM sums over {axis}", "small middle"),
            text(579, y + 49, "then outer scales, bias" if i == 0 else "in float32", "small middle"),
            text(579, y + 68, "by the contract" if i == 0 else "straight through", "small middle"),
            line(654, y + 42, 684, y + 42, arrow=True),
            text(704, y + 47, out, "middle code"),
        ]
    return svg(740, 388, "The six operands of a linear layer", parts)


FIGURES = {
    "recover.svg": recover,
    "tiers.svg": tiers,
    "operands.svg": operands,
    "gradients.svg": gradients,
    "mixes.svg": mixes,
}
if EXPERIMENTS.exists():
    FIGURES["bits.svg"] = bits

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (HERE / name).write_text(draw(), encoding="utf-8")
