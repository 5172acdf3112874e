"""Prepares the documents for the site of ``make docs``: mkdocs calls the functions ``on_…``.

The documents are written for a forge, which shows every file of the repository. The site has only
``docs/``, so a Markdown file of ``OUTSIDE`` becomes a page of it. A link to any other file goes to
``repo_url``, if mkdocs.yml has one, and is plain text if not.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/*.md",
    "patches/README.md",
    "tools/README.md",
)
EXTENSIONS = "sglang_inflight/extensions/*/README.md"

_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_ELSEWHERE = re.compile(r"[a-z]+:|#")
_COMMENT = re.compile(r"^(<!-- .* -->)$\n?", re.MULTILINE)
# a line of a paragraph, and a list behind it
_LIST = re.compile(r"^((?![-*|<#]|\d+\. |[ ]).+)\n(?=- )", re.MULTILINE)
# a flag in code outside of blocks. A browser breaks it behind its hyphens; a longer one needs that.
_CODE = re.compile(r"(<pre\b.*?</pre>)|(<code>[^<]*</code>)", re.DOTALL)
_FLAG = re.compile(r"(?<![\w-])--[a-z0-9][a-z0-9-]{1,30}(?![\w-])")


def outside(pattern: str) -> list[str]:
    """Return the files of ``pattern``, relative to the repository."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def on_config(config: Any) -> Any:
    """Give the extensions' pages their place in the navigation."""
    config.nav.append({"Extensions": outside(EXTENSIONS)})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Make pages of the files outside of ``docs/``."""
    # the tests' environment has no mkdocs, and reads this module
    generated = importlib.import_module("mkdocs.structure.files").File.generated
    for pattern in (*OUTSIDE, EXTENSIONS):
        for name in outside(pattern):
            files.append(generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(text: str, page: Any, config: Any, files: Any) -> str:
    places = {
        (DOCS if file.generated_by is None else "") + file.src_uri: file.src_uri for file in files
    }
    (name,) = (name for name, uri in places.items() if uri == page.file.src_uri)
    if not name.startswith(DOCS):
        # a search finds pages for users before those about code
        page.meta["search"] = {"boost": 0.5}
    return prepared(text, name, places, config.repo_url)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Mark short flags, for site.css."""
    return _CODE.sub(
        lambda code: code[1] or _FLAG.sub(r'<span class="flag">\g<0></span>', code[2]), html
    )


def prepared(text: str, name: str, places: Mapping[str, str], repo_url: str | None) -> str:
    """Return the text of the document ``name`` as Python-Markdown and the site need it.

    ``places`` has the place in the site of each file that is in it, by its path in the repository.
    """
    parts = _FENCED.split(text)
    # every second part is a fenced block
    parts[::2] = [_prepared_prose(part, name, places, repo_url) for part in parts[::2]]
    return "".join(parts)


def _prepared_prose(text: str, name: str, places: Mapping[str, str], repo_url: str | None) -> str:
    def relinked(link: re.Match[str]) -> str:
        words, target = link.groups()
        if _ELSEWHERE.match(target):
            return link[0]
        path, hash_, anchor = target.partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(name), path))
        for each in (path, f"{path}/README.md"):
            if each in places:
                to = os.path.relpath(places[each], os.path.dirname(places[name]))
                return f"[{words}]({to}{hash_}{anchor})"
        if not (ROOT / path).exists():
            # mkdocs warns of it
            return link[0]
        if not repo_url:
            return words
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{words}]({repo_url.rstrip('/')}/{kind}/HEAD/{path}{hash_}{anchor})"

    # a forge needs no empty line before a list and behind a comment, and Python-Markdown does
    return _LIST.sub(r"\1\n\n", _COMMENT.sub(r"\1\n\n", _LINK.sub(relinked, text)))
