"""Run by llama.cpp's own Python, without torch and aoquant: what ggml finds in a file and computes from it.

    python in_llama_cpp.py FOLDER

FOLDER holds model.gguf, and request.npz: for tensor i its bytes_i, type_i and size_i, float32 rows `x`, token ids
`ids` (windows, tokens) and a text. ggml's own to_float and from_float are called through ctypes. Written to found.npz:
values_i, the Q8_0 bytes of `x`, log-probabilities of `ids`, the text's tokens, and what a chat answers.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

LIBRARIES = Path(llama_cpp.__file__).parent / "lib"
Q8_0 = 8
Convert = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class Traits(ctypes.Structure):
    """ggml.h's ggml_type_traits."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("bytes", ctypes.c_size_t),
        ("quantised", ctypes.c_bool),
        ("to_float", Convert),
        ("from_float", Convert),
    ]


class CpuTraits(ctypes.Structure):
    """ggml-cpu.h's ggml_type_traits_cpu; only its first field is read."""

    _fields_ = [("from_float", Convert), ("vec_dot", ctypes.c_void_p)]


def decoded(base: Any, data: np.ndarray, type: int, size: int) -> np.ndarray:
    """The `size` values of a tensor's bytes."""
    traits = base.ggml_get_type_traits(type).contents
    assert traits.block in (32, 64) and traits.quantised, (traits.name, traits.block)
    assert data.size * traits.block == size * traits.bytes, (traits.name, data.size, size)
    values = np.full(size, np.nan, dtype=np.float32)
    traits.to_float(data.ctypes.data, values.ctypes.data, size)
    return values


def log_probabilities(path: Path, ids: np.ndarray) -> np.ndarray:
    """Of every token but the first of each window, with keys and values in float32."""
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    assert model, f"llama.cpp does not load {path}"
    vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = ids.shape[1]
    options.n_threads = options.n_threads_batch = 2
    options.type_k = options.type_v = options.flash_attn_type = 0
    found = []
    for window in ids:
        context = llama_cpp.llama_init_from_model(model, options)
        batch = llama_cpp.llama_batch_init(len(window), 0, 1)
        batch.n_tokens = len(window)
        for i, token in enumerate(window):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = int(token), i, 1, 1
            batch.seq_id[i][0] = 0
        assert llama_cpp.llama_decode(context, batch) == 0
        for i, following in enumerate(window[1:]):
            row = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (vocabulary,)).astype(np.float64)
            found.append(row[following] - row.max() - np.log(np.exp(row - row.max()).sum()))
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
    return np.array(found)


def main(folder: Path) -> None:
    base = ctypes.CDLL(str(LIBRARIES / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(LIBRARIES / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
    cpu.ggml_cpu_init()
    base.ggml_get_type_traits.restype = ctypes.POINTER(Traits)
    cpu.ggml_get_type_traits_cpu.restype = ctypes.POINTER(CpuTraits)
    request = np.load(folder / "request.npz")
    found: dict[str, Any] = {"version": llama_cpp.__version__}
    for key in request.files:
        if key.startswith("bytes_"):
            i = key.removeprefix("bytes_")
            found[f"values_{i}"] = decoded(base, request[key], int(request[f"type_{i}"]), int(request[f"size_{i}"]))
    x = np.ascontiguousarray(request["x"].reshape(-1))
    q8_0 = np.zeros(x.size // 32 * 34, dtype=np.uint8)
    cpu.ggml_get_type_traits_cpu(Q8_0).contents.from_float(x.ctypes.data, q8_0.ctypes.data, x.size)
    found["q8_0"] = q8_0
    model = folder / "model.gguf"
    found["log_probabilities"] = log_probabilities(model, request["ids"])
    llm = llama_cpp.Llama(str(model), n_ctx=256, n_threads=2, verbose=False)
    text = str(request["text"])
    found["tokens"] = np.array(llm.tokenize(text.encode(), add_bos=False, special=False))
    found["template"] = llm.metadata.get("tokenizer.chat_template", "")
    messages = [{"role": "user", "content": str(request["chat"])}]
    answer = llm.create_chat_completion(messages, max_tokens=12, temperature=0.0)
    found["answer"] = answer["choices"][0]["message"]["content"]
    found["prompt_tokens"] = answer["usage"]["prompt_tokens"]
    np.savez(folder / "found.npz", **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
