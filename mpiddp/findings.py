"""What a diagnosis finds: how bad it is, what it is, and what to do about it. A leaf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Finding", "Grade", "worst"]

# Whether all is well, whether training works but not as it could, or whether it does not work.
Grade = Literal["ok", "warning", "error"]
_ORDER: tuple[Grade, ...] = ("ok", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """One line of a report.

    Attributes:
        grade: how bad it is.
        text: what was found.
        remedy: what to do about it; only where all is well may it be missing.
    """

    grade: Grade
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.grade != "ok" and not self.remedy:
            raise ValueError(f"no remedy for: {self.text}")


def worst(findings: Iterable[Finding]) -> Grade:
    """Return the worst grade of several findings. Not collective."""
    return max((finding.grade for finding in findings), key=_ORDER.index, default="ok")
