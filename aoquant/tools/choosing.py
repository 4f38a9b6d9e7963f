"""Which recipe for which engine, GPU and budget: docs/choosing.md's table, and `aoquant recipes --for "vllm h100"`.

A choice names the engine and the GPU by judgement of their kernels. The last columns are measured on a public model:
measured.csv's, which `eval/real_models` writes. They order the recipes of that model, and another model's gaps will be
others.
"""

import csv
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aoquant.tools.markdown import table

MEASURED = Path(__file__).with_name("measured.csv")
ANY = "any"
HEADS = ("you serve on", "and want", "recipe", "config", "bits", "PTQ / float", "QAT / float", "seeds")
_DEVICES = {
    "hopper": ("hopper", "h100", "h200", "h800", "h20", "gh200"),
    "ada": ("ada", "l4", "l40", "l40s", "4090", "rtx4090"),
    "ampere": ("ampere", "a100", "a10", "a30", "a6000", "3090", "rtx3090"),
    "blackwell": ("blackwell", "b100", "b200", "b300", "gb200", "gb300", "5090", "rtx5090"),
    "cpu": ("cpu", "x86", "x86-64", "amd64"),
    "arm": ("arm", "aarch64", "mac", "m1", "m2", "m3", "m4", "phone"),
}
_ENGINES = {
    "pytorch": ("pytorch", "torch", "aoquant"),
    "transformers": ("transformers", "hf", "huggingface"),
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "llama.cpp": ("llama.cpp", "llamacpp", "llama-cpp", "gguf", "ggml", "ollama"),
    "torchao": ("torchao", "ao"),
}
_MAKERS = ("nvidia", "geforce", "rtx", "tesla", "gpu")  # said in front of a GPU's name; alone, any of _GPUS
_FILLERS = ("and", "or", "on", "an", "a", "with", "for", "the")
_WITHOUT = {  # asked for, and without a row
    "AMD GPUs have no recipe yet": ("amd", "rocm", "mi300", "mi300x", "mi325x"),
    "TensorRT-LLM has no recipe yet": ("tensorrt", "tensorrt-llm", "trt-llm"),
    "Turing and older have no recipe: Ampere is the oldest": ("turing", "t4", "volta", "v100"),
}
_TYPO = 0.85  # similarity of a hint: "vlm" to "vllm" is above, "training" to "no-training" below
_BUDGETS = {"ptq": ("ptq", "untrained", "no-training", "calibration")}
_GPUS = ("hopper", "ada", "ampere", "blackwell")


@dataclass(frozen=True)
class Choice:
    """Hold one line. engines, devices: by the names above, or ANY. ptq: whether it needs no training: 8 bits, whose
    PTQ has at most 1.05 times the float model's word perplexity where it was measured.
    """

    where: str
    want: str
    recipe: str
    config: str
    engines: tuple[str, ...]
    devices: tuple[str, ...]
    ptq: bool = False

    def fits(self, engines: set[str], devices: set[str], ptq: bool) -> bool:
        """Return whether it is for one of each; an empty set asks for nothing."""
        of_engine = not engines or bool(engines & {*self.engines})
        of_device = not devices or ANY in self.devices or bool(devices & {*self.devices})
        return of_engine and of_device and (self.ptq or not ptq)


OWN = ("pytorch", "transformers")  # a packed tensor of ours runs wherever PyTorch does
CHOICES = (
    Choice("any CUDA GPU, or a CPU", "small weights, quality first", "int4-g32", "Int4WeightConfig(32)", OWN, (ANY,)),
    Choice("Hopper", "fast decoding, few tokens at a time", "int4-g128", "Int4WeightConfig(128)", OWN, ("hopper",)),
    Choice("Hopper", "speed with many tokens", "fp8-scaled-mm", 'PackedWeightConfig("fp8-row", "fp8-row", "fp8_scaled_mm")', OWN,
           ("hopper",), True),
    Choice("Blackwell", "FP4 tensor cores", "nvfp4", "NVFP4WeightConfig()", OWN, ("blackwell",)),
    Choice("Blackwell", "the same, with less error", "nvfp4-4over6",
           'NVFP4WeightConfig(rule="four_over_six", activation="fouroversix-row")', OWN, ("blackwell",)),
    Choice("Blackwell", "4-bit inputs behind a calibrated transform", "nvfp4-wush",
           "NVFP4WeightConfig(transform=WUSH(16))", OWN, ("blackwell",)),
    Choice("Blackwell, MX kernels", "MXFP4", "mxfp4-h32", "MXFP4WeightConfig(transform=Hadamard(32))", OWN, ("blackwell",)),
    Choice("nothing fixed yet", "FP4 of the least squared error", "gridflip-search",
           'GridFlipFP4WeightConfig("search")', OWN, (ANY,)),
    Choice("vLLM or SGLang, Ampere to Blackwell", "small weights, quality first", "vllm-w4a16-g32",
           'Packed4WeightConfig("intx4-g32", contract="dequantize")', ("vllm", "sglang", "transformers"), _GPUS),
    Choice("vLLM or SGLang, Ampere to Blackwell", "fast decoding, few tokens at a time", "vllm-w4a16-g128",
           'Packed4WeightConfig("intx4-g128", contract="dequantize")', ("vllm", "sglang", "transformers"), _GPUS),
    Choice("vLLM or transformers on a CPU", "small weights", "vllm-w4a16-g32",
           'Packed4WeightConfig("intx4-g32", contract="dequantize")', ("vllm", "transformers"), ("cpu",)),
    Choice("vLLM on Hopper, Ada or Blackwell", "speed with many tokens", "vllm-fp8",
           'PackedWeightConfig("fp8-row", "fp8-row-vllm")', ("vllm",), ("hopper", "ada", "blackwell"), True),
    Choice("vLLM on Ampere, Ada or Hopper", "speed with many tokens", "vllm-int8", 'PackedWeightConfig("int8-row", "int8-row-vllm")',
           ("vllm",), ("ampere", "hopper", "ada"), True),
    Choice("vLLM on Blackwell", "FP4 tensor cores", "vllm-nvfp4", 'Packed4WeightConfig("nvfp4-pow2", "nvfp4-pow2-static")',
           ("vllm",), ("blackwell",)),
    Choice("vLLM on Hopper", "FP4 weights, activations in bfloat16", "vllm-nvfp4-weight",
           'Packed4WeightConfig("nvfp4-pow2", contract="dequantize")', ("vllm",), ("hopper",)),
    Choice("vLLM on Blackwell", "MXFP4", "vllm-mxfp4", 'Packed4WeightConfig("mxfp4-even", "mxfp4-even")', ("vllm",), ("blackwell",)),
    Choice("llama.cpp on a CPU", "small weights", "gguf-q4_0", 'Packed4WeightConfig("q4_0", "q8_0-x86", "ggml")',
           ("llama.cpp",), ("cpu",)),
    Choice("llama.cpp on a CPU", "almost no loss", "gguf-q8_0", 'PackedWeightConfig("q8_0", "q8_0-x86", "ggml")',
           ("llama.cpp",), ("cpu",), True),
    Choice("a CPU", "PyTorch's int4 kernel", "torchao-int4-cpu", "PrototypeInt4WeightOnlyConfig()", ("pytorch", "torchao"), ("cpu",)),
    Choice("a CPU or a GPU", "integer products, `torch._int_mm`", "torchao-int8", "Int8DynamicActivationInt8WeightConfig()",
           ("pytorch", "torchao"), (ANY,), True),
    Choice("ARM kernels that pack torchao's codes", "int4 weights, int8 activations", "torchao-int8-int4",
           "Int8DynamicActivationIntxWeightConfig(torch.int4, PerGroup(32))", ("pytorch", "torchao"), ("arm",)),
    Choice("torchao's MSLK int4 kernels, Hopper", "torchao's checkpoint", "torchao-int4-g128", "Int4WeightOnlyConfig()",
           ("torchao",), ("hopper",)),
    Choice("torchao's fp8 kernels, Hopper or Ada", "torchao's checkpoint", "torchao-fp8",
           "Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())", ("torchao",), ("hopper", "ada"), True),
    Choice("any", "FP4 in training as well", "quartet2", 'QATConfig(base, backward="quartet2")', OWN, (ANY,)),
    Choice("Ada, Hopper or Blackwell", "FP8 tensor cores in training as well", "fp8-hybrid", 'QATConfig("fp8-hybrid")', OWN,
           ("ada", "hopper", "blackwell")),
    Choice("any", "TransformerEngine's NVFP4 in training", "nvfp4-training", 'QATConfig("nvfp4-training")', OWN, (ANY,)),
    Choice("any", "experts alone in int4", "int4-g32-experts", 'QATConfig("int4-g32-experts")', OWN, (ANY,)),
    Choice("any", "experts alone in MXFP4", "mxfp4-experts", 'QATConfig("mxfp4-experts")', OWN, (ANY,)),
    Choice("vLLM, Ampere to Blackwell", "experts alone in int4", "vllm-w4a16-g32-experts", 'QATConfig("vllm-w4a16-g32-experts")',
           ("vllm", "transformers"), _GPUS),
    Choice("any", "almost no loss", "mxfp8", "MXFP8WeightConfig()", OWN, (ANY,), True),
    Choice("any", "almost no loss, integer codes", "int8", 'Int8WeightConfig(activation="int8-row")', OWN, (ANY,), True),
    Choice("any", "3 bits a weight", "int3-g32", "IntxWeightConfig(3, 32)", OWN, (ANY,)),
    Choice("any", "2 bits a weight", "int2-g32", "IntxWeightConfig(2, 32)", OWN, (ANY,)),
)  # fmt: skip


def find(asked: str) -> list[Choice]:
    """Return the choices for words such as "vllm h100" or "cpu ptq", in the order of the table.

    Raises:
        ValueError: a word that is no engine, device or budget, or no choice for all of them.
    """
    engines, devices, ptq, gpu = set[str](), set[str](), False, False
    for word in asked.lower().replace(",", " ").split():
        if kind := _kind(word, _ENGINES):
            engines.add(kind)
        elif kind := _kind(word, _DEVICES):
            devices.add(kind)
        elif _kind(word, _BUDGETS):
            ptq = True
        elif word in _MAKERS:
            gpu = True
        elif word not in _FILLERS:
            raise ValueError(_unknown(word))
    if gpu and not devices & {*_GPUS}:
        devices |= {*_GPUS}
    if not (engines or devices or ptq):
        raise ValueError(_unknown(asked))
    found = [choice for choice in CHOICES if choice.fits(engines, devices, ptq)]
    if not found:
        raise ValueError(_nothing_for(engines, devices, ptq))
    return found


def _nothing_for(engines: set[str], devices: set[str], ptq: bool) -> str:
    """Return why nothing fits: what each side has recipes for, without the other."""

    def fits(engine: str, among: set[str]) -> bool:
        return any(choice.fits({engine}, among, ptq) for choice in CHOICES)

    device = "a GPU" if devices == {*_GPUS} else " or ".join(d for d in _DEVICES if d in devices)
    asked = [e for e in _ENGINES if e in engines]
    served = [f"for {e}: {', '.join(d for d in _DEVICES if fits(e, {d})) or 'none'}" for e in asked]
    serving = f"for {device}: {', '.join(e for e in _ENGINES if fits(e, devices)) or 'none'}"
    together = f"{' or '.join(asked)} and {device} together{', without training' if ptq else ''}"
    return f"no recipe is for {together}; {'; '.join([*served, serving])}"


def _unknown(word: str) -> str:
    engines, devices = ", ".join(_ENGINES), ", ".join(_DEVICES)
    if why := _kind(word, _WITHOUT):
        return f"--for got {word!r}: {why}; engines: {engines}; devices: {devices}"
    known = [name for table in (_ENGINES, _DEVICES, _BUDGETS) for names in table.values() for name in names]
    near = ", ".join(difflib.get_close_matches(word, [*known, *_MAKERS], 3, _TYPO))
    hint = f" (near it: {near})" if near else ""
    return (
        f"--for takes an engine, a GPU or CPU, and ptq for no training, got {word!r}{hint}; "
        f"engines: {engines}; devices: {devices}"
    )


def _kind(word: str, table: Mapping[str, tuple[str, ...]]) -> str | None:
    return next((kind for kind, names in table.items() if word in names), None)


@dataclass(frozen=True)
class Measured:
    """A line of measured.csv: bits a weight, and word perplexities. qat: the mean over seeds, None where it was not
    trained. seeds: their number.
    """

    bits: float
    float_model: float
    ptq: float
    qat: float | None
    seeds: int


@cache
def measured(path: Path = MEASURED) -> dict[str, Measured]:
    """Return the lines of a file, by recipe."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = [line for line in file if not line.startswith("#")]
    found = dict[str, Measured]()
    for row in csv.DictReader(lines):
        bits, base, ptq = (float(row[name]) for name in ("bits", "float", "ptq"))
        qat = float(row["qat"]) if row["qat"] else None
        found[row["recipe"]] = Measured(bits, base, ptq, qat, int(row["seeds"]))
    return found


def source(path: Path = MEASURED) -> str:
    """Return the model, budget, device and date of measured.csv: its comment lines."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))


def rows(
    choices: list[Choice] | tuple[Choice, ...] = CHOICES,
    *,
    code: bool = True,
    numbers: Mapping[str, Measured] | None = None,
) -> list[tuple[str, ...]]:
    """Cells under `HEADS`; recipe and config as markdown's code where `code`. numbers: of measured.csv by default."""
    found = measured() if numbers is None else numbers
    mark = "`" if code else ""
    made: list[tuple[str, ...]] = []
    for c in choices:
        cells: tuple[str, ...] = ("not measured", "", "", "")
        if (m := found.get(c.recipe)) is not None:
            ptq, qat = (
                "" if value is None else f"{value / m.float_model:{'.3f' if value < 1e6 else '.1e'}}"
                for value in (m.ptq, m.qat)
            )
            cells = (f"{m.bits:.2f}", ptq, qat, str(m.seeds) if m.qat is not None else "")
        made.append((c.where, c.want, f"{mark}{c.recipe}{mark}", f"{mark}{c.config}{mark}", *cells))
    return made


def markdown(numbers: Mapping[str, Measured] | None = None) -> str:
    """Return the table of docs/choosing.md."""
    return table(HEADS, rows(numbers=numbers))
