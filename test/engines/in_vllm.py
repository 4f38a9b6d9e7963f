"""Run by vLLM's own Python: what a stock vLLM computes from a folder, in its CPU build.

    python in_vllm.py FOLDER REQUEST

REQUEST is a file of torch.save with `layers` {name of Hugging Face: (input, output)}, `ids` (windows, tokens), and
where wanted `experts` {name in files: (input, experts of each token, their weights, output)}, `task`, a folder with lm-
eval's task, its `window` and `limit`; `kv`, ids whose keys and values are asked for; `tensor_parallel`;
`expert_parallel`; `lora`, a peft folder, with which next tokens are asked; `sync` {"model", "recipe", "weights"}, a
prepared model that the engine has to follow before anything is measured. Written to REQUEST.found: the outputs of every
fused layer and of experts, log-probabilities, perplexity, and whether aoquant was imported.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function for workers in processes of their own
    "HF_HUB_OFFLINE": "1",
}

import torch


def outputs(model: torch.nn.Module, layers: dict[str, Any]) -> dict[str, Any]:
    """By vLLM's layer: its weight's class, and its output for the input that its parts had, beside their outputs."""
    mapping = getattr(model, "packed_modules_mapping", {})
    fused = {part: whole for whole, parts in mapping.items() for part in parts}
    found: dict[str, Any] = {}
    for name, (x, y) in layers.items():
        parent, _, own = name.rpartition(".")
        whole = f"{parent}.{fused.get(own, own)}"
        found.setdefault(whole, {"x": x, "expected": []})["expected"].append(y)
    for name, given in found.items():
        module, x = model.get_submodule(name), given.pop("x")
        ranks, rank = getattr(module, "tp_size", 1), getattr(module, "tp_rank", 0)
        if ranks > 1 and module.input_size_per_partition < x.shape[-1]:  # sums of all ranks, of columns each
            x = x.chunk(ranks, -1)[rank].contiguous()
        elif ranks > 1:
            given["expected"] = [y.chunk(ranks, -1)[rank] for y in given["expected"]]
        y = module(x.clone())
        given["got"] = y[0] if isinstance(y, tuple) else y
        given["expected"] = torch.cat(given["expected"], -1)
        given["weight"] = type(getattr(module, "weight", None)).__name__
    return found


def experts_outputs(model: torch.nn.Module, experts: dict[str, Any]) -> dict[str, Any]:
    """Of every layer of experts: its weights' classes, its method's, and its output for the input and routing given."""
    from vllm.distributed import tensor_model_parallel_all_reduce

    found = {}
    for name, (x, ids, weights, y) in experts.items():
        layer = model.get_submodule(name).routed_experts
        got = layer.forward_modular(x.clone(), weights.float(), ids.int())
        if layer.moe_config.tp_size > 1 or layer.use_ep:  # parts of a sum
            got = tensor_model_parallel_all_reduce(got)
        kinds = type(layer.w13_weight).__name__, type(layer.w2_weight).__name__
        found[name] = {"got": got, "expected": y, "weights": kinds, "method": type(layer.quant_method).__name__}
    return found


def kv_scales(model: torch.nn.Module) -> dict[str, Any]:
    """By attention module of Hugging Face: the cache's dtype and the scales of keys, values and queries."""
    return {
        name.removesuffix(".attn"): (m.kv_cache_dtype, m._k_scale, m._v_scale, m._q_scale)
        for name, m in model.named_modules()
        if hasattr(m, "kv_cache_dtype") and hasattr(m, "_k_scale")
    }


def kv_bytes(llm: Any, ids: torch.Tensor) -> list[Any]:
    """Return what each layer hands to its cache for one window, (tokens, heads, head_dim), and the stored bytes."""
    from vllm.v1.attention.backends import cpu_attn

    written, original = [], cpu_attn.ops.cpu_attn_reshape_and_cache

    def watched(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any, isa: str, **options: Any) -> None:
        original(k, v, k_cache, v_cache, slots, isa, **options)
        heads, size, d = k_cache.shape[1:]
        columns = k_cache.view(-1, heads, d, size).transpose(2, 3)  # keys are stored with tokens innermost
        stored = [cache[slots // size, :, slots % size].clone() for cache in (columns, v_cache)]
        written.append((k.clone(), v.clone(), *stored, options["k_scale"], options["v_scale"]))

    cpu_attn.ops.cpu_attn_reshape_and_cache = watched
    log_probabilities(llm, ids[:1])
    cpu_attn.ops.cpu_attn_reshape_and_cache = original
    return written


def log_probabilities(llm: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of every token but the first of each window."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": window.tolist()} for window in ids]
    answers = llm.generate(prompts, wanted, use_tqdm=False)
    return torch.tensor(
        [
            d[t].logprob
            for a, w in zip(answers, ids.tolist(), strict=True)
            for d, t in zip(a.prompt_logprobs[1:], w[1:], strict=True)
        ],
        dtype=torch.float64,
    )


def likeliest(llm: Any, ids: torch.Tensor, lora: Any) -> list[tuple[int, float]]:
    """The next token after each window, and its log-probability."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": window.tolist()} for window in ids]
    answers = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, logprobs=1), lora_request=lora)
    tokens = [answer.outputs[0] for answer in answers]
    return [(t.token_ids[0], t.logprobs[0][t.token_ids[0]].logprob) for t in tokens]


def perplexity(llm: Any, asked: dict[str, Any], folder: str) -> float:
    """lm-eval's word perplexity, by its own class for vLLM, which asks for the version of a package named vllm."""
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)  # type: ignore[assignment]
    from lm_eval import evaluator
    from lm_eval.models import vllm_causallms
    from lm_eval.tasks import TaskManager

    vllm_causallms.LLM = lambda **_: llm
    lm = vllm_causallms.VLLM(folder, max_length=asked["window"] + 2, prefix_token_id=asked["prefix"])
    tasks = TaskManager(include_path=asked["task"], include_defaults=False).load(["wikitext_local"])
    results = evaluator.evaluate(lm, tasks, limit=asked["limit"], bootstrap_iters=0)
    return float(results["results"]["wikitext_local"]["word_perplexity,none"])


def sync(llm: Any, asked: dict[str, Any]) -> None:
    """Let the engine follow a prepared model, and see that its tensors stay where they are."""
    from transformers import AutoModelForCausalLM

    import aoquant

    prepared = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.bfloat16).eval()
    aoquant.quantize_(prepared, aoquant.get_recipe(asked["recipe"]).prepare())
    prepared.load_state_dict(asked["weights"])

    def places(model: torch.nn.Module) -> list[int]:
        return [getattr(p, "qdata", p).data_ptr() for p in model.parameters()]

    before = llm.apply_model(places)
    aoquant.sync_vllm(llm, prepared)
    assert llm.apply_model(places) == before


def main(folder: str, request: Path) -> None:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    asked = torch.load(request, weights_only=False)
    lora = LoRARequest("adapter", 1, asked["lora"]) if "lora" in asked else None
    llm = LLM(
        model=folder,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        enable_prefix_caching=False,
        tensor_parallel_size=asked.get("tensor_parallel", 1),
        enable_expert_parallel=asked.get("expert_parallel", False),
        enable_lora=lora is not None,
    )
    found: dict[str, Any] = {}
    if "sync" in asked:
        found["before"] = log_probabilities(llm, asked["ids"])
        sync(llm, asked["sync"])
    layers = asked["layers"]
    found["layers"] = llm.apply_model(functools.partial(outputs, layers=layers))
    found["experts"] = llm.apply_model(functools.partial(experts_outputs, experts=asked.get("experts", {})))
    if "kv" in asked:
        (found["kv_scales"],) = llm.apply_model(kv_scales)
        found["kv_bytes"] = kv_bytes(llm, asked["kv"])
    if lora is not None:  # scores of a prompt's tokens fail with adapters on vLLM's CPU
        found["adapted"], found["base"] = (likeliest(llm, asked["ids"], which) for which in (lora, None))
    elif "ids" in asked:
        found["log_probabilities"] = log_probabilities(llm, asked["ids"])
    if "task" in asked:
        found["perplexity"] = perplexity(llm, asked, folder)
    found["aoquant"] = "aoquant" in sys.modules
    torch.save(found, f"{request}.found")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
