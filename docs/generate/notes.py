"""The index of the Notes: the design arguments that stand once in the sources, and where.

python docs/generate/notes.py
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("mpiddp", "cython")
SUFFIXES = {".py", ".pyx", ".pxd", ".h"}

# A title has its line for itself, which tells it from a reference.
_TITLE = re.compile(r"^(?P<margin>[ /*]*)Note \[(?P<title>[^\]]+)\]\n(?:[ *]*~{4,}\n)?", re.M)
_REFERENCE = re.compile(r"Note\s+\[([^\]]+)\]")


@dataclass(frozen=True)
class Note:
    """One note: its title, the file that it is in, and its text."""

    title: str
    path: Path
    text: str

    @property
    def anchor(self) -> str:
        """The id of its heading on the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


def sources() -> list[Path]:
    """Return the files that may hold notes or refer to them."""
    return sorted(
        path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES
    )


def find() -> list[Note]:
    """Return all notes, in order of their titles."""
    notes = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        titles = list(_TITLE.finditer(text))
        ends = [*(title.start() for title in titles[1:]), len(text)] if titles else []
        for title, end in zip(titles, ends, strict=True):
            body = re.split(r'"""|\*/', text[title.end() : end])[0]
            # In a C comment each line begins with a star.
            body = re.sub(r"^ \* ?", "", body, flags=re.M) if "*" in title["margin"] else body
            notes.append(Note(title["title"], path.relative_to(ROOT), inspect.cleandoc(body)))
    return sorted(notes, key=lambda note: note.title)


def references() -> dict[str, set[Path]]:
    """Return the titles that the sources refer to or define, and in which files."""
    where: dict[str, set[Path]] = {}
    for path in sources():
        # A reference may be broken over two lines, of a comment as well.
        text = re.sub(r"\n[ #*]*", " ", path.read_text(encoding="utf-8"))
        for title in _REFERENCE.findall(text):
            where.setdefault(title, set()).add(path.relative_to(ROOT))
    return where


def index() -> str:
    """Return a table of all notes, and the notes."""
    notes = find()
    used = references()
    parts = ["| note | in |\n| --- | --- |\n"]
    parts += [f"| [{note.title}](#{note.anchor}) | `{note.path}` |\n" for note in notes]
    for note in notes:
        others = sorted(map(str, used[note.title] - {note.path}))
        said = f" Referred to in {', '.join(f'`{name}`' for name in others)}." if others else ""
        parts.append(
            f"\n## {note.title} {{ #{note.anchor} }}\n\nIn `{note.path}`.{said}\n\n"
            f"```text\n{note.text}\n```\n"
        )
    return "".join(parts)


if __name__ == "__main__":
    print(index())
