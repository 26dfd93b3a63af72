"""Provide the hooks of `mkdocs build`, which add generated pages and rewrite links out of docs/.

Generated pages are never checked in, so they cannot become stale. They are the API reference (one
page per package with an `__all__`), the reference of commands (from their `--help` output), the
top-level documents such as ARCHITECTURE.md, and one page per source file to which a page links.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mkdocs loads only this file

from tools.docs import reference
from tools.docs.links import LINK, split_fences
from tools.docs.reference import TOP_LEVEL

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
_CITED_PAGE = re.compile(r"`docs/([\w./-]+\.md)`")
_LANGUAGES = {".py": "python", ".h": "c", ".sh": "bash", ".yaml": "yaml", ".sbatch": "bash"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of the API reference to the navigation."""
    for section in config.nav or []:
        for entries in section.values():
            for entry in entries if isinstance(entries, list) else []:
                if isinstance(entry, dict) and "API" in entry:
                    entry["API"] = [
                        {room.module: room.page} for room in reference.documented_packages(ROOT)
                    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site's files."""
    pages = {room.page: room.markdown() for room in reference.documented_packages(ROOT)}
    pages["reference/commands.md"] = reference.commands_page()
    for source, page in TOP_LEVEL.items():
        if (ROOT / source).exists():
            pages[page] = _with_links_from_docs((ROOT / source).read_text(), source)
    for cited in sorted(_cited_sources(files)):
        pages.setdefault(f"source/{cited}.md", _source_page(cited))
    for page, markdown in pages.items():
        files.append(File.generated(config, page, content=markdown))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Convert links to files outside docs/, and cited `docs/` pages, into links within the site."""
    folder = PurePosixPath(page.file.src_uri).parent

    def link(match: re.Match[str]) -> str:
        cited = _leaves_docs(folder, match["target"])
        if cited is None:
            return match[0]
        return f"{match['text']}({_relative(_page_of(cited), folder)}{match['anchor'] or ''})"

    def cite(match: re.Match[str]) -> str:
        if files.get_file_from_path(match[1]) is None:
            return match[0]
        return f"[{match[1].removesuffix('.md')}]({_relative(match[1], folder)})"

    return "".join(
        part if is_code else _CITED_PAGE.sub(cite, LINK.sub(link, part))
        for part, is_code in split_fences(markdown)
    )


def _with_links_from_docs(markdown: str, source: str) -> str:
    """Rewrite a top-level document's links as if its page were in docs/."""
    depth = "../" * (len(PurePosixPath(TOP_LEVEL[source]).parts) - 1)

    def link(match: re.Match[str]) -> str:
        target = match["target"]
        path = _normal(PurePosixPath(source).parent / target)
        inside = path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"
        return f"{match['text']}({depth}{inside}{match['anchor'] or ''})"

    return "".join(p if code else LINK.sub(link, p) for p, code in split_fences(markdown))


def _cited_sources(files: Files) -> set[str]:
    cited = set()
    for file in files.documentation_pages():
        folder = PurePosixPath(file.src_uri).parent
        for part, is_code in split_fences(file.content_string):
            for match in () if is_code else LINK.finditer(part):
                path = _leaves_docs(folder, match["target"])
                if path is not None and path not in TOP_LEVEL:
                    cited.add(path)
    return cited


def _source_page(path: str) -> str:
    language = _LANGUAGES.get(PurePosixPath(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{(ROOT / path).read_text()}\n````\n"


def _page_of(path: str) -> str:
    return TOP_LEVEL.get(path, f"source/{path}.md")


def _leaves_docs(folder: PurePosixPath, target: str) -> str | None:
    """Return a link's target, relative to the repository's root, if it is a file outside docs/.

    `folder` is the folder of the linking page, relative to docs/.
    """
    path = _normal(PurePosixPath("docs") / folder / target)
    return None if path.startswith("docs/") or not (ROOT / path).is_file() else path


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _relative(path: str, folder: PurePosixPath) -> str:
    return "../" * len(folder.parts) + path
