"""A process of its own for a test, without the seconds that importing torch and transformers takes.

It is forked from a server that has imported torch, torchao and transformers. Aoquant it imports itself. What a bare
interpreter does is for `subprocess` to say.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

METHOD = "forkserver"
context = multiprocessing.get_context(METHOD)
context.set_forkserver_preload(["torch", "torchao.quantization", "transformers.models.llama.modeling_llama"])


def process(target: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """target(*arguments) in a new process that has begun, under this one's environment: the server's is older."""
    begun = context.Process(target=_under, args=(dict(os.environ), target, *arguments))
    begun.start()
    return begun


def _under(environment: Mapping[str, str], target: Callable[..., None], *arguments: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


def call(target: Callable[..., None], *arguments: Any) -> None:
    """target(*arguments) in a new process, to its end."""
    begun = process(target, *arguments)
    begun.join()
    assert begun.exitcode == 0, "what it raised stands in its output"


def python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """As subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)."""
    argv = ["-c", *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        begun = process(_run, program, argv, said)
        begun.join()
        assert begun.exitcode is not None
        return subprocess.CompletedProcess(argv, begun.exitcode, *(path.read_text() for path in said))


def script(path: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """As `python path *arguments`."""
    return python(_SCRIPT, path, *arguments)


_SCRIPT = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _run(program: str, argv: list[str], said: list[Path]) -> None:
    for descriptor, path in zip((1, 2), said, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    sys.argv = argv
    exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
