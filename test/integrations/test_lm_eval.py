"""`evaluate` is lm-eval: the number of its command line, its stock task and hand arithmetic; nothing it borrows
changes.
"""

import copy
import json
import logging
import math
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lm_eval")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

import lm_eval.tasks._yaml_loader  # noqa: E402
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer  # noqa: E402
from support.models import llama_config  # noqa: E402

from aoquant.integrations import text  # noqa: E402
from aoquant.integrations.lm_eval import TASK, Perplexity, check_window, evaluate, write_task  # noqa: E402

END = "<|endoftext|>"
POSITIONS = 128
WINDOW = 64
METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")


def generate_pages(count: int = 4) -> list[str]:
    """Made-up pages in WikiText's manner: a heading, detached punctuation, @-@ hyphens; 40 to 220 words each."""
    draw = random.Random(0)
    syllables = ["ba", "ke", "lo", "mi", "nu", "ra", "su", "té"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(200)]
    pages = []
    for number in range(count):
        parts = [f" = Page {number} = \n \n"]
        for _ in range(40 + 60 * number):
            parts.append(
                draw.choice(words) + draw.choice([" "] * 8 + [" , ", " . ", " @-@ ", " ( x ) ", ' " y " ', " \n "])
            )
        pages.append("".join(parts))
    return pages


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is too small for more, and the command line in another process then adds in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write_pages(path: Path, pages: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"page": page}) + "\n" for page in pages), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(generate_pages(), trainer)
    # No pad token, so that HFLM has one to add, and the model's window, so that long pages would draw a warning.
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, model_max_length=POSITIONS)


def build_model(dtype: torch.dtype = torch.float32, tied: bool = False) -> Any:
    config = llama_config(
        vocab_size=512,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied,
        initializer_range=0.2,  # far from uniform predictions: the context matters
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return build_model()


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pages(tmp_path_factory.mktemp("pages") / "pages.jsonl", generate_pages())


def metrics(result: Perplexity) -> tuple[float, float, float]:
    return result.word_perplexity, result.byte_perplexity, result.bits_per_byte


def by_hand(model: Any, tokenizer: Any, pages: list[str], window: int) -> tuple[float, float, float]:
    """The three metrics from their definitions, a window at a time; the last window of a page reaches back."""
    total, words, size = 0.0, 0, 0
    for page in pages:
        ids = [tokenizer.eos_token_id, *tokenizer(wikitext_detokenizer({"page": page}), verbose=False)["input_ids"]]
        for start in range(1, len(ids), window):
            stop = min(start + window, len(ids))
            first = max(0, stop - 1 - window)
            with torch.no_grad():
                logits_TV = model(torch.tensor([ids[first : stop - 1]])).logits[0].double()
            log_p_TV = logits_TV.log_softmax(-1)[start - 1 - first :]
            total += log_p_TV.gather(1, torch.tensor(ids[start:stop])[:, None]).sum().item()
        words += len(re.split(r"\s+", page))
        size += len(page.encode())
    return math.exp(-total / words), math.exp(-total / size), -total / size / math.log(2)


@pytest.mark.parametrize("window", [1, 2, 64])
def test_each_window_begins_with_bos_and_none_is_scored(
    model: Any, tokenizer: Any, documents: Path, window: int
) -> None:
    """Hand arithmetic. Off, the number is lm-eval's, which predicts a second BOS."""
    begins = copy.deepcopy(tokenizer)
    begins.add_special_tokens({"bos_token": "é"})
    bos = begins.bos_token_id
    special = [("é", bos)]
    begins.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing("é $A", special_tokens=special)
    pages, total, words = generate_pages()[:2], 0.0, 0
    for page in pages:
        ids = begins(wikitext_detokenizer({"page": page}), add_special_tokens=False)["input_ids"]
        start, room = 0, window
        while start < len(ids):
            stop = min(start + room, len(ids))
            room = max(1, window - 1)  # later windows see the token before too
            inputs = [bos, *ids[max(0, stop - 1 - room) : stop - 1]][-window:] if start else [bos, *ids[: stop - 1]]
            with torch.no_grad():
                log_p = model(torch.tensor([inputs])).logits[0].double().log_softmax(-1)[start - stop :]
            total += log_p.gather(1, torch.tensor(ids[start:stop])[:, None]).sum().item()
            start = stop
        words += len(re.split(r"\s+", page))
    options: Any = {"documents": documents, "limit": 2, "window": window, "progress": False}
    found = evaluate(model, begins, **options)
    assert found.bos and "BOS" in str(found)
    assert found.word_perplexity == pytest.approx(math.exp(-total / words), rel=1e-5)
    off = evaluate(model, begins, **options, bos=False)
    assert not off.bos and off.word_perplexity != found.word_perplexity
    if window > 2:
        with torch.no_grad():
            again = model(torch.tensor([[bos]])).logits[0, 0].log_softmax(-1)[bos].item()
        ids = [bos, bos, *begins(wikitext_detokenizer({"page": pages[0]}), add_special_tokens=False)["input_ids"]]
        with torch.no_grad():
            first = model(torch.tensor([ids[:window]])).logits[0].log_softmax(-1)
        scored = first.gather(1, torch.tensor(ids[1 : window + 1])[:, None]).sum().item()
        assert again < 0 and off.loglikelihoods[0] < scored  # P(bos | bos) is among those of the first window


def test_local_task_is_the_stock_task_on_other_data(documents: Path, tmp_path: Path) -> None:
    stock = lm_eval.tasks._yaml_loader.load_yaml(Path(lm_eval.__file__).parent / "tasks/wikitext/wikitext.yaml")
    local = lm_eval.tasks._yaml_loader.load_yaml(write_task(tmp_path, documents=documents))
    data = {"task", "dataset_path", "dataset_name", "dataset_kwargs", "training_split", "validation_split"}
    functions: Callable[[Any], Any] = lambda value: (value.__module__, value.__qualname__) if callable(value) else value  # noqa: E731
    same = [{key: functions(value) for key, value in task.items() if key not in data} for task in (stock, local)]
    assert same[0] == same[1]
    assert local["dataset_kwargs"] == {"data_files": {"test": [str(documents)]}}


def test_hub_runs_the_stock_task(
    model: Any, tokenizer: Any, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def load_dataset(path: str, name: str | None = None, **_: Any) -> Any:
        asked.append((path, name))
        pages = {"test": generate_pages(), "train": ["another page"], "validation": ["another page"]}
        splits = {name: datasets.Dataset.from_dict({"page": split}) for name, split in pages.items()}
        return datasets.DatasetDict(splits)

    local = evaluate(model, tokenizer, documents=documents, progress=False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    result = evaluate(model, tokenizer, wikitext="hub", progress=False)
    assert asked == [("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1")]
    assert metrics(result) == metrics(local)
    assert (result.task, result.task_version, result.source) == ("wikitext", local.task_version, asked[0][0])


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("fails", [False, True], ids=["finished", "raised"])
def test_borrowed_state_comes_back(tokenizer: Any, documents: Path, fails: bool) -> None:
    model = build_model().train()
    model.model.layers[0].eval()  # a mixture, which model.train() would not bring back
    seen = []

    def look(*_: Any) -> None:
        seen.append(any(module.training for module in model.modules()))
        if fails:
            raise Interrupted

    model.model.register_forward_pre_hook(look)

    def state() -> list[Any]:
        return [
            [module.training for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
            {name: id(value) for name, value in vars(model).items()},
            (tokenizer.pad_token, tokenizer.model_max_length, tokenizer.padding_side, len(tokenizer)),
            random.getstate(),
            torch.get_rng_state().tolist(),
            (logging.getLogger("lm_eval").level, datasets.are_progress_bars_disabled(), datasets.config.HF_HUB_OFFLINE),
        ]

    before = state()
    try:
        evaluate(model, tokenizer, documents=documents, limit=1, progress=False)
    except Interrupted:
        assert fails
    assert state() == before
    assert seen
    assert not any(seen)


def test_local_evaluation_leaves_nothing_and_stays_offline(
    model: Any, tokenizer: Any, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a process that is not set offline: `datasets` counts each load with a request, and swallows its
    failure.
    """
    calls = []

    def refuse(*args: Any, **_: Any) -> None:
        calls.append(args)
        raise OSError("the network was used")

    for function in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, function, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    evaluate(model, tokenizer, documents=documents, limit=1, progress=False)
    assert calls == []
    assert [path.name for path in tmp_path.rglob("*")] == ["temporary"]


@pytest.mark.slow
def test_equals_lm_evals_command_line(model: Any, tokenizer: Any, documents: Path, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    task = write_task(tmp_path / "tasks", documents=documents)
    model_args = f"pretrained={tmp_path / 'model'},max_length={WINDOW},softmax_dtype=float32"
    # fmt: off
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", model_args, "--device", "cpu",
        "--batch_size", "1", "--tasks", TASK, "--include_path", str(task.parent), "--output_path", "out.json",
    ]
    # fmt: on
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env={**os.environ, **offline}, cwd=tmp_path, check=True, timeout=240)
    (output,) = tmp_path.glob("out*.json")
    report = json.loads(output.read_text())
    result = evaluate(model, tokenizer, documents=documents, window=WINDOW, progress=False)
    assert metrics(result) == tuple(report["results"][TASK][f"{name},none"] for name in METRICS)
    assert result.task_version == str(report["versions"][TASK])
    assert result.documents == report["n-samples"][TASK]["effective"] == 4


@pytest.mark.parametrize(
    ("window", "dtype"), [(16, torch.float32), (POSITIONS, torch.float32), (WINDOW, torch.bfloat16)]
)
def test_equals_hand_arithmetic(tokenizer: Any, documents: Path, window: int, dtype: torch.dtype) -> None:
    """Also in bf16, whose own log-softmax, lm-eval's default, is off by 2.5e-3 here, and under autocast."""
    model = build_model(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = evaluate(model, tokenizer, documents=documents, window=window, progress=False)
    assert metrics(result) == pytest.approx(by_hand(model, tokenizer, generate_pages(), window), rel=1e-5)


def test_quantised_tied_head_is_kept(tokenizer: Any, documents: Path) -> None:
    """HFLM ties weights, which would put the float embedding back; packed weights are tensor subclasses."""
    quantization = pytest.importorskip("torchao.quantization")
    model = build_model(tied=True)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(version=2))
    packed = type(model.lm_head.weight)
    result = evaluate(model, tokenizer, documents=documents, window=WINDOW, progress=False)
    assert type(model.lm_head.weight) is packed is not nn.Parameter
    assert metrics(result) == pytest.approx(by_hand(model, tokenizer, generate_pages(), WINDOW), rel=1e-5)


def test_where_pages_come_from(model: Any, tokenizer: Any, documents: Path, tmp_path: Path) -> None:
    """Of a folder only test.jsonl is scored; its name holds what a glob or a YAML string could trip over."""
    folder = tmp_path / "wiki [text] *2? 'ü' {a}: #"
    write_pages(folder / "test.jsonl", generate_pages())
    write_pages(folder / "train.jsonl", ["another page"])
    result = evaluate(model, tokenizer, wikitext=folder, progress=False)
    assert metrics(result) == metrics(evaluate(model, tokenizer, documents=documents, progress=False))
    assert (result.source, result.window) == (str(folder / "test.jsonl"), POSITIONS)
    held_out = text.standard_text()[1]
    result = evaluate(model, tokenizer, limit=1, progress=False)
    assert result == evaluate(model, tokenizer, documents=held_out, limit=1, progress=False)
    assert result.source == text.described(held_out) != str(held_out)


def test_limit_and_repetition(
    model: Any, tokenizer: Any, documents: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two runs agree to the last bit; a limit scores just the first pages; a batch changes rounding only. Progress
    counts every window.
    """
    first = evaluate(model, tokenizer, documents=documents, limit=2, progress=False)
    assert first == evaluate(model, tokenizer, documents=documents, limit=2, progress=False)
    assert (first.documents, first.limit) == (2, 2)
    two = write_pages(tmp_path / "two.jsonl", generate_pages()[:2])
    assert metrics(first) == metrics(evaluate(model, tokenizer, documents=two, progress=False))
    batched = evaluate(model, tokenizer, documents=two, batch_size=4, progress=False)
    assert metrics(batched) == pytest.approx(metrics(first), rel=1e-6) and batched.batch_size == 4
    assert "window" not in capsys.readouterr().err
    evaluate(model, tokenizer, documents=two, batch_size=4, window=5)
    pages = [tokenizer(wikitext_detokenizer({"page": page}))["input_ids"] for page in generate_pages()[:2]]
    windows = sum(math.ceil(len(ids) / 5) for ids in pages)
    assert f": {windows} of {windows} windows, 100 %" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("page\n", "line 1"),
        ('{"page": "a b"}\n{"text": "a b"}\n', "line 2"),
        ('{"page": 3}\n', "line 1"),
        ("[]\n", "line 1"),
        ("", "0 pages"),
        ('{"page": "a b"}\n{"page": " \\n"}\n', "1 empty"),
    ],
)
def test_bad_pages_are_refused(model: Any, tokenizer: Any, tmp_path: Path, content: str, name: str) -> None:
    path = tmp_path / "test.jsonl"
    path.write_text(content)
    for source in ({"documents": path}, {"wikitext": tmp_path}):
        with pytest.raises(ValueError, match=name):
            evaluate(model, tokenizer, **source)
    with pytest.raises(ValueError, match=name):
        write_task(tmp_path / "task", documents=path)
    assert not (tmp_path / "task").exists()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("window", {"window": POSITIONS + 1}),
        ("window", {"window": 0}),
        ("limit", {"limit": 0.5}),
        ("batch_size", {"batch_size": "auto"}),
        ("wikitext", {"wikitext": "hub"}),  # beside documents
        ("/no/folder", {"documents": None, "wikitext": "/no/folder"}),
        ("/no/file", {"documents": "/no/file"}),
        ("model", {"model": nn.Linear(2, 2)}),
        ("tokenizer", {"tokenizer": None}),  # one without bos and eos
    ],
)
def test_bad_arguments_are_refused_by_name(
    model: Any, tokenizer: Any, documents: Path, name: str, given: dict[str, Any]
) -> None:
    given = {"model": model, "tokenizer": tokenizer, "documents": documents} | given
    if given["tokenizer"] is None:
        given["tokenizer"] = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match=name):
        evaluate(given.pop("model"), given.pop("tokenizer"), **given)


@pytest.mark.parametrize(("positions", "window"), [(32768, 2048), (2048, 2048), (512, 512)])
def test_a_window_is_2048_tokens_or_the_models_positions(tokenizer: Any, positions: int, window: int) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=positions))
    assert check_window(model, tokenizer, None) == window
    assert check_window(model, tokenizer, 16) == 16
    with pytest.raises(ValueError, match=f"at most .* = {positions}"):
        check_window(model, tokenizer, positions + 1)
