"""The command line: `aoquant run`, `eval`, `convert`, `choose`, `export`, `verify`, `formats`, `recipes`, `doctor`.

Errors that a user can mend are one line and exit code 2, warnings are their text alone, an interrupt is one line and
exit code 130; everything else is a traceback, because it is our mistake.
"""

import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from aoquant._messages import on_command_line
from aoquant.formats import COMPOSED, get_format, list_formats
from aoquant.tools import markdown

# Python's names that many messages hold, and what to type instead. Other advice has both forms where it is given
# (`aoquant._messages.advice`).
_LEAVE_OUT = re.compile(
    r"leave (it|that layer|the layer) out(?: of (?:prepare|quantize_)\b)?(?: with filter_fn| \(filter_fn[^)]*\)| by name)?"
)
_CONFIG = re.compile(r'aoquant\.(FP8|MXFP8|NVFP4)WeightConfig(?:\(granularity="(\w+)"\))?')


def for_the_command_line(message: str) -> str:
    """Return the message with options of the command line in place of Python's names."""
    message = _LEAVE_OUT.sub(
        lambda m: f"leave {m[1]} out with --skip NAME{' or --skip-incompatible' * (m[1] == 'the layer')}", message
    )
    return _CONFIG.sub(lambda m: f"--recipe {m[1].lower()}{f'-{m[2]}' if m[2] else ''}", message)


def _run(arguments: list[str]) -> Callable[..., None]:
    """Return `aoquant run` with the options of a YAML file as its defaults."""
    from aoquant.integrations import job
    from aoquant.integrations.launched import is_first, no_bars_in_logs
    from aoquant.recipes import mixed

    no_bars_in_logs()
    given = job.read_yaml(path) if (path := _take_config(arguments)) else {}

    def command(**groups: Any) -> None:
        """Evaluate float, PTQ and QAT of one model under one recipe; verify, save, print one table.

        Options can stand in a YAML file, as in `aoquant run config.yaml` or `aoquant run --config config.yaml`;
        an option typed here wins over it. The same command again goes on where the last one stopped.
        """
        options = job.Options(**{name: value for group in groups.values() for name, value in vars(group).items()})
        try:
            result = job.run(options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"stages that are done are kept in {options.out}/; the same command goes on"
            ) from None
        if is_first():
            print(result.table())
            layout = None if options.model is None else job.engine_format(mixed(options.recipe))
            refusal = _why_not_exported(options.out / "checkpoint", layout) if layout and not result.exported else ""
            print(f"\n{result.where_to_look(layout, refusal)}")

    parameters = []
    for group in job.GROUPS:  # each is one group of the help
        fields = {name: value for name, value in given.items() if name in group.__dataclass_fields__}
        name = group.__name__.lower()
        default = group(**fields)
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=group))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _take_config(arguments: list[str]) -> Path | None:
    """Remove the YAML file from the arguments of `run` or `convert`: the first one, or that of --config."""
    if arguments and not arguments[0].startswith("-"):
        return Path(arguments.pop(0))
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag == "--config":
            del arguments[i]
            if not equals and i == len(arguments):
                raise ValueError("--config must be a YAML file that exists, got nothing")
            return Path(value if equals else arguments.pop(i))
    return None


def evaluate(
    checkpoint: Path,
    /,
    wikitext: str | None = None,
    documents: Path | None = None,
    window: int | None = None,
    limit: int | None = None,
    bos: bool | None = None,
    device: str | None = None,
) -> None:
    """Load a converted (or float) checkpoint and score it with lm-eval.

    Its logits are compared with those of the run that wrote it. Others are an error where torch and the device are
    those of that run, and a remark elsewhere.

    Args:
        checkpoint: folder that `aoquant run` or `aoquant.save_pretrained` wrote.
        wikitext: "hub", or a folder with WikiText-2 as test.jsonl; by default what the run that wrote the
            checkpoint scored, or held-out generated documents.
        documents: a file of {"page": ...} lines instead.
        window: tokens that a prediction sees at most; by default the run's, or the model's positions, at most 2048.
        limit: score the first documents only; by default as the run did.
        bos: begin every window with the tokenizer's BOS token, if it adds one; by default as the run did, or True.
            False: as lm-eval's own command line.
        device: where to run; by default a GPU that torch can use, or the CPU.
    """
    from aoquant.integrations import job, lm_eval
    from aoquant.integrations.launched import no_bars_in_logs
    from aoquant.tools import doctor as checks

    no_bars_in_logs()
    device = device or checks.default_device()
    checks.check_device(device)
    chosen = job.evaluation(checkpoint, wikitext, documents, window, limit, bos)
    tokenizer, model = job.load_checkpoint(checkpoint, device)
    lm_eval.check_window(model, tokenizer, chosen.window)
    if chosen.about:
        print(chosen.about)
    job.probe(model)
    print(job.check_fingerprint(model, checkpoint))
    print(lm_eval.evaluate(model, tokenizer, **chosen.arguments))


def _convert(arguments: list[str]) -> Callable[..., None]:
    """Return `aoquant convert` with the options of a YAML file, as `aoquant run` reads it, as its defaults."""
    if (path := _take_config(arguments)) is None:
        return convert
    from aoquant.integrations import job

    given: dict[str, Any] = {name: value for name, value in job.read_yaml(path).items() if value is not None}
    if others := given.keys() - inspect.signature(convert).parameters.keys():
        raise ValueError(
            f"{path}: convert has no option {', '.join(sorted(others))}; `aoquant convert --help` lists them"
        )
    for name, type_ in (("model", Path), ("layers", tuple), ("skip", tuple)):  # other types in the options of `run`
        if name in given:
            given[name] = type_(given[name])
    return partial(convert, **given)


def convert(
    model: Path,
    recipe: str,
    out: Path,
    layers: tuple[str, ...] = (),
    embeddings: bool = False,
    embeddings_recipe: str | None = None,
    skip: tuple[str, ...] = (),
    skip_incompatible: bool = False,
    max_shard_size: str = "5GB",
    device: str = "cpu",
    dtype: str = "auto",
    verify: int = 4,
    ptq: str = "nearest",
    calibrate: Path | None = None,
    samples: int = 128,
    length: int | None = None,
    export: Path | None = None,
) -> None:
    """Quantise a float checkpoint on disk, with one layer in memory at a time, and no training.

    With --ptq METHOD it is calibrated on a file of text, block by block; the same command goes on after a kill. Options
    can stand in a YAML file, as in `aoquant convert plan.yaml`, which `aoquant choose` writes.

    The result is what loading the model, aoquant.quantize_ and aoquant.save_pretrained would write; load it with
    aoquant.load_pretrained, or with transformers after `import aoquant`. It appears under its name when it is
    complete. Output heads, embeddings and routers stay in high precision unless --embeddings or --layers names them.

    Args:
        model: folder with config.json and safetensors files, of a model that transformers knows.
        recipe: a name from `aoquant recipes`, or two from `aoquant formats` as WEIGHT/ACTIVATION, for every linear
            layer but the head.
        out: folder to write; must not exist, or be empty.
        layers: NAME ... quantises these layers alone; NAME=RECIPE ... gives some layers another recipe. NAME is a
            layer's name, or re: and a pattern for all of it, such as 're:.*down_proj=int8-weight'.
        embeddings: quantise embeddings and the output head too; a tied pair keeps one weight.
        embeddings_recipe: the same under another recipe, such as gguf-q8_0.
        skip: layers to leave in high precision, by NAME.
        skip_incompatible: leave out layers that cannot take their recipe, and list them, instead of stopping.
        max_shard_size: of the files written, such as 5GB or 500MB.
        device: where layers are quantised, and blocks are calibrated, one at a time.
        dtype: of the layers before they are quantised: float32, bfloat16, float16, or auto, which is config.json's.
        verify: how many layers to read back and compare, bit for bit.
        ptq: nearest rounds each weight. gptq, awq, smoothquant, clip, r1 and r2, or several joined by +, such as
            r1+r2+gptq, calibrate on text.
        calibrate: a file of text (.txt, .jsonl, .xz) for --ptq.
        samples: sequences of text that it sees.
        length: tokens of each, at most the model's positions; by default these, at most 2048.
        export: a folder to write for the engine that the recipe is for, too, and its command.
    """
    from aoquant.recipes import mixed

    config = mixed(recipe, layers, skip)  # a wrong name is an error before transformers is imported
    if embeddings or embeddings_recipe:
        from aoquant.integrations.plans import with_embeddings
        from aoquant.integrations.stream import model_on_meta

        all_layers = with_embeddings(model_on_meta(model, dtype), embeddings_recipe or recipe, layers, skip)
        config = mixed(recipe, all_layers, skip)
    if (ptq == "nearest") != (calibrate is None):
        raise ValueError(f"--calibrate FILE belongs to --ptq METHOD, which needs it, got {ptq} and {calibrate}")
    how: dict[str, Any] = {"dtype": dtype, "skip_incompatible": skip_incompatible}
    if export is not None:
        from aoquant.integrations import job, stream

        job.check_target(export, out)
        job.check_for_engine(model, layout := job.engine_format(config))
        stream.check_export(model, config, layout, calibrated=calibrate is not None, **how)
    how |= {"device": device, "max_shard_size": max_shard_size}
    if calibrate is None:
        from aoquant.integrations.stream import convert_checkpoint

        print(convert_checkpoint(model, config, out, verify=verify, **how))
    else:
        from aoquant.integrations.calibrated import convert_calibrated
        from aoquant.ptq.calibrate_config import CalibrateConfig

        asked = CalibrateConfig(config, method=ptq)
        print(convert_calibrated(model, asked, out, calibrate, samples=samples, length=length, **how))
    _for_engine(config, out, export)


def _for_engine(config: Any, converted: Path, served: Path | None) -> None:
    """Export a converted folder to `served` and print the engine's command; without one, print how, or why not."""
    from aoquant import serving
    from aoquant.export import export as write
    from aoquant.integrations.job import engine_format

    layout = engine_format(config)
    if served is not None:
        try:
            written = write(converted, served, layout)
        except ValueError as error:
            raise ValueError(f"{converted} is written, and whole; {served} is not: {error}") from None
        print(f"written: {written}\n{serving.command(written)}")
        return
    if refusal := _why_not_exported(converted, layout):
        print(f"written: {converted}. It is not ready for an engine: {refusal}")
    else:
        print(f"written: {converted}. For an engine: aoquant export {converted} --format {layout} --out served")


def _why_not_exported(converted: Path, layout: str) -> str:
    """Return why `aoquant export` would refuse a converted folder; "" where it would not."""
    from aoquant.export import check

    try:
        check(converted, layout)
    except (ImportError, ValueError) as error:
        return for_the_command_line(str(error))
    return ""


def choose(
    model: Path,
    candidates: tuple[str, ...],
    bits: float,
    calibrate: Path,
    out: Path | None = None,
    plot: Path | None = None,
    samples: int = 16,
    length: int | None = None,
    engine: str | None = None,
    skip: tuple[str, ...] = (),
    device: str = "cpu",
    dtype: str = "auto",
) -> None:
    """Choose a recipe for each layer under a budget of stored bits, and print what each plan loses.

    Args:
        model: folder of a causal language model, with its tokenizer.
        candidates: names of recipes or formats with dynamic scales.
        bits: stored bits a weight at most, scales included.
        calibrate: a file of text (.txt, .jsonl, .xz).
        out: a YAML file to write: `aoquant run FILE` trains the plan, `aoquant convert FILE` does not train.
        plot: a picture to write, KL against bits.
        samples: sequences of text that are looked at.
        length: tokens of each, at most the model's positions; by default these, at most 512.
        engine: that has to serve every candidate, such as vllm.
        skip: layers to leave in high precision, by NAME.
        device: where the model runs.
        dtype: of the model: float32, bfloat16, float16, or auto, which is config.json's.
    """
    from aoquant.files.atomic import check_file
    from aoquant.integrations.calibrated import calibration
    from aoquant.ptq.choose_formats import check_picture, choose_formats

    for path in filter(None, (out, plot)):
        check_file(path)
    if plot is not None:
        check_picture(plot)
    loaded, _, batches = calibration(model, calibrate, samples, length, device, dtype, longest=512)
    found = choose_formats(loaded, candidates, batches=batches, bits=bits, engine=engine, skip=skip)
    print(found)
    if plot is not None:
        found.plot(plot)
    if out is not None:
        from aoquant.integrations.job import write_plan

        write_plan(found.layers, out, skip)
        print(f"written: {out}")


def formats() -> None:
    """List the number formats with their bits per weight, and how other names are put together.

    Batch-invariant: as an activation's format, it gives a token the same codes and scales whatever else is in the
    batch.
    """
    rows = [
        (f.name, f.bits, f.block or "-", round(f.bits_per_weight(4096, 4096), 3), "yes" if f.batch_invariant else "no")
        for f in map(get_format, list_formats())
    ]
    _print_table(rows, ("format", "bits", "block", "bits per weight (4096 x 4096)", "batch-invariant"))
    print()
    _print_table(list(COMPOSED.items()), ("names that are put together, such as", "what it is"))


def recipes(asked: str | None = None) -> None:
    """List the recipes that `aoquant run --recipe` takes.

    Args:
        asked: an engine and a GPU, such as "vllm h100": what to choose then, with what it costs where that was
            measured. Of budgets it knows one, ptq: recipes that are good without training.
    """
    from aoquant.recipes import list_recipes
    from aoquant.tools import choosing

    if asked is not None:
        found = choosing.find(asked)
        _print_table(choosing.rows(found, code=False), choosing.HEADS)
        caption = f"bits: a weight. PTQ, QAT / float: perplexity over the float model's. {choosing.source()}"
        print(f"\n{markdown.wrapped(caption, 100)}")
        return
    _print_table([(r.name, type(r.make()).__name__, r.about) for r in list_recipes()], ("recipe", "config", "leaves"))
    print("\nFP4 in vLLM: on Hopper activations stay in bfloat16 (train vllm-nvfp4-weight or mxfp4-weight there); on")
    print("Blackwell they are quantised, of weight-only MXFP4 too.")


def doctor() -> None:
    """Show versions, devices, and which recipes and backends run here, with reasons."""
    from aoquant.tools import doctor as checks

    _print_table(checks.versions(), ("what", "found"))
    print()
    _print_table(checks.packages(), checks.Package._fields)
    print()
    _print_table(checks.backends(), ("backend", "here"))
    print()
    _print_table(checks.recipes(), ("recipe", "trains", "converted layer runs", "prepared == converted"))


def verify(folder: Path, /) -> None:
    """Compare the weights of a folder, and what says how they are read, with their checksums.

    Args:
        folder: of `aoquant run` or `aoquant convert`, or one that `aoquant export` wrote, in any of its formats.
    """
    from aoquant.export import verify as folders

    print(folders.verify(folder))


def _print_table(rows: Sequence[tuple[Any, ...]], heads: tuple[str, ...]) -> None:
    """Print a Markdown table, with aligned columns where the extra `cli` is installed."""
    try:
        from tabulate import tabulate
    except ImportError:
        print(markdown.table(heads, [[str(cell) for cell in row] for row in rows]))
        return
    texts = [i for i in range(len(heads)) if all(isinstance(row[i], str) for row in rows)]  # "1.00" stays "1.00"
    print(tabulate(rows, heads, tablefmt="github", disable_numparse=texts))


def export(
    checkpoint: Path,
    /,
    format: Literal["compressed-tensors", "modelopt", "gguf"],
    out: Path,
    skip: tuple[str, ...] = (),
    max_shard_size: str = "5GB",
) -> None:
    """Write a converted checkpoint for a serving engine, one layer in memory at a time. Nothing is rounded.

    A layer whose numbers the format cannot hold is an error that names it and the nearest format that fits; nothing is
    written then. An export that was interrupted continues when the same command is given again, but of gguf
    starts anew.

    Args:
        checkpoint: folder that `aoquant run`, `aoquant convert` or `aoquant.save_pretrained` wrote; of a run, its
            converted model.
        format: compressed-tensors (vLLM, SGLang, transformers), modelopt (vLLM, SGLang, TensorRT-LLM) or gguf
            (llama.cpp).
        out: folder to write; must not exist, or be empty.
        skip: quantised layers to write as floats: names, globs or re: patterns.
        max_shard_size: of the safetensors files, such as 5GB.
    """
    from aoquant import serving
    from aoquant.export import export as write

    written = write(checkpoint, out, format, skip=skip, max_shard_size=max_shard_size)
    print(f"written: {written}\n{serving.command(written)}")


# Commands import what they need themselves: `aoquant formats` does not wait for transformers.
COMMANDS: dict[str, tuple[Callable[..., Any], str]] = {
    "run": (_run, "evaluate float, PTQ and QAT of one model under one recipe; verify, save, print one table"),
    "eval": (evaluate, "load a checkpoint, check that it is bit-equal to the run that wrote it, and score it"),
    "convert": (_convert, "quantise a float checkpoint on disk, with one layer in memory at a time"),
    "choose": (choose, "choose a recipe for each layer under a budget of stored bits"),
    "export": (export, "write a converted checkpoint for vLLM, SGLang, transformers or llama.cpp"),
    "verify": (verify, "compare a folder with the checksums that it was written with"),
    "formats": (formats, "list the number formats"),
    "recipes": (recipes, "list the recipes that run takes, or those for an engine and a GPU"),
    "doctor": (doctor, "show what this machine can run, and why not the rest"),
}


def _command(name: str, arguments: list[str]) -> Callable[..., None]:
    if name == "recipes":
        import tyro

        recipes.__annotations__["asked"] = Annotated[str | None, tyro.conf.arg(name="for")]
    command, _ = COMMANDS[name]
    return command(arguments) if name in ("run", "convert") else command  # whose options may come from a file


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `aoquant` command."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    formatted, outside = warnings.formatwarning, on_command_line.set(True)
    warnings.formatwarning = _one_line  # type: ignore[assignment]
    chosen, rest = arguments[0] if arguments else "", arguments[1:]
    try:
        if chosen == "doctor" and not rest:  # needs no extra: bug reports ask for it
            doctor()
        elif chosen in COMMANDS:
            try:
                import tyro
            except ImportError:
                raise ValueError(f"{chosen} needs the package's extras: pip install 'aoquant[all]'") from None
            command = _command(chosen, rest)
            tyro.cli(command, prog=f"aoquant {chosen}", args=rest, config=(tyro.conf.OmitArgPrefixes,))
        elif chosen in ("", "-h", "--help"):
            print("usage: aoquant {" + ",".join(COMMANDS) + "} [--help], or aoquant --version\n")
            print("\n".join(f"  {name:9}{summary}" for name, (_, summary) in COMMANDS.items()))
        elif chosen == "--version":
            from aoquant import __version__

            print(f"aoquant {__version__}")
        else:
            raise ValueError(f"no command is called {chosen!r}; there are: {', '.join(COMMANDS)}")
    except (ValueError, ImportError) as error:
        print(f"aoquant: {for_the_command_line(str(error))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        print(f"\naoquant: interrupted{f'; {interrupt}' if str(interrupt) else ''}", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `aoquant formats | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    finally:
        warnings.formatwarning = formatted
        on_command_line.reset(outside)


def _one_line(message: Warning | str, *_: Any) -> str:
    """A warning as the command line shows it: without the place in a library that it comes from."""
    return f"aoquant: warning: {for_the_command_line(str(message))}\n"
