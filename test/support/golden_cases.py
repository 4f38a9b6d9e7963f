"""Models, configs and observations of the golden folders: `test/golden/make.py` writes them, `test_golden_folders.py`
loads them. Only public names of aoquant stand here, so that both run at any commit.

Numbers are made to be equal on every CPU. Weights are small integers times a power of two, embeddings are -1 or 1, the
activation function is ReLU, texts have one token and routers choose one expert: norms, softmax and gates are exact, and
what a matrix product adds up fits float32, or is far from a boundary of bf16's rounding. Vector width, the number
of threads and the order of a sum make no difference. `make.py --same` measures that.
"""

from __future__ import annotations

import hashlib
import json
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from support.export_cases import byte_level
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

import aoquant
from aoquant import (
    FP8WeightConfig,
    GridFlipFP4WeightConfig,
    Hadamard,
    HybridConfig,
    Int4WeightConfig,
    Int8WeightConfig,
    IntxWeightConfig,
    MXFP4WeightConfig,
    MXFP8WeightConfig,
    NVFP4WeightConfig,
    Packed4WeightConfig,
    PackedWeightConfig,
    QATConfig,
    calibrate,
    get_recipe,
    list_recipes,
    quantize_,
    quantized_model_init,
)
from aoquant.integrations.trainer import QATCallback

IDS = torch.tensor([[1], [2], [3], [5]])
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 32,
    "hidden_act": "relu",
    "rms_norm_eps": 2.0**-30,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "norm_topk_prob": True,
    "moe_intermediate_size": 128,
    "head_dim": 64,
}
# packed or run on a GPU alone: their folders hold codes, and nothing is computed
NOT_RUN_ON_CPU = ("torchao-fp8-block", "torchao-int4-g128", "torchao-fp8-int4-plain", "torchao-fp8-mslk")
NOT_PACKED_ON_CPU = ("torchao-int4-preshuffled", "torchao-int4-tile-packed", "torchao-fp8-int4")
# in the order that the kernels of one CPU read: no folder holds it
NOT_STORED = ("torchao-int4-cpu",)
# torchao's own arithmetic, and torch's products of float8, give other bits on other CPUs of one capability: their codes
# are compared by the bit, their outputs within a rounding
OF_THE_CPU = ("torchao-int8", "torchao's tensors", "fp8-hybrid", "delayed", "delayed-recent")
# torch 2.11 multiplies fp8 with a scale for each row on a GPU alone
RAISE_IN_TORCH_2_11 = ("torchao-fp8",)


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    g = torch.Generator().manual_seed(7)
    for name, p in model.named_parameters():
        if "embed" in name:
            p.copy_(torch.randint(0, 2, p.shape, generator=g) * 2 - 1)
        elif p.dim() == 1 and "norm" in name:
            p.fill_(1)
        elif p.dim() == 1:
            p.copy_(torch.randint(-24, 25, p.shape, generator=g) / 64)
        else:  # 8 different rows, times 1, 1/2 or 1/4: such a file compresses well
            rows = torch.arange(p.shape[-2])
            few = torch.randint(-24, 25, (*p.shape[:-2], 8, p.shape[-1]), generator=g)
            p.copy_(few[..., rows % 8, :] * 2.0 ** (-8.0 - (rows // 8 % 3).float()).unsqueeze(1))


def dense(**changes: Any) -> LlamaForCausalLM:
    """A Llama of one layer with biases, in bf16."""
    config = LlamaConfig(**(SIZES | {"attention_bias": True} | changes))
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    _fill(model)
    return model


def mixture() -> Qwen3MoeForCausalLM:
    """Stacked experts."""
    model = Qwen3MoeForCausalLM._from_config(Qwen3MoeConfig(**SIZES, **EXPERTS), dtype=torch.bfloat16).eval()
    _fill(model)
    return model


class Student(nn.Module):
    """Two linear layers with biases; returns its loss as the Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, dtype=torch.bfloat16), nn.Linear(128, 64, dtype=torch.bfloat16)
        _fill(self)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.down(torch.relu(self.up(x)))
        return {"loss": (y.double().square().sum() / 256).float(), "y": y}


class Texts(nn.Module):
    """An embedding tied to its head, and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
        self.bfloat16()
        _fill(self.middle)
        _fill(nn.ModuleDict({"embed": self.embed}))
        self.head = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.middle(self.embed(ids)))
        return y


def data(step: int) -> Tensor:
    """(16, 64) of -1, 0 and 1."""
    g = torch.Generator().manual_seed(step)
    return torch.randint(-1, 2, (16, 64), generator=g).bfloat16()


def model_for(recipe: str) -> Any:
    return mixture() if get_recipe(recipe).experts else dense()


def settle(model: Any, loop: Any) -> None:
    """Calibrate, where something is to be calibrated."""
    try:
        calibrate(model, loop)
    except ValueError as error:
        if "nothing to calibrate" not in str(error):
            raise


def prepared(recipe: str) -> Any:
    model = model_for(recipe)
    quantize_(model, get_recipe(recipe).prepare())
    settle(model, [IDS])
    return model


def converted(recipe: str) -> Any:
    if recipe in NOT_RUN_ON_CPU:
        model = model_for(recipe)
        quantize_(model, recipe)
        return model
    model = prepared(recipe)
    quantize_(model, QATConfig(step="convert"))
    return model


RECIPES = [r.name for r in list_recipes()]
PACKED = [name for name in RECIPES if name not in NOT_PACKED_ON_CPU]
STORED = [name for name in PACKED if name not in NOT_STORED]

_FP8 = {"dgrad_weight": "te-fp8-tensor", "wgrad_input": "te-fp8-tensor"}
_DY = {"dgrad_grad_output": "te-fp8-e5m2-tensor", "wgrad_grad_output": "te-fp8-e5m2-tensor"}
# training states: scales of every origin, a random backward, delayed scaling
TRAINED: dict[str, Callable[[], Any]] = {
    "dynamic": lambda: QATConfig("nvfp4"),
    "static": lambda: QATConfig(Int8WeightConfig(activation="int8-tensor-static"), scales="static"),
    "learned": lambda: QATConfig(Int8WeightConfig(activation="int8-tensor-static"), scales="learned"),
    "learned-groups": lambda: QATConfig("int3-g32", scales="learned"),
    "fitted": lambda: QATConfig("nvfp4-wush"),
    "fitted-mx": lambda: QATConfig("mxfp4-wush"),
    "static-outer": lambda: QATConfig("vllm-nvfp4"),
    "delayed": lambda: QATConfig("fp8-hybrid", backward=HybridConfig(**_FP8, **_DY, amax_history=4)),
    "delayed-recent": lambda: HybridConfig.fwd_bwd("te-fp8-tensor", "te-fp8-tensor", amax_history=2, amax_select="most_recent"),
    "random": lambda: get_recipe("nvfp4-training").prepare(seed=3),
    "quartet": lambda: QATConfig("quartet", seed=5),
    "quartet2": lambda: QATConfig("quartet2", seed=6),
    "fake": lambda: QATConfig(weight_config="intx4-g32", activation_config="int8-row"),
}  # fmt: skip
MASTERS = ("random", "dynamic")
EXPORTS = {
    "compressed-tensors": ("vllm-w4a16-g32", "vllm-fp8", "vllm-int8", "vllm-nvfp4", "vllm-mxfp4", "fp8-block", "mxfp8"),
    "modelopt": ("vllm-nvfp4", "vllm-fp8"),
    "gguf": ("gguf-q4_0", "gguf-q8_0", "mxfp4-weight"),
}


def student(name: str) -> Student:
    model = Student()
    quantize_(model, TRAINED[name]())
    settle(model, [data(0)])
    return model


def train(model: nn.Module, parameters: nn.Module, first: int, steps: int) -> list[float]:
    """Losses of steps of SGD. Its rate is a power of two: a step rounds once."""
    optimizer = torch.optim.SGD([p for p in parameters.parameters() if p.requires_grad], lr=2.0**-6)
    losses = []
    for step in range(first, first + steps):
        loss = model(data(step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def texts(recipe: str = "int4-g32") -> Texts:
    model = Texts()
    quantize_(model, QATConfig(recipe), lambda module, name: name in ("embed", "head", "middle"))
    return model


def trainer(folder: Path) -> Trainer:
    """Three steps of SGD, a checkpoint after each, fake quantisation from the second on."""
    model = Student()
    quantize_(model, TRAINED["random"]())
    options = TrainingArguments(
        str(folder), max_steps=3, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="steps", save_steps=1,
        optim="sgd", learning_rate=2.0**-6, lr_scheduler_type="constant", per_device_train_batch_size=16, seed=3,
        max_grad_norm=0.0, logging_steps=1, save_total_limit=9,
    )  # fmt: skip
    rows = [{"x": row} for step in range(3) for row in data(step)]
    run = Trainer(model, options, train_dataset=rows)
    QATCallback(fake_quant_after_n_steps=1).attach(run)
    return run


def exported(recipe: str, format: str, folder: Path) -> Path:
    """Without biases, which the first exporter dropped."""
    more = {"hidden_act": "silu", "rms_norm_eps": 1e-6} if format == "gguf" else {}  # llama.cpp has no ReLU
    model = dense(attention_bias=False, **more)
    quantize_(model, get_recipe(recipe).prepare())
    settle(model, [IDS])
    quantize_(model, QATConfig(step="convert"))
    return aoquant.export(model, folder, format, byte_level() if format == "gguf" else None)


CONFIGS: dict[str, Any] = {
    "NVFP4": NVFP4WeightConfig(),
    "NVFP4 static": NVFP4WeightConfig("static", 0.001, activation=None),
    "NVFP4 tiles": NVFP4WeightConfig(rule="four_over_six", metric="mae", tile=16, activation="fouroversix"),
    "NVFP4 Hadamard": NVFP4WeightConfig(transform=Hadamard(16, signs=0xA5C3)),
    "GridFlip": GridFlipFP4WeightConfig("search", 0.2, True, None),
    "MXFP4": MXFP4WeightConfig("floor"),
    "MXFP8": MXFP8WeightConfig("e5m2"),
    "FP8": FP8WeightConfig(granularity="block"),
    "Int4": Int4WeightConfig(32),
    "Int8": Int8WeightConfig(activation="int8-row"),
    "Intx": IntxWeightConfig(1, 32, mapping="asymmetric"),
    "Packed": PackedWeightConfig("intx5-row", None, "dequantize"),
    "Packed4": Packed4WeightConfig("nvfp4", "nvfp4", "aoquant"),
}


FORMATS = [
    *aoquant.list_formats(),
    *(
        "int4-tinygemm-hqq-g128",
        "intx4-g128-hqq",
        "intx3-g64-asym",
        "stretched2-g32",
        "high-precision",
        "mxfp4-sr",
        "nvfp4-sr",
    ),
    *("q4_0", "q4_1", "q8_0", "q8_0-x86", "fp8-row-vllm-reciprocal", "int8-row-vllm", "int8-row-vllm-reciprocal"),
    *("int8-tensor-static:0.02", "fp8-tensor-static:0.015625", "nvfp4-pow2", "ms-eden"),
]
# pickled objects that can be made again and compared with ==
THINGS: dict[str, Callable[[], Any]] = {
    "configs": lambda: CONFIGS,
    "training configs": lambda: {name: make() for name, make in TRAINED.items()},
    "formats": lambda: {name: aoquant.get_format(name) for name in FORMATS},
    "transforms": lambda: [Hadamard(16), Hadamard(32, signs=0x1F), aoquant.WUSH(16)],
    "casts": lambda: [aoquant.Cast("nvfp4"), aoquant.Cast("mxfp8", "forward")],
    "coverage": lambda: aoquant.coverage(student("dynamic")),
}


def pickled() -> Iterator[tuple[str, Any]]:
    """Return what users pickle: modules, tensors, configs, results; all classes of aoquant's that such pickles name.

    No `Masters`: unpickled in another process, theirs followed no optimizer. Their state_dict is what is saved.
    """
    for name in TRAINED:
        yield f"prepared {name}", student(name)
    yield "prepared Llama", quantized(dense(), "nvfp4-training", convert=False)
    yield "packed Llama", quantized(dense(), "nvfp4")
    yield "prepared embedding", texts()
    for recipe in ("mxfp4-experts", "quartet2"):
        yield f"prepared experts {recipe}", quantized(mixture(), recipe, convert=False).model.layers[0].mlp.experts
    for name in TRAINED:
        model = student(name)
        quantize_(model, QATConfig(step="convert"))
        yield f"packed {name}", model
    yield "torchao's tensors", torchaos()
    model = texts()
    quantize_(model, QATConfig(step="convert"))
    yield "packed embedding", model
    yield "packed tensor", model.middle.weight
    for recipe in ("mxfp4-experts", "int4-g32-experts"):
        experts = quantized(mixture(), recipe).model.layers[0].mlp.experts
        yield f"packed experts {recipe}", experts
        yield f"stack {recipe}", experts.gate_up_proj
    for name, make in THINGS.items():
        yield name, make()
    prepared = student("learned")
    yield "recipe", prepared.up.prepared.recipe
    yield "encoded", prepared.up.encode_weight()
    yield "scales", prepared.up.held_scales("weight")
    yield "report", aoquant.report(prepared, Student(), data(0), progress=False)


def torchaos() -> Student:
    model = Student()
    quantize_(model, QATConfig("torchao-int8-int4"))
    quantize_(model, QATConfig(step="convert"))
    return model


def quantized(model: Any, recipe: str, convert: bool = True) -> Any:
    quantize_(model, get_recipe(recipe).prepare())
    if convert:
        quantize_(model, QATConfig(step="convert"))
    return model


# ---- observations


def digest(t: Tensor) -> str:
    """dtype, shape and bytes of a tensor, and of every tensor that a subclass holds."""
    if is_traceable_wrapper_subclass(t):
        names, _ = t.__tensor_flatten__()
        return " ".join(f"{name}:{digest(getattr(t, name))}" for name in sorted(names))
    data = t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
    return f"{kind}{hashlib.sha256(data).hexdigest()[:16]}".replace(" ", "")


def state(model: nn.Module) -> dict[str, str]:
    return {name: digest(t) for name, t in model.state_dict().items() if isinstance(t, Tensor)}


@torch.no_grad()
def outputs(model: nn.Module, *args: Any) -> dict[str, Tensor]:
    """Return what every linear layer of the model gives in a forward, and what the model gives."""
    seen: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda m, i, y, name=name: seen.update({name: y}))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    y = model(*args)
    for hook in hooks:
        hook.remove()
    seen["model"] = y if isinstance(y, Tensor) else y["y"] if isinstance(y, dict) and "y" in y else y.logits
    return seen


def stack_output(experts: Any) -> Tensor:
    """Return what a stack of experts gives: text t goes to expert t % 2."""
    x = data(4)[:8].repeat(1, 2)
    for flag in ("_is_expert_parallel", "has_post_expert_norm"):
        # transformers 5.24 sets these where it builds its module, and cannot run one that an earlier version pickled
        vars(experts).setdefault(flag, False)
    with torch.no_grad():
        y: Tensor = experts(x, (torch.arange(8) % 2).view(8, 1), torch.ones(8, 1, dtype=torch.bfloat16))
    return y


def seen_of(loaded: Any) -> dict[str, str]:
    """State and outputs of an unpickled object, as far as it has them."""
    found: dict[str, Tensor]
    if isinstance(loaded, Student):
        found = outputs(loaded, data(4))
    elif isinstance(loaded, Texts | LlamaForCausalLM):
        found = outputs(loaded, IDS)
    elif isinstance(loaded, nn.Module) and hasattr(loaded, "down_proj"):
        found = {"experts": stack_output(loaded)}
    elif isinstance(loaded, nn.Module):
        found = {}
    elif isinstance(loaded, Tensor):
        return {"tensor": digest(loaded), "values": digest(loaded.dequantize())}
    else:
        return {"text": str(loaded)}
    return state(loaded) | {f"output {name}": digest(y) for name, y in found.items()}


def globals_of(file: Path) -> set[tuple[str, str]]:
    """(module, name) of every global that torch.save's pickle names."""
    with zipfile.ZipFile(file) as archive:
        name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
        found = [str(arg) for op, arg, _ in pickletools.genops(archive.read(name)) if op.name == "GLOBAL"]
    return {(module, name) for module, name in (entry.split(" ") for entry in found)}


def types_in(file: Path) -> set[str]:
    """Every `_type` of a config.json."""

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if "_type" in node:
                yield node["_type"]
            node = list(node.values())
        if isinstance(node, list):
            for value in node:
                yield from walk(value)

    return set(walk(json.loads(file.read_text())))


def keys(model: nn.Module) -> dict[str, str]:
    """Names of a state_dict, with dtypes and shapes."""
    return {
        n: f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}".replace(" ", "")
        for n, t in model.state_dict().items()
        if isinstance(t, Tensor)
    }


def masters_of(name: str) -> tuple[Student, Any]:
    model = Student()
    return model, quantized_model_init(model, TRAINED[name]())
