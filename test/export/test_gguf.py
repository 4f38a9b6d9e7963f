"""GGUF files: ggml's types hold the trained numbers, transformers' own reader of GGUF finds model and tokenizer in
them, and fields of a config that llama.cpp computes otherwise are refused by name.

Windows, YaRN and scales of attention were tried with llama-cpp-python 0.3.36: above 31 dB from transformers with Q8_0
and random weights where written, below 17 dB where refused. The rest was read in llama.cpp.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from support.export_cases import byte_level, converted, llama, packed
from support.models import IDS, SMALL
from support.models import NARROW as NARROW_LLAMA
from support.models import llama as plain_llama
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from aoquant import PackedWeightConfig, QATConfig, calibrate, export, load_pretrained, quantize_, save_pretrained
from aoquant._messages import Lines
from aoquant.export import ggml_types, gguf_arch, gguf_file
from aoquant.export.targets import Unfit
from aoquant.formats import get_format
from aoquant.linear.recipe import LinearRecipe
from aoquant.linear.tensor import PackedTensor


def read(path: Path) -> dict[str, Any]:
    return {t.name: t for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize(
    ("name", "type"),
    [
        ("q4_0", Type.Q4_0),
        ("q4_1", Type.Q4_1),
        ("q8_0", Type.Q8_0),
        ("intx4-g32-sfloat16", Type.Q4_0),
        ("intx8-g128-sfloat16", Type.Q8_0),
        ("mxfp4", Type.MXFP4),
        ("nvfp4", Type.NVFP4),
    ],
)
def test_values_in_the_file_are_the_trained_ones(name: str, type: Type, tmp_path: Path) -> None:
    model = converted(PackedWeightConfig(name), dtype=torch.float32)
    tensors = read(export(model, tmp_path / "out", "gguf", byte_level()))
    # not permuted
    names = {"self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.down_proj": "ffn_down"}
    for layer in (0, 1):
        for ours, theirs in names.items():
            weight = packed(model)[f"model.layers.{layer}.{ours}"]
            found = tensors[f"blk.{layer}.{theirs}.weight"]
            assert found.tensor_type == type
            values = torch.from_numpy(gguf.quants.dequantize(found.data, type))
            if weight.per_tensor_scale is not None:
                outer = torch.from_numpy(tensors[f"blk.{layer}.{theirs}.scale"].data.copy())
                assert torch.equal(outer, weight.per_tensor_scale[0])
                e = weight.encoded._replace(outer=None)
                assert torch.equal(values, weight.weight_format.operand(e, torch.float32))
            else:
                assert torch.equal(values, weight.dequantize(torch.float32))


def block_values(name: str, w: torch.Tensor) -> tuple[Type, torch.Tensor, torch.Tensor]:
    """The ggml type of a weight in a format, what gguf's own decoder reads of its blocks, and our values."""
    format = get_format(name)
    p = PackedTensor.from_encoded(format.encode(w), LinearRecipe(None, format), torch.float32)
    stored = ggml_types.store(p)
    read = gguf.quants.dequantize(stored.tensors["weight"].numpy(), stored.scheme)
    return stored.scheme, torch.from_numpy(read), p.dequantize(torch.float32)


@pytest.mark.parametrize(
    ("name", "type"),
    [
        ("intx4-row-sfloat16", Type.Q4_0),
        ("intx4-g64-sfloat16", Type.Q4_0),
        ("intx8-row-sfloat16", Type.Q8_0),
        ("intx8-row-sfloat32", Type.Q8_0),
        ("int8-row", Type.Q8_0),
        ("intx4-g32-asym", Type.Q4_1),
        ("intx4-g64-asym-sfloat32", Type.Q4_1),
        ("intx4-row-asym-sfloat16", Type.Q4_1),
    ],
)
def test_scales_of_rows_and_zero_points_become_those_of_blocks(name: str, type: Type) -> None:
    """Values whose scales are powers of two, so that scales and minima are float16 numbers."""
    step = torch.tensor([[0.25], [1.0], [2.0], [0.5]])
    if "x4" in name:
        shift = torch.tensor([[0.0], [3.0], [11.0], [15.0]]) if "asym" in name else 8.0
        w = (torch.arange(128) % 16 - shift) * step
    else:
        w = (torch.arange(128) * 2 - 127.0).expand(4, 128) * step
        w[:, 0] = 127.5 * step[:, 0]
    found, read, wanted = block_values(name, w)
    assert found == type and torch.equal(read, wanted) and wanted.unique().numel() > 16


@pytest.mark.parametrize(
    ("name", "k", "said"),
    [
        ("intx4-g16", 128, "intx4-g16"),
        ("intx3-g32", 128, "intx3-g32"),
        ("int8-tensor", 128, "holds int8-tensor"),
        ("intx4-row-sfloat16", 48, "K = 48"),
        ("nvfp4", 96, "K = 96"),
        ("hadamard32-inverse+q4_0", 128, "hadamard32"),
    ],
)
def test_no_block_holds_other_groups_and_parts_of_blocks(name: str, k: int, said: str) -> None:
    with pytest.raises(Unfit, match=said):
        block_values(name, torch.randn(4, k))


LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": (LlamaConfig, {}),
    "llama3": (
        LlamaConfig,
        {"rope_parameters": LLAMA3},
    ),
    "mistral": (MistralConfig, {"sliding_window": None, "head_dim": 32}),
    "qwen2": (Qwen2Config, {}),
    # transformers' reader leaves Qwen3's head_dim out and takes 128 (../../upstream/README.md)
    "qwen3": (Qwen3Config, {"head_dim": 128}),
    "gemma2": (Gemma2Config, {"head_dim": 32, "query_pre_attn_scalar": 32}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 32, "query_pre_attn_scalar": 32, "num_hidden_layers": 2}),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_file_back(family: str, tmp_path: Path) -> None:
    """Names, permuted rows, norms and sizes: every weight of the model that transformers builds from the file alone."""
    kind, more = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**{**SMALL, **more}), dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += torch.randn_like(parameter) * 0.1
    quantize_(model, PackedWeightConfig("q8_0"))
    export(model, tmp_path / "out", "gguf", byte_level())
    if family == "llama3":  # transformers' reader leaves the factors out: they are compared with its own rotation
        factors = torch.from_numpy(read(tmp_path / "out" / "model.gguf")["rope_freqs.weight"].data.copy())
        plain = 10000.0 ** -(torch.arange(0, 32, 2) / 32)
        torch.testing.assert_close(plain / factors, model.model.rotary_emb.inv_freq, rtol=1e-6, atol=0)
        return
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32).eval()
    wanted, found = dict(model.named_parameters()), dict(again.named_parameters())
    assert wanted.keys() == found.keys()
    for name, w in wanted.items():
        values = w.dequantize() if name.removesuffix(".weight") in packed(model) else w
        if w.dim() == 1 and family.startswith(
            "gemma"
        ):  # 1 + w is rounded to float32, as the model rounds it in every forward
            values, found[name] = values + 1, found[name] + 1
        assert torch.equal(found[name], values), name
    for size in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert getattr(again.config, size) == pytest.approx(getattr(model.config, size)), size


def test_a_checkpoint_folder_gives_the_same_file(tmp_path: Path) -> None:
    model = converted(PackedWeightConfig("q4_0"))
    save_pretrained(model, tmp_path / "saved", byte_level())
    a = export(load_pretrained(tmp_path / "saved"), tmp_path / "a", "gguf", byte_level())
    b = export(tmp_path / "saved", tmp_path / "b", "gguf")
    assert a.read_bytes() == b.read_bytes()


def test_progress_names_the_tensors_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aoquant._messages.SECONDS", 0.0)
    monkeypatch.setattr(gguf_file, "bar", lambda total, label: Lines(total, label, "B"))  # as there is no terminal
    path = export(converted(PackedWeightConfig("q4_0")), tmp_path / "out", "gguf", byte_level())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("export: ")]
    named = [match[1] for line in lines if (match := re.search(r", tensor=([^,]+),", line))]
    assert {*named} == read(path).keys()


def test_layers_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    model = plain_llama(num_hidden_layers=11, attention_bias=False, **NARROW_LLAMA)
    quantize_(model, PackedWeightConfig("q8_0"))
    reader = gguf.GGUFReader(export(model, tmp_path / "out", "gguf", byte_level()))
    layers = [int(t.name.split(".")[1]) for t in reader.tensors if t.name.endswith(".attn_q.weight")]
    assert layers == list(range(11))
    general = {name: reader.fields[f"general.{name}"].contents() for name in ("file_type", "quantization_version")}
    assert general == {"file_type": gguf.LlamaFileType.MOSTLY_Q8_0, "quantization_version": gguf.GGML_QUANT_VERSION}


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ({"attn_q": Type.Q4_0, "ffn_up": Type.Q8_0}, "MOSTLY_Q8_0"),
        ({"attn_q": Type.Q4_0, "attn_k": Type.Q4_0, "attn_v": Type.Q4_0, "ffn_up": Type.Q8_0}, "MOSTLY_Q4_0"),
        ({"attn_q": Type.MXFP4, "ffn_up": Type.BF16}, "MOSTLY_MXFP4_MOE"),
        ({"attn_q": Type.NVFP4}, "MOSTLY_NVFP4"),
        ({"attn_q": Type.Q4_1}, "MOSTLY_Q4_1"),
    ],
)
def test_the_files_type_is_that_of_most_bytes_of_the_layers(layers: dict[str, Type], kind: str) -> None:
    entries = [gguf_file._Entry("token_embd.weight", "", "", (4096, 64), Type.Q8_0)]
    entries += [gguf_file._Entry(f"blk.0.{name}.weight", "", "", (64, 64), type) for name, type in layers.items()]
    assert gguf_file._file_type(entries) == gguf.LlamaFileType[kind]
    assert gguf_file._file_type(entries[:1]) == gguf.LlamaFileType.MOSTLY_Q8_0  # an embedding alone


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"(?s)q_proj: .*fp8-row.*gguf-q8_0"):
        export(converted("fp8-row"), out, "gguf", byte_level())
    with pytest.raises(ValueError, match=r"(?s)q_proj: .*float16"):
        export(converted("intx4-g32", dtype=torch.float32), out, "gguf", byte_level())
    with pytest.raises(ValueError, match="MixtralForCausalLM"):
        gguf_arch.find({"architectures": ["MixtralForCausalLM"]})
    with pytest.warns(UserWarning, match="bfloat16"):
        export(converted("intx4-g32"), out, "gguf", byte_level(), skip=["re:.*down_proj"])
    tensors = read(out / "model.gguf")
    assert (tensors["blk.0.ffn_down.weight"].tensor_type, tensors["blk.0.ffn_up.weight"].tensor_type) == (
        Type.BF16,
        Type.Q4_0,
    )


def test_a_tensor_that_gguf_has_no_name_for_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen2 has no norms of queries and keys: the file would hold another model."""
    monkeypatch.setitem(gguf_arch.ARCHITECTURES, "Qwen3ForCausalLM", gguf_arch.ARCHITECTURES["Qwen2ForCausalLM"])
    model = AutoModelForCausalLM.from_config(Qwen3Config(**SMALL, head_dim=32), dtype=torch.float32)
    quantize_(model, PackedWeightConfig("q8_0"))
    with pytest.raises(ValueError, match=r"gguf: qwen2 .*model\.layers\.0\.self_attn\.k_norm\.weight"):
        export(model, tmp_path / "out", "gguf", byte_level())
    assert not (tmp_path / "out").exists()


def exported_warnings(model: Any, out: Path) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as caught:
        export(model, out, "gguf", byte_level())
    return [str(w.message) for w in caught]


def test_activations_that_were_not_trained_are_said_once(tmp_path: Path) -> None:
    """A file without activations is computed with Q8_0 ones; the notes of layers with other scales are one."""
    [said] = exported_warnings(converted("q4_0"), tmp_path / "weights")
    assert "14 layers, such as model.layers.0" in said
    assert exported_warnings(converted(PackedWeightConfig("q4_0", "q8_0-x86")), tmp_path / "q8_0") == []
    model = llama()
    quantize_(model, QATConfig(PackedWeightConfig("q8_0", "int8-tensor-static"), step="prepare"))
    calibrate(model, [IDS])
    quantize_(model, QATConfig(step="convert"))
    [said] = exported_warnings(model, tmp_path / "static")
    assert "int8-tensor-static (14 layers" in said
    assert len(exported_warnings(converted("intx4-g32"), tmp_path / "unrounded")) == 2


GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 4}
NARROW = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 4}  # SMALL's width by its heads is 32
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
SLIDING, GLOBAL = "sliding_attention", "full_attention"


def config(kind: Any, **more: Any) -> dict[str, Any]:
    """As export reads it from a model."""
    name = kind.__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    return {**json.loads(kind(**{**SMALL, **more}).to_json_string()), "architectures": [name]}


REFUSED = [
    (LlamaConfig, {"hidden_act": "gelu"}, "hidden_act='gelu' (llama.cpp: 'silu')"),
    # not "gelu": from transformers 5.18 or later on GemmaConfig makes "gelu_pytorch_tanh" of it, as llama.cpp does
    (GemmaConfig, {"head_dim": 32, "hidden_act": "relu"}, "hidden_act='relu' (llama.cpp: 'gelu_pytorch_tanh')"),
    (Qwen3Config, {"attention_bias": True}, "attention_bias=True (llama.cpp: False)"),
    (LlamaConfig, {"rope_parameters": {**YARN, "beta_fast": 4.0}}, "beta_fast=4.0 (llama.cpp: 32.0)"),
    (LlamaConfig, {"rope_parameters": {**YARN, "beta_slow": 2.0}}, "beta_slow=2.0"),
    (LlamaConfig, {"rope_parameters": {**YARN, "truncate": False}}, "truncate=False"),
    (Qwen2Config, {"rope_parameters": LLAMA3}, "rope_type='llama3'"),
    (LlamaConfig, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    (Gemma2Config, {**GEMMA, "query_pre_attn_scalar": 16}, "query_pre_attn_scalar=16 (llama.cpp: 32)"),
    (Gemma2Config, {**NARROW, "query_pre_attn_scalar": 32}, "query_pre_attn_scalar=32 (llama.cpp: 16)"),
    (Gemma2Config, {**NARROW, "num_hidden_layers": 46}, "query_pre_attn_scalar=16 (llama.cpp: 32)"),
    (Gemma3TextConfig, {**NARROW, "num_hidden_layers": 62}, "query_pre_attn_scalar=16 (llama.cpp: 32)"),
    (Gemma2Config, {**GEMMA, "layer_types": [GLOBAL, GLOBAL]}, "layer_types='all full_attention'"),
    (Gemma2Config, {**GEMMA, "attn_logit_softcapping": None}, "attn_logit_softcapping=None (llama.cpp: 50.0)"),
    (Gemma2Config, {**GEMMA, "final_logit_softcapping": None}, "final_logit_softcapping=None (llama.cpp: 30.0)"),
    (Gemma3TextConfig, {**GEMMA, "query_pre_attn_scalar": 16}, "query_pre_attn_scalar=16"),
    (Gemma3TextConfig, {**GEMMA, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
    (Gemma3TextConfig, {**GEMMA, "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    (Gemma3TextConfig, {**GEMMA, "rope_parameters": {SLIDING: PLAIN, GLOBAL: YARN}}, "rope_type='yarn'"),
    (Gemma3TextConfig, {**GEMMA, "rope_parameters": {SLIDING: LINEAR, GLOBAL: PLAIN}}, "sliding_attention='linear'"),
]


@pytest.mark.parametrize(
    ("kind", "more", "said"), REFUSED, ids=[f"{k.__name__}-{s.split('=')[0]}" for k, _, s in REFUSED]
)
def test_what_llama_cpp_computes_otherwise_is_refused_by_field(kind: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"llama\.cpp would compute another model than this") as caught:
        gguf_arch.find(config(kind, **more))
    assert said in str(caught.value) and str(caught.value).count("(llama.cpp:") == 1


def metadata(kind: Any, **more: Any) -> dict[str, Any]:
    return written(config(kind, **more))


def written(content: dict[str, Any]) -> dict[str, Any]:
    """The keys of the file, without the architecture's name."""
    found = gguf_arch.find(content)
    writer = gguf.GGUFWriter(None, found.name)
    gguf_arch.add_metadata(writer, found, content)
    return {name.partition(".")[2]: v.value for name, v in writer.kv_data[0].items()}


def test_sizes_are_those_of_the_config() -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6}
    wanted = {
        "architecture": "llama",
        "block_count": 3,
        "context_length": 72,
        "embedding_length": 96,
        "feed_forward_length": 160,
        "attention.head_count": 6,
        "attention.head_count_kv": 3,
        "attention.layer_norm_rms_epsilon": 3e-4,
        "attention.key_length": 48,
        "attention.value_length": 48,
        "rope.dimension_count": 48,
        "rope.freq_base": 5e5,
        "vocab_size": 200,
    }
    more = {"num_key_value_heads": 3, "max_position_embeddings": 72, "vocab_size": 200, "rms_norm_eps": 3e-4}
    rope = {"rope_parameters": {**PLAIN, "rope_theta": 5e5}}
    assert metadata(LlamaConfig, **sizes, **more, **rope, head_dim=48) == wanted
    content = config(LlamaConfig, **sizes, **more) | {"rope_theta": 5e5}  # as older releases of transformers wrote it
    for name in ("rope_parameters", "head_dim", "num_key_value_heads"):
        content.pop(name)
    assert written(content) == wanted | {
        "attention.head_count_kv": 6,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "rope.dimension_count": 16,
    }


def test_caps_are_those_of_the_config() -> None:
    keys = metadata(Gemma2Config, **GEMMA, attn_logit_softcapping=40.0, final_logit_softcapping=20.0)
    assert (keys["attn_logit_softcapping"], keys["final_logit_softcapping"]) == (40.0, 20.0)
    assert not [key for key in metadata(Gemma3TextConfig, **GEMMA) if "softcapping" in key]


def test_windows_and_rotations_that_gguf_has_keys_for_are_written() -> None:
    window, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    plain = metadata(Gemma3TextConfig, **GEMMA)
    assert plain[window] == 4 and pattern not in plain and plain["rope.freq_base_swa"] == 10000.0
    local = {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        GLOBAL: {"rope_type": "default", "rope_theta": 1e6},
    }
    other = metadata(Gemma3TextConfig, **GEMMA, layer_types=[GLOBAL, SLIDING], rope_parameters=local)
    assert other[pattern] == [False, True] and (other["rope.freq_base"], other["rope.freq_base_swa"]) == (1e6, 100.0)
    assert window not in metadata(Gemma3TextConfig, **GEMMA, layer_types=[GLOBAL, GLOBAL])
    assert metadata(Gemma2Config, **GEMMA, layer_types=[GLOBAL, SLIDING])[pattern] == [False, True]
    assert pattern not in metadata(Gemma2Config, **GEMMA)

    scaled = "rope.scaling.attn_factor"
    assert scaled not in metadata(LlamaConfig, rope_parameters=YARN)
    given = metadata(LlamaConfig, rope_parameters={**YARN, "attention_factor": 2.0})
    assert given[scaled] == pytest.approx(2 / (1 + 0.1 * math.log(4)))
    both = metadata(LlamaConfig, rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 2.0})
    assert both[scaled] == pytest.approx((1 + 0.07 * math.log(4)) / (1 + 0.2 * math.log(4)) / (1 + 0.1 * math.log(4)))
    assert scaled not in metadata(LlamaConfig, rope_parameters={**YARN, "mscale_all_dim": 2.0})
    every = {**YARN, "factor": 1.0, "attention_factor": 2.0, "mscale": 0.7, "mscale_all_dim": 2.0}
    assert metadata(LlamaConfig, rope_parameters=every)[scaled] == 2.0


@pytest.mark.parametrize(
    ("kind", "rope", "written"),
    [
        (Qwen2Config, LINEAR, {"type": "linear", "factor": 8.0}),
        (Qwen2Config, YARN, {"type": "yarn", "factor": 4.0, "original_context_length": 16}),
        (Gemma3TextConfig, {SLIDING: PLAIN, GLOBAL: LINEAR}, {"type": "linear", "factor": 8.0}),
    ],
)
def test_a_scaled_rotation_is_written(kind: Any, rope: Any, written: dict[str, Any]) -> None:
    keys = metadata(kind, **(GEMMA if kind is Gemma3TextConfig else {}), rope_parameters=rope)
    assert {k.removeprefix("rope.scaling."): v for k, v in keys.items() if "scaling" in k} == written


@pytest.mark.parametrize(
    ("kind", "layers", "scalar"), [(Gemma2Config, 46, 32), (Gemma2Config, 2, 16), (Gemma3TextConfig, 62, 32)]
)
def test_gemmas_scale_of_attention_is_taken_where_llama_cpp_has_it(kind: Any, layers: int, scalar: int) -> None:
    """Gemma's 27B models, known by their number of layers, scale by the width over the heads, others by head_dim."""
    assert (
        metadata(kind, **NARROW | {"num_hidden_layers": layers, "query_pre_attn_scalar": scalar})[
            "attention.key_length"
        ]
        == 16
    )


@pytest.mark.parametrize(
    ("kind", "given", "found"),
    [
        (Gemma2Config, {}, [True, False]),
        (Gemma3TextConfig, {"num_hidden_layers": 7}, [True] * 5 + [False, True]),
        (Qwen2Config, {"use_sliding_window": True, "max_window_layers": 1}, [False, True]),
        (Qwen2Config, {"use_sliding_window": False, "max_window_layers": 1}, [False, False]),
        (MistralConfig, {}, [True, True]),
        (MistralConfig, {"sliding_window": None}, [False, False]),
        (LlamaConfig, {}, [False, False]),
    ],
)
def test_windows_of_a_config_that_does_not_list_them(kind: Any, given: dict[str, Any], found: list[bool]) -> None:
    """Read configs that older releases of transformers wrote, without layer_types."""
    content = config(kind, **(GEMMA if kind in (Gemma2Config, Gemma3TextConfig) else {}))
    content |= {"layer_types": None, "sliding_window": 4} | given
    assert gguf_arch.windows(gguf_arch.find(content).arch, content) == found


@pytest.mark.parametrize(
    ("kind", "more"),
    [(MistralConfig, {"head_dim": 32}), (Qwen2Config, {"use_sliding_window": True, "max_window_layers": 1})],
)
def test_a_window_that_llama_cpp_does_not_know_bounds_the_context(kind: Any, more: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="the file's context length is the window, 4 of 64 tokens"):
        assert metadata(kind, **more, sliding_window=4)["context_length"] == 4
    assert metadata(kind, **more, sliding_window=64)["context_length"] == 64
    for other, sizes in ((LlamaConfig, {}), (Gemma2Config, GEMMA), (Gemma3TextConfig, GEMMA)):  # which it computes
        assert metadata(other, **sizes)["context_length"] == 64
