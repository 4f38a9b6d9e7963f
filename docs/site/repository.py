"""A MkDocs hook: the site has the version of the package, and links to files of the repository lead to copies on it.

A page is read in two places. In the repository `../aoquant/formats/int4.py` is a file beside the docs; the site holds
only what lies under docs/. So each linked file becomes a page under repository/: Markdown as it is, a folder as a list
of its files, anything else as its text. Links are rewritten to these pages, and MkDocs checks them, anchors included,
like any other. A link to no file stays as it is, so that a strict build stops at it.
"""

from __future__ import annotations

import html
import importlib.metadata
import os
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
COPIES = "repository"
FENCE = re.compile(r"^(```|~~~).*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(?:https?:)?//[^>]*>")


def on_config(config: MkDocsConfig) -> None:
    """Name the version that the site describes: that of the installed package."""
    config.site_name = f"{config.site_name} {importlib.metadata.version('aoquant')}"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each repository file that a page links to, and for those that such a Markdown file links to."""
    waiting = [(Path(config.docs_dir, f.src_uri), _text(f)) for f in files.documentation_pages()]
    while waiting:
        source, text = waiting.pop()
        for target in _outside(source, text):
            uri = _uri(target)
            if files.get_file_from_path(uri) is None:
                content = _copy(target)
                files.append(File.generated(config, uri, content=content))
                waiting.append((target, content if target.suffix == ".md" else ""))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/ to the copies, and links of a copy that come back."""
    here = page.file.src_uri
    source = _source(here)

    def rewrite(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(source.parent / match[1]))
        if not target.exists():
            return match[0]
        inside = target.is_relative_to(ROOT / "docs") and target.suffix in (".md", ".svg")
        uri = target.relative_to(ROOT / "docs").as_posix() if inside else _uri(target)
        return os.path.relpath(uri, os.path.dirname(here)) + (match[2] or "")

    return _outside_fences(markdown, lambda prose: LINK.sub(rewrite, prose))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would load something from another machine."""
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads {found[0]}: a page of the site loads nothing from elsewhere")
    return output


def _text(file: File) -> str:
    return Path(file.abs_src_path).read_text(encoding="utf-8") if file.abs_src_path else ""


def _outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """`markdown` with what is not in a fenced block changed."""
    done, end = [], 0
    for fence in FENCE.finditer(markdown):
        done += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*done, change(markdown[end:])])


def _outside(source: Path, text: str) -> list[Path]:
    """The existing files and folders outside docs/ that a page links to."""
    found = (Path(os.path.normpath(source.parent / m[1])) for m in LINK.finditer(FENCE.sub("", text)))
    return [t for t in found if t.exists() and t.is_relative_to(ROOT) and not t.is_relative_to(ROOT / "docs")]


def _uri(target: Path) -> str:
    """Where the copy of a repository file stands in the site's sources."""
    path = target.relative_to(ROOT).as_posix()
    if target.suffix == ".md":
        return f"{COPIES}/{path}"
    return f"{COPIES}/{path}/index.md" if target.is_dir() else f"{COPIES}/{path}.md"


def _source(uri: str) -> Path:
    """The file that a page was made from: the inverse of `_uri` for Markdown."""
    return ROOT / uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else ROOT / "docs" / uri


def _copy(target: Path) -> str:
    """The page that shows a file of the repository."""
    if target.suffix == ".md":
        return target.read_text(encoding="utf-8")
    name = target.relative_to(ROOT).as_posix()
    if target.is_dir():
        body = "\n".join(f"- `{p.name}`" for p in sorted(target.iterdir()) if not p.name.startswith(("_", ".")))
    else:
        body = f"<pre><code>{html.escape(target.read_text(encoding='utf-8'))}</code></pre>"
    return f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n{body}\n"
