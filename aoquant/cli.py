"""The command line: `aoquant run`, `eval`, `convert`, `export`, `formats`, `recipes`, `doctor`.

Errors that a user can mend are one line and exit code 2; everything else is a traceback, because it is our mistake.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aoquant.formats import COMPOSED, get_format, list_formats


def run() -> Callable[..., None]:
    """evaluate float, PTQ and QAT of one model under one recipe; verify, save, print one table"""
    from aoquant.integrations import job

    def command(options: Any) -> None:
        """Evaluate float, PTQ and QAT of one model under one recipe; verify, save, print one table."""
        result = job.run(options)
        print(result.table())
        print(
            f"\nwritten to {options.out}/: report.md, report.csv, report.json, report.png, {job.RESULTS}, checkpoint/"
        )

    command.__annotations__["options"] = job.Options  # known here only: importing it takes transformers along
    return command


def evaluate() -> Callable[..., None]:
    """load a checkpoint, check that it is bit-equal to the run that wrote it, and score it"""
    import torch

    default = "cuda" if torch.cuda.is_available() else "cpu"

    def command(
        checkpoint: Path,
        /,
        wikitext: str | None = None,
        documents: Path | None = None,
        window: int | None = None,
        limit: int | None = None,
        device: str = default,
    ) -> None:
        """Load a converted (or float) checkpoint and score it with lm-eval.

        Args:
            checkpoint: folder that `aoquant run` or `aoquant.save_pretrained` wrote.
            wikitext: "hub", or a folder with WikiText-2 as test.jsonl; held-out generated documents by default.
            documents: a file of {"page": ...} lines instead.
            window: tokens that a prediction sees at most; the model's positions by default.
            limit: score the first documents only.
            device: where to run.
        """
        from aoquant.integrations import job, lm_eval
        from aoquant.tools import doctor as checks

        checks.check_device(device)
        tokenizer, model = job.load_checkpoint(checkpoint, device)
        job.probe(model)
        print(job.check_fingerprint(model, checkpoint))
        print(lm_eval.evaluate(model, tokenizer, wikitext=wikitext, documents=documents, window=window, limit=limit))

    return command


def convert() -> Callable[..., None]:
    """quantise a float checkpoint on disk, with one layer in memory at a time"""

    def command(
        model: Path,
        recipe: str,
        out: Path,
        layers: tuple[str, ...] = (),
        skip: tuple[str, ...] = (),
        max_shard_size: str = "5GB",
        device: str = "cpu",
        dtype: str = "auto",
        verify: int = 4,
    ) -> None:
        """Quantise a float checkpoint on disk, with one layer in memory at a time, and no training.

        The result is what loading the model, aoquant.quantize_ and aoquant.save_pretrained would write; load it with
        aoquant.load_pretrained, or with transformers after `import aoquant`. It appears under its name when it is complete.
        The output head is left in high precision unless --layers names it.

        Args:
            model: folder with config.json and safetensors files, of a model that transformers knows.
            recipe: a name from `aoquant recipes`, or two from `aoquant formats` as WEIGHT/ACTIVATION, for every linear layer but the head.
            out: folder to write; must not exist, or be empty.
            layers: other recipes for some layers, as NAME=RECIPE; NAME is a layer's name, or re: and a pattern for all of it, such as
                're:.*down_proj=int8-weight'.
            skip: layers to leave in high precision, by NAME.
            max_shard_size: of the files written, such as 5GB or 500MB.
            device: where layers are quantised.
            dtype: of the layers before they are quantised: float32, bfloat16, float16, or auto, which is config.json's.
            verify: how many layers to read back and compare, bit for bit.
        """
        from aoquant.recipes import mixed

        config = mixed(recipe, layers, skip)  # a wrong name is an error before transformers is imported
        from aoquant.integrations.stream import convert_checkpoint

        print(
            convert_checkpoint(
                model, config, out, max_shard_size=max_shard_size, device=device, dtype=dtype, verify=verify
            )
        )

    return command


def formats() -> Callable[..., None]:
    """list the number formats"""

    def command() -> None:
        """List the number formats with their bits per weight, and how other names are put together."""
        rows = []
        for name in list_formats():
            f = get_format(name)
            rows.append((name, f.bits, f.block or "-", round(f.bits_per_weight(4096, 4096), 3)))
        _print_table(rows, ("format", "bits", "block", "bits per weight (4096 x 4096)"))
        print()
        _print_table(list(COMPOSED.items()), ("names that are put together, such as", "what it is"))

    return command


def recipes() -> Callable[..., None]:
    """list the recipes that run takes"""

    def command() -> None:
        """List the recipes that `aoquant run --recipe` takes."""
        from aoquant.recipes import list_recipes

        _print_table(
            [(r.name, type(r.make()).__name__, r.about) for r in list_recipes()], ("recipe", "config", "leaves")
        )

    return command


def doctor() -> Callable[..., None]:
    """show what this machine can run, and why not the rest"""

    def command() -> None:
        """Show versions, devices, and which recipes and backends run here, with reasons."""
        from aoquant.tools import doctor as checks

        _print_table(checks.versions(), ("what", "found"))
        print()
        _print_table(checks.backends(), ("backend", "here"))
        print()
        _print_table(checks.recipes(), ("recipe", "trains", "converted layer runs", "prepared == converted"))

    return command


def _print_table(rows: list[tuple[Any, ...]], heads: tuple[str, ...]) -> None:
    from tabulate import tabulate

    print(tabulate(rows, heads, tablefmt="github"))


def export() -> Callable[..., None]:
    """write a converted checkpoint for vLLM, SGLang, transformers or llama.cpp"""
    from aoquant.export.command import command

    return command


COMMANDS = {
    "run": run,
    "eval": evaluate,
    "convert": convert,
    "export": export,
    "formats": formats,
    "recipes": recipes,
    "doctor": doctor,
}


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `aoquant` command."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        import tyro
    except ImportError:
        sys.exit("aoquant: the command line needs its extras: pip install 'aoquant[all]'")
    # only the chosen command's module is imported: `aoquant formats` does not wait for transformers
    chosen = arguments[0] if arguments else ""
    makers = {chosen: COMMANDS[chosen]} if chosen in COMMANDS else {}
    try:
        if makers:
            tyro.cli(
                makers[chosen](), prog=f"aoquant {chosen}", args=arguments[1:], config=(tyro.conf.OmitArgPrefixes,)
            )
        elif chosen in ("", "-h", "--help"):
            print("usage: aoquant {" + ",".join(COMMANDS) + "} [--help]\n")
            print("\n".join(f"  {name:9}{maker.__doc__}" for name, maker in COMMANDS.items()))
        else:
            raise ValueError(f"no command is called {chosen!r}; there are: {', '.join(COMMANDS)}")
    except (ValueError, ImportError) as error:
        print(f"aoquant: {error}", file=sys.stderr)
        sys.exit(2)
