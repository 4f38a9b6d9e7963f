"""eval/real_models: rows from end to end, its scores by lm-eval's rule, and its chunked loss beside the plain one."""

from __future__ import annotations

import copy
import csv
import gc
import importlib
import json
import lzma
import math
import multiprocessing
import os
import queue
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.utils import get_rolling_token_windows
from safetensors.torch import save_file
from support.experiments import ROOT
from support.models import distillation_loss
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, BertModel, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from aoquant import PackedTensor, quantize_
from aoquant.integrations import losses
from aoquant.integrations.text import assets
from aoquant.linear.prepared import QATLinear
from aoquant.recipes import get_recipe
from aoquant.targets import resolve

BOS = 1
SIZE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


class Rows(queue.SimpleQueue[Any]):
    """A queue of rows that holds all of them from the start, so that an empty queue is waited for by nobody."""

    def get(self, timeout: float) -> Any:
        return super().get(block=False)


@pytest.fixture(scope="module")
def real() -> Iterator[Any]:
    """Import the program, to run it in this process on as many threads as other tests."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "eval"))
        patched.setattr(os, "cpu_count", torch.get_num_threads)
        patched.setattr(multiprocessing, "get_context", lambda method: SimpleNamespace(Queue=Rows))
        program = importlib.import_module("real_models.__main__")
        importlib.import_module("real_models.worker")
        gc.collect()
        gc.freeze()  # the program collects after each row, and would look at every imported object again
        yield program


def text(name: str, pages: int, tokens: int) -> dict[str, Tensor]:
    lengths = torch.randint(2, tokens, (pages,))
    ids = torch.randint(2, 256, (int(lengths.sum()),), dtype=torch.int32)
    return {f"{name}.ids": ids, f"{name}.lengths": lengths, f"{name}.words": lengths // 2 + 1}


def save_texts(path: Path, **pages: int) -> dict[str, Tensor]:
    texts = {key: value for name, count in pages.items() for key, value in text(name, count, 90).items()}
    save_file(texts, path, {"bos": str(BOS)})
    return texts


def llama(vocabulary: int = 256) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, initializer_range=0.2, **SIZE)
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def small(folder: Path, tokens: int) -> list[str]:
    """Save a Llama and its texts. Return the arguments of a short run of them on the CPU."""
    llama().save_pretrained(folder / "model")
    save_texts(folder / "t.safetensors", train=60, wikitext=3, other=2, validation=2)
    files = {"--model": folder / "model", "--tokens-file": folder / "t.safetensors", "--csv": folder / "r.csv"}
    numbers = {"--tokens": tokens, "--batch": 4, "--block": 32, "--rate": "1e-3", "--device": "cpu"}
    return [str(word) for pair in (files | numbers).items() for word in pair]


def test_rows_of_a_language_model(real: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = small(tmp_path, tokens=512)
    call = [*given, "--rows", "vllm-w4a16-g32", "float-ce", "float-kl", "torchao-intx4-g32", "int4-g128"]
    real.main(call)
    made = lines(tmp_path / "r.csv")
    found = {(line["row"], line["stage"], line["served"]): line for line in made}
    ours, tuned = found["vllm-w4a16-g32", "qat", ""], found["float-ce", "qat", ""]
    assert ours["equal"] == "True" and float(ours["last_loss"]) < float(ours["first_loss"])
    assert ours["trained_wikitext_word_perplexity"] == ours["wikitext_word_perplexity"]
    assert float(ours["wikitext_kl"]) < float(found["vllm-w4a16-g32", "ptq", ""]["wikitext_kl"])
    assert float(tuned["wikitext_kl"]) > 0 and tuned["loss"] == "ce"
    same, base = found["float-kl", "qat", ""], found["float", "float", ""]
    assert same["wikitext_word_perplexity"] == base["wikitext_word_perplexity"]
    for served in ("torchao", "vllm-w4a16-g32", "gguf-q4_0"):
        assert found["torchao-intx4-g32", "qat", served]["seconds_step"]
    assert "128" in found["int4-g128", "ptq", ""]["error"]  # 32 columns have no group of 128: others went on
    real.main(call)
    assert lines(tmp_path / "r.csv") == made  # nothing is done twice
    real.main([*map(str, given[:-3]), "30", "--device", "cpu", "--rows", "vllm-w4a16-g32"])
    assert "diverged" in lines(tmp_path / "r.csv")[-1]["error"]
    with pytest.raises(ValueError, match="no recipe"):
        real.main([*call, "--rows", "int9"])


def test_a_capture_trains_what_eager_steps_do(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers and attention that is causal by flag, of a model whose attention slides, and nothing stays.

    Layers are traced and differentiated as for Inductor, whose kernels are not what is tested.
    """
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    worker, causal = (importlib.import_module(f"real_models.{name}") for name in ("worker", "causal"))
    torch.manual_seed(0)
    config = Gemma3TextConfig(vocab_size=256, head_dim=32, sliding_window=32, num_key_value_heads=1, **SIZE)
    teacher = Gemma3ForCausalLM._from_config(config, dtype=torch.float32).eval()
    student = copy.deepcopy(teacher).train()
    quantize_(student, get_recipe("int4-g32").prepare())
    task = causal.CausalLM(teacher, text("train", 9, 90), BOS, 4, 32)
    assert worker.sliding_window(teacher) == 32

    def gradients() -> list[Tensor]:
        loss = task.loss(student, task.blocks_BT[:4], "kl")
        return [loss.detach(), *torch.autograd.grad(loss, list(student.parameters()))]

    eager = gradients()
    with worker.for_capture(student, teacher):
        assert all(layer._compiled_call_impl for model in (student, teacher) for layer in model.model.layers)
        assert student.config._attn_implementation != "sdpa"
        torch.testing.assert_close(gradients(), eager)
    assert not any(layer._compiled_call_impl for model in (student, teacher) for layer in model.model.layers)
    assert student.config._attn_implementation == teacher.config._attn_implementation == "sdpa"


def test_tasks_of_lm_eval_are_scored_by_its_rule(real: Any, tmp_path: Path) -> None:
    """A file of prompts as tasks.py writes it; one answer of two stands in what the model writes."""
    tasks = importlib.import_module("real_models.tasks")
    tokenizer = assets() / "tokenizer.json"
    prompts = [torch.arange(5, 17), torch.arange(40, 60)]
    model = llama(8192)
    made = [model.generate(p[None], max_new_tokens=8, do_sample=False)[0, len(p) :] for p in prompts]
    text = Tokenizer.from_file(str(tokenizer)).decode(made[1].tolist())
    packed = torch.frombuffer(bytearray(lzma.compress(tokenizer.read_bytes())), dtype=torch.uint8)
    ids = {"ruler_fwe.ids": torch.cat(prompts).int(), "ruler_fwe.lengths": torch.tensor([12, 20])}
    answers = {"ruler_fwe": [["not there"], [text.upper().strip(), "not there"]]}
    save_file({"tokenizer": packed, **ids}, tmp_path / "tasks.safetensors", {"answers": json.dumps(answers)})
    assert tasks.Tasks(tmp_path / "tasks.safetensors").score(model) == {"ruler_fwe": 0.25}


def test_a_csv_without_the_newest_columns_goes_on(real: Any, tmp_path: Path) -> None:
    worker = importlib.import_module("real_models.worker")
    older = [name for name in worker.COLUMNS if name not in worker.ANSWER and "validation" not in name]
    (tmp_path / "r.csv").write_text(",".join(older) + "\n" + "fp8" + "," * (len(older) - 1) + "\n")
    worker.widen(tmp_path / "r.csv")
    assert [line["row"] for line in worker.read(tmp_path / "r.csv")] == ["fp8"]


def test_rows_of_another_recipe_for_the_embeddings(real: Any, tmp_path: Path) -> None:
    """The PTQ weights are those that llama.cpp's quantiser writes."""
    gguf = pytest.importorskip("gguf")
    given = small(tmp_path, tokens=256)
    real.main([*given, "--rows", "gguf-q4_0@gguf-q8_0"])
    ptq, qat = lines(tmp_path / "r.csv")[1:]
    assert qat["equal"] == "True" and not ptq["error"] and 5 < float(ptq["bits"]) < 8.5
    students, rows = (importlib.import_module(name) for name in ("experiments.students", "real_models.rows"))
    model, row = llama(), rows.row("gguf-q4_0@gguf-q8_0")
    made = students.Student(row, model, torch.zeros(1, 1), embeddings="gguf-q8_0").ptq()
    for name, kind in (("model.embed_tokens", "Q8_0"), ("model.layers.0.mlp.up_proj", "Q4_0")):
        kind, weight = gguf.GGMLQuantizationType[kind], model.get_submodule(name).weight.detach().float().numpy()
        wanted = gguf.quants.dequantize(gguf.quants.quantize(weight, kind), kind)
        found = made.get_submodule(name).weight.dequantize()
        assert torch.equal(found, torch.from_numpy(wanted).to(found.dtype)), name
    with pytest.raises(ValueError, match="no recipe"):
        rows.row("gguf-q4_0@int9")


def test_rows_with_another_recipe_for_some_layers(real: Any, tmp_path: Path) -> None:
    """The named layers alone have it, and the converted model equals the trained one."""
    given = small(tmp_path, tokens=256)
    students, rows = (importlib.import_module(name) for name in ("experiments.students", "real_models.rows"))
    real.main([*given, "--rows", *rows.MIXED])
    made = lines(tmp_path / "r.csv")[1:]
    assert [line["stage"] for line in made] == ["ptq", "qat"] * len(rows.MIXED)
    assert all(line["equal"] == "True" for line in made[1::2]) and not any(line["error"] for line in made)
    for name, (recipe, layers) in rows.MIXED.items():
        model = students.Student(rows.row(name), llama(), torch.zeros(1, 1), layers=layers).prepared(0)
        other = layers[0].rpartition("=")[2]
        for fqn, module in model.named_modules():
            if isinstance(module, QATLinear):
                wanted = other if fqn.endswith(("gate_proj", "up_proj")) else recipe
                assert module.prepared.recipe.input_name == resolve(get_recipe(wanted).make()).recipe.input_name, fqn


def test_rows_with_another_recipe_for_some_layers_start_from_calibrated_ptq(real: Any, tmp_path: Path) -> None:
    """These layers have it in PTQ as in QAT: gate and up multiply bfloat16 inputs, the others four bits."""
    given = small(tmp_path, tokens=256)
    real.main([*given, "--rows", "nvfp4-w4a16-gate-up", "nvfp4-w4a16-gate-up+awq"])
    nearest, _, calibrated, trained = lines(tmp_path / "r.csv")[1:]
    assert calibrated["wikitext_kl"] != nearest["wikitext_kl"] and calibrated["bits"] == nearest["bits"]
    assert trained["equal"] == "True" and not trained["error"]
    students, rows = (importlib.import_module(name) for name in ("experiments.students", "real_models.rows"))
    row, layers = rows.row("nvfp4-w4a16-gate-up+awq"), rows.MIXED["nvfp4-w4a16-gate-up"][1]
    made = students.Student(row, llama(), torch.ones(4, 16, dtype=torch.long), "awq", layers=layers).ptq()
    inputs = {name.rpartition(".")[2]: m.weight.recipe.input_name for name, m in made.named_modules() if packed(m)}
    assert {name for name, of in inputs.items() if not of} == {"gate_proj", "up_proj"} and len(inputs) == 7


def packed(module: Any) -> bool:
    return isinstance(getattr(module, "weight", None), PackedTensor)


def test_rows_of_calibrated_ptq(real: Any, tmp_path: Path) -> None:
    """PTQ is better than the nearest codes, and QAT starts from there."""
    given = small(tmp_path, tokens=512)
    real.main([*given, "--rows", "int3-g32", "int3-g32+gptq"])
    found = {(line["row"], line["stage"]): line for line in lines(tmp_path / "r.csv")}
    nearest, calibrated, qat = (found[key] for key in (
        ("int3-g32", "ptq"), ("int3-g32+gptq", "ptq"), ("int3-g32+gptq", "qat")))  # fmt: skip
    assert float(calibrated["wikitext_kl"]) < float(nearest["wikitext_kl"])
    assert calibrated["bits"] == nearest["bits"] == qat["bits"]
    assert qat["equal"] == "True" and not qat["error"]
    assert float(qat["first_loss"]) < float(found["int3-g32", "qat"]["first_loss"])
    with pytest.raises(ValueError, match="method"):
        real.main([*given, "--rows", "int3-g32+best"])


def test_rows_of_other_tools(real: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tool sees the blocks of calibrated PTQ, and what it writes is scored; no table of recipes has its rows."""
    peers, publish = (importlib.import_module(f"real_models.{name}") for name in ("peers", "publish"))
    llama().save_pretrained(tmp_path / "model")
    texts = save_texts(tmp_path / "t.safetensors", train=160, wikitext=3, other=2, validation=2)
    seen: dict[str, Tensor] = {}

    def halved(model: Any, ids_BT: Tensor, modifier: str) -> None:
        seen[modifier] = ids_BT
        model.model.layers[0].mlp.down_proj.weight.data.div_(2)

    monkeypatch.setattr(peers, "llm_compressor", halved)
    given = ["--model", tmp_path / "model", "--tokens-file", tmp_path / "t.safetensors", "--csv", tmp_path / "r.csv"]
    given += ["--tokens", "512", "--batch", "4", "--block", "32", "--device", "cpu", "--seeds", "0", "1"]
    real.main([*map(str, given), "--rows", "llm-compressor-gptq"])
    base, made = lines(tmp_path / "r.csv")
    assert (made["row"], made["stage"], made["error"]) == ("llm-compressor-gptq", "ptq", "")
    assert float(base["wikitext_kl"]) == 0 < float(made["wikitext_kl"])
    causal = importlib.import_module("real_models.causal").CausalLM(llama(), texts, BOS, 4, 32)
    assert torch.equal(seen["GPTQModifier"], causal.blocks_BT[:128]) and len(seen) == 1
    ours = made | {"row": publish.PEER, "bits": "4.125"}
    scores = " | ".join(f"{float(made[name]):{form}}" for name, form in (
        ("wikitext_word_perplexity", ".2f"), ("wikitext_kl", ".3f"), ("wikitext_top1", ".3f"),
        ("other_word_perplexity", ".2f")))  # fmt: skip
    table = publish.beside([base, made, ours]).split("\n")
    assert table[2:] == [f"| aoquant | nearest | {scores} |", f"| llm-compressor | gptq | {scores} |"]
    assert publish.all_rows([base, made, ours]) == publish.all_rows([base, ours])


def test_rows_of_kv_caches(real: Any, tmp_path: Path) -> None:
    given = small(tmp_path, tokens=512)
    names = ("kv-fp8-query", "kv-int4-token-head", "vllm-w4a16-g32-kv-fp8")
    real.main([*given, "--seeds", "0", "1", "--prompts", "2", "--rows", *names])
    base, *others = lines(tmp_path / "r.csv")
    assert [(line["row"], line["stage"], line["seed"]) for line in others] == [
        (row, *key) for row in names for key in (("ptq", "0"), ("qat", "0"), ("qat", "1"))
    ]
    # 16 values and a scale of 32 bits, or the bits of a weight
    assert [float(line["bits"]) for line in (base, *others[::3])] == [16, 8, 6, 4.5]
    assert all(float(line["wikitext_kl"]) > 0 for line in others)
    assert [(line["equal"], line["prompts_changed"]) for line in others] == [("", ""), *[("True", "0")] * 2] * 3
    first, second = (line["wikitext_kl"] for line in others[1:3])
    assert first != second  # of another order
    with pytest.raises(ValueError, match="no recipe"):
        real.main([*given, "--rows", "int9-kv-fp8"])
    publish = importlib.import_module("real_models.publish")
    alone, with_layers, said = publish.kv_table("A model", lines(tmp_path / "r.csv"), "r.csv")
    assert "| `fp8`, queries too | 8.00 | 0.001 |" in alone and "`int4-token-head` | 6.00" in alone
    assert "| `vllm-w4a16-g32` | `fp8` | 0.001 |" in with_layers
    assert alone.count("±") == 4 and with_layers.count("±") == 2 and alone.count("| yes |") == 2
    said = " ".join(said.split())
    assert "512 tokens" in said and "up to 2 seeds" in said and "Nothing was trained" not in said


def test_rows_of_an_embedding_model(real: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BertModel._from_config(BertConfig(vocab_size=256, initializer_range=0.2, **SIZE))
    model.config.architectures = ["BertModel"]
    model.save_pretrained(tmp_path / "model")
    save_texts(tmp_path / "t.safetensors", train=40, test=30)
    given = ["--model", tmp_path / "model", "--tokens-file", tmp_path / "t.safetensors", "--csv", tmp_path / "r.csv"]
    given += ["--tokens", "2560", "--batch", "8", "--block", "32", "--rate", "1e-3", "--device", "cpu"]
    real.main([*map(str, given), "--rows", "vllm-w4a16-g32"])
    base, untrained, trained = lines(tmp_path / "r.csv")
    assert float(base["top10"]) == 1 and trained["equal"] == "True"
    assert float(trained["one_minus_cosine"]) < float(untrained["one_minus_cosine"])


def test_windows_are_lm_evals_with_bos_in_front(real: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    causal = importlib.import_module("real_models.causal")
    monkeypatch.setattr(causal, "WINDOW", 16)
    texts = save_texts(tmp_path / "t.safetensors", train=60, wikitext=5)
    model = llama().float()
    task = causal.CausalLM(model, texts, BOS, 2, 32, ("wikitext",))
    expected = 0.0
    for page in texts["wikitext.ids"].long().split(texts["wikitext.lengths"].tolist()):
        for inputs, targets in get_rolling_token_windows(page.tolist(), BOS, 16, 2):
            logits = model(input_ids=torch.tensor([[BOS, *inputs[1:]]])).logits[0, -len(targets) :]
            expected += float(torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum"))
    found = task.score(model)
    assert float(found["nats"].sum()) == pytest.approx(expected, rel=1e-5)
    assert found["wikitext_kl"] == 0 and found["wikitext_top1"] == 1


@pytest.mark.parametrize("loss", ["kl", "ce"])
def test_chunks_have_the_gradients_of_the_whole(
    real: Any, loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    causal = importlib.import_module("real_models.causal")
    monkeypatch.setattr(losses, "chunk_rows", lambda *_: 7)
    texts = save_texts(tmp_path / "t.safetensors", train=60, wikitext=2)
    teacher, student = llama().float(), llama().float()
    with torch.no_grad():
        for p in student.parameters():
            p.add_(0.02 * torch.randn_like(p))
    task = causal.CausalLM(teacher, texts, BOS, 2, 32)
    ids_BT = task.blocks_BT[:2]
    logits_BTV = student(input_ids=ids_BT).logits
    if loss == "kl":
        value = distillation_loss(logits_BTV, teacher(input_ids=ids_BT).logits.detach())
    else:
        value = torch.nn.functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), ids_BT[:, 1:].flatten())
    expected = torch.autograd.grad(value, list(student.parameters()))
    made = task.loss(student, ids_BT, loss)
    made.backward()
    assert float(made.detach()) == pytest.approx(float(value.detach()), rel=1e-4)
    for p, gradient in zip(student.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-6)


def test_the_page_holds_what_the_committed_results_say(real: Any) -> None:
    publish = importlib.import_module("real_models.publish")
    gemma, scored, searched, minilm, demo = (
        publish.read(f"real_{name}") for name in ("gemma", "gemma_tasks", "gemma_rates", "minilm", "demo_gptq")
    )
    page = (ROOT / publish.PAGE).read_text(encoding="utf-8")
    for name, made in publish.contents(gemma, scored, searched, minilm, demo).items():
        assert f"<!-- {name} -->\n\n{made}\n\n<!-- end of {name} -->" in page
    assert (ROOT / "aoquant" / "tools" / "measured.csv").read_text(encoding="utf-8") == publish.measured(gemma)
    first = f"{publish.readme(gemma)}\n\n{publish.wrapped(publish.source(gemma))}"
    front = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"<!-- real models -->\n\n{first}\n\n<!-- end of real models -->" in front
    kv_page = (ROOT / publish.KV_PAGE).read_text(encoding="utf-8")
    assert f"<!-- measured -->\n\n{publish.kv_caches()}\n\n<!-- end of measured -->" in kv_page
    ours = [line for line in (*gemma, *scored) if line["stage"] == "qat" and not line["served"]]
    assert ours and [line["row"] for line in ours if line["equal"] != "True"] == []


def test_no_row_is_behind_torchaos_on_the_same_text(real: Any) -> None:
    """Compare rows of the same three seeds, tokens and rate, as they are served: word perplexity within twice the
    standard error of the difference of two means, and KL within a tenth.
    """
    publish, rows = (importlib.import_module(f"real_models.{name}") for name in ("publish", "rows"))
    trained = publish.only(publish.read("real_gemma"), stage="qat", tokens=publish.TOKENS)
    for name, (recipe, *_) in rows.SERVED.items():
        ours = publish.only(trained, row=recipe)
        theirs = publish.only(trained, row=f"torchao-{name}", served=recipe)
        assert {line["rate"] for line in (*ours, *theirs)} == {"2e-05"}
        assert sorted(line["seed"] for line in ours) == sorted(line["seed"] for line in theirs) == ["0", "1", "2"]
        by_seed = [[float(line[publish.PERPLEXITY]) for line in of] for of in (ours, theirs)]
        error = math.hypot(*(stdev(values) / math.sqrt(len(values)) for values in by_seed))
        assert mean(by_seed[0]) - mean(by_seed[1]) <= 2 * error, recipe
        assert publish.average(ours, "wikitext_kl") <= 1.1 * publish.average(theirs, "wikitext_kl"), recipe
