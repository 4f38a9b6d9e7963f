"""Text that every machine has: the prose of the standard library's docstrings, a document for each module.

Paragraphs of sentences are taken; doctests, lists, tables and signatures are left out. Files are parsed and not
imported. The modules are pure Python and have hardly changed from 3.11 to 3.14; a module that a version lacks is left
out. What is held out is of other packages than what is trained on.
"""

import ast
import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path

# fmt: off
TRAIN = (
    "argparse", "ast", "asyncio/base_events", "asyncio/events", "asyncio/futures", "asyncio/protocols",
    "asyncio/streams", "asyncio/tasks", "asyncio/transports", "asyncio/unix_events", "base64", "bdb", "bz2", "code",
    "codecs", "collections/__init__", "concurrent/futures/_base", "concurrent/futures/process", "configparser",
    "difflib", "doctest", "email/_header_value_parser", "email/_policybase", "email/charset", "email/header",
    "email/headerregistry", "email/message", "email/policy", "fileinput", "ftplib", "functools", "gzip",
    "http/client", "http/cookiejar", "http/cookies", "http/server", "imaplib", "importlib/_bootstrap",
    "importlib/_bootstrap_external", "inspect", "ipaddress", "json/__init__", "json/decoder", "json/encoder",
    "locale", "logging/__init__", "logging/config", "logging/handlers", "lzma", "mailbox", "mimetypes", "numbers",
    "optparse", "os", "pdb", "pickletools", "pkgutil", "platform", "poplib", "_pydecimal", "pydoc", "_pyio",
    "queue", "random", "re/__init__", "shelve", "shutil", "site", "smtplib", "socket", "ssl", "statistics",
    "subprocess", "tarfile", "tempfile", "threading", "unittest/case", "unittest/loader", "unittest/mock",
    "urllib/parse", "urllib/request", "uuid", "venv/__init__", "wave", "weakref", "wsgiref/handlers",
    "wsgiref/headers", "wsgiref/validate", "xml/etree/ElementTree", "xml/sax/handler", "xml/sax/xmlreader",
    "xmlrpc/client", "xmlrpc/server",
)
HELD_OUT = (
    "_collections_abc", "cmd", "contextlib", "getopt", "graphlib", "heapq", "pickle", "sched", "socketserver",
    "textwrap", "timeit",
)
# fmt: on


def docstrings(source: str) -> str:
    """Return the docstrings of a module, its classes and functions, in the order of the file.

    Raises:
        SyntaxError: `source` is not Python.
    """
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        (getattr(node, "lineno", 0), ast.get_docstring(node))
        for node in ast.walk(ast.parse(source))
        if isinstance(node, kinds)
    ]
    return "\n\n".join(text for _, text in sorted(found, key=lambda pair: pair[0]) if text)


def prose(text: str) -> str:
    """Return a text's paragraphs of sentences, a line each: a capital to a full stop, six words, none indented."""
    found = []
    for paragraph in text.split("\n\n"):
        words = paragraph.split()
        marked = any(line.startswith((" ", "\t", ">>>", "-", "*", "|")) for line in paragraph.split("\n"))
        if len(words) >= 6 and not marked and words[0][0].isupper() and words[-1].endswith((".", ":")):
            found.append(" ".join(words))
    return "\n\n".join(found)


def sources(modules: Iterable[str]) -> list[str]:
    """Return the source of each module of the standard library that is there, named by its path without ".py"."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [root / f"{name}.py" for name in modules]
    return [file.read_text(encoding="utf-8") for file in files if file.is_file()]


def standard_library(modules: Iterable[str]) -> list[str]:
    """Return a document of prose for each module of `sources`."""
    return [page for source in sources(modules) if (page := prose(docstrings(source)))]


def write(folder: Path) -> tuple[Path, Path]:
    """Write train.jsonl and heldout.jsonl, a `{"page": ...}` a line, into `folder`, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "train.jsonl", folder / "heldout.jsonl"
    for path, modules in zip(paths, (TRAIN, HELD_OUT), strict=True):
        lines = [json.dumps({"page": page}, ensure_ascii=False) + "\n" for page in standard_library(modules)]
        path.write_text("".join(lines), encoding="utf-8")
    return paths
