"""Count relative clauses a sentence, in docs and in docstrings.

``python -m tests.support.prose`` prints the count of each document and of each top folder's
docstrings. ``python -m tests.support.prose --show FILE`` prints a file's sentences with two or
more.

A relative clause is counted by its first word: ``who``, ``whom``, ``whose``, ``which``, ``what``,
``whatever``, ``whoever``, or ``that`` except after a verb of saying ("says that"). Code and the
targets of links are left out. A cell of a table is a sentence.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

DOCS = ("README.md", "patches/README.md", "docs/**/*.md", "sglang_inflight/extensions/*/README.md")
FOLDERS = ("sglang_inflight", "tools", "tests", "benchmarks", "harness")

_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"``[^`]+``|`[^`\n]+`")
_TARGET = re.compile(r"\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n|\s\|\s|\n\s*[-*|#]\s*|\n\s*\d+\.\s")
_SAYING = (
    r"say|says|said|tell|tells|show|shows|mean|means|know|knows|see|sees|prove|proves|promise|"
    r"promises|expect|expects|so|such|now|note|argue|argues|sure|likely|report|reports|"
    r"check|checks|require|requires|assume|assumes|ensure|ensures"
)
_RELATIVE = re.compile(
    r"\b(who|whom|whose|which|what|whatever|whoever)\b|(?<=[\w,] )(that)\b", re.IGNORECASE
)
_BEFORE = re.compile(rf"\b(?:{_SAYING})\W+$", re.IGNORECASE)


def sentences(text: str) -> list[str]:
    """Return the sentences of Markdown or of a docstring, with code replaced by one word."""
    text = _TARGET.sub("]", _CODE.sub("X", _FENCE.sub("", text)))
    parts = (" ".join(part.split()) for part in _END.split(text))
    return [part for part in parts if len(re.findall(r"[A-Za-z]{2,}", part)) >= 2]


def relative_clauses(sentence: str) -> int:
    found = 0
    for match in _RELATIVE.finditer(sentence):
        is_that = match.group(2) is not None
        if not is_that or not _BEFORE.search(sentence[: match.start()]):
            found += 1
    return found


def docstrings(path: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text


def subjectless_comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment that begins with "of", "by" or "as".

    Such a comment leaves its noun to the code below it. A line that goes on with the comment of the
    line before is no beginning.
    """
    before = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type != tokenize.COMMENT or token.line[: token.start[1]].strip():
            continue
        line = token.start[0]
        if line != before + 1 and re.match(r"# (?:of|by|as) ", token.string):
            yield line, token.string
        before = line


def text_of(path: Path) -> str:
    return "\n\n".join(docstrings(path)) if path.suffix == ".py" else path.read_text()


def show_count(name: str, text: str) -> None:
    all_of_it = sentences(text)
    clauses = sum(map(relative_clauses, all_of_it))
    words = sum(len(s.split()) for s in all_of_it)
    count = max(1, len(all_of_it))
    print(f"{clauses / count:5.2f}  {words / count:5.1f}  {len(all_of_it):6}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--show", type=Path, nargs="+", default=[])
    arguments = parser.parse_args()
    for path in arguments.show:
        for sentence in sentences(text_of(path)):
            if (clauses := relative_clauses(sentence)) > 1:
                print(f"{clauses}  {sentence}")
        show_count(str(path), text_of(path))
    if arguments.show:
        return
    print("clauses and words a sentence, sentences")
    for pattern in DOCS:
        for path in sorted(Path().glob(pattern)):
            show_count(str(path), path.read_text())
    for folder in FOLDERS:
        show_count(folder, "\n\n".join(text_of(p) for p in sorted(Path(folder).rglob("*.py"))))


if __name__ == "__main__":
    main()
