"""What the documentation site adds to MkDocs: links to repository files, and parameters in docstrings. `make docs`
builds the whole.
"""

from __future__ import annotations

import io
import logging
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("griffe")

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort

ROOT = Path(__file__).parents[2]


def site(folder: Path, page: str) -> Path:
    """The site of one page, strict, with the hook as it is; the page lies beside the real ones' `figures`."""
    docs = folder / "docs"
    (docs / "site").mkdir(parents=True)
    (docs / "site" / "repository.py").write_text((ROOT / "docs" / "site" / "repository.py").read_text())
    (docs / "README.md").write_text(page)
    (folder / "code.py").write_text('"""Two lines.\n\n# no heading <b>"""\n')
    (folder / "NOTES.md").write_text("# Notes\n\n## Part\n\n[code](code.py) [page](docs/README.md)\n")
    (folder / "mkdocs.yml").write_text(
        "site_name: x\nexclude_docs: '*.py'\nhooks: [docs/site/repository.py]\nuse_directory_urls: false\n"
        "theme: {name: null, custom_dir: theme}\nplugins: []\n"
        "validation: {links: {not_found: warn, anchors: warn}}\n"
    )
    (folder / "theme").mkdir()
    (folder / "theme" / "main.html").write_text("{{ page.content }}")
    build(load_config(str(folder / "mkdocs.yml"), strict=True))
    return folder / "site"


def test_links_to_repository_files_lead_to_copies(tmp_path: Path) -> None:
    page = "# A\n\n[n](../NOTES.md#part) [c](../code.py) [f](../theme)\n\n```\n[c](../code.py)\n```\n"
    out = site(tmp_path, page)
    index = (out / "index.html").read_text()
    assert 'href="repository/NOTES.html#part"' in index and 'href="repository/code.py.html"' in index
    assert "[c](../code.py)" in index  # code is left alone
    code = (out / "repository" / "code.py.html").read_text()
    assert "<pre><code>&quot;&quot;&quot;Two lines.\n\n# no heading &lt;b&gt;" in code
    notes = (out / "repository" / "NOTES.html").read_text()
    assert 'href="code.py.html"' in notes and 'href="../index.html"' in notes
    assert "<code>main.html</code>" in (out / "repository" / "theme" / "index.html").read_text()


def test_the_site_names_the_version_of_the_package(tmp_path: Path) -> None:
    site(tmp_path, "# A\n")
    config = load_config(str(tmp_path / "mkdocs.yml"))
    assert config.plugins.on_config(config).site_name == f"x {version('aoquant')}"


@pytest.mark.parametrize("link", ["../missing.py", "../NOTES.md#nowhere", "other.md"])
def test_a_link_to_nothing_stops_the_build(link: str, tmp_path: Path) -> None:
    with pytest.raises(Abort):
        site(tmp_path, f"# A\n\n[x]({link})\n")


def test_a_page_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    logger, said = logging.getLogger("mkdocs"), io.StringIO()
    logger.addHandler(handler := logging.StreamHandler(said))
    try:
        with pytest.raises(Abort):
            site(tmp_path, '# A\n\n<script src="https://example.org/x.js"></script>\n')
    finally:
        logger.removeHandler(handler)
    assert "loads nothing from elsewhere" in said.getvalue()
