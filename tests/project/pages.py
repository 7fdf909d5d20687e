"""The documentation as the tests see it: its pages, the code blocks on them, and the sources.

A line before a code block says how it is run: `<!-- runs: 2 ranks -->`, the same with `, twice` or
with `, python -m mpiddp`, or `, with MODULE`, which need not be installed. Of a diff, what is left
after it is run.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_BLOCK = re.compile(
    r"^(?P<margin> *)(?:<!-- (?P<mark>[^\n]*?) -->\n *)?```(?P<language>\w*)[^\n]*\n"
    r"(?P<code>.*?)^ *```$",
    re.M | re.S,
)
_SOURCES = {".py", ".pyx", ".pxd", ".h"}


@dataclass(frozen=True)
class Block:
    """A code block: where it stands, how it is marked, its language and its text."""

    page: Path
    line: int
    mark: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def after(self) -> str:
        """Return what the block says; of a diff, what is left after it."""
        return self._without("-") if self.language == "diff" else self.text

    def before(self) -> str:
        """Return what a diff begins with."""
        return self._without("+")

    def _without(self, sign: str) -> str:
        lines = [line for line in self.text.splitlines() if not line.startswith(sign)]
        return "\n".join(line[1:] for line in lines) + "\n"


def pages() -> list[Path]:
    """Return all pages, README.md first."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Return the fenced code blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            found["mark"] or "",
            found["language"],
            textwrap.dedent(found["code"]),
        )
        for found in _BLOCK.finditer(text)
    ]


def sources() -> list[Path]:
    """Return the files of mpiddp: two in the root, and those below its two folders."""
    return sorted(ROOT.glob("mpiddp_*.py")) + [
        path
        for folder in ("mpiddp", "cython")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in _SOURCES
    ]


_DOCSTRING = re.compile(r'"""(?:[^"\\]|\\.|"(?!""))*"""', re.S)
_LITERALS = re.compile(
    r"""(?:\b[fFrRbB]{1,2})?(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""(?:\s+(?:\b[fFrRbB]{1,2})?(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'))*"""
)
_ONE = re.compile(r"""(?:\b[fFrRbB]{1,2})?("(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')""")


def literals(text: str) -> list[str]:
    """Return the strings of a source as `plain` does, joined where they follow each other."""
    joined = (
        "".join(piece[1:-1] for piece in _ONE.findall(found[0]))
        for found in _LITERALS.finditer(_DOCSTRING.sub("''", text))
    )
    return [plain(each) for each in joined]


def plain(message: str) -> str:
    """Return a message in one line, with `…` for what is put in."""
    while (shorter := re.sub(r"\{[^{}]*\}", "…", message)) != message:
        message = shorter
    message = " ".join(message.replace('\\"', '"').replace("\\'", "'").split())
    return re.sub(r"…(?:\s*…)+", "…", message)
