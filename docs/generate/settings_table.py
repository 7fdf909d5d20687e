"""The table of mpiddp's environment variables, made of what mpiddp/settings.py declares.

python docs/generate/settings_table.py
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load_settings() -> ModuleType:
    """Return mpiddp/settings.py, loaded by its path: importing mpiddp would load torch."""
    path = ROOT / "mpiddp" / "settings.py"
    spec = importlib.util.spec_from_file_location("mpiddp_settings", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up
    spec.loader.exec_module(module)
    return module


def table() -> str:
    """Return a line for each variable."""
    lines = [
        "| variable | values | default | same on all ranks | meaning |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{setting.name}` | {_kind(setting.type)} | {_default(setting.default)} "
        f"| {'yes' if setting.same_on_all_ranks else 'no'} | {_cell(setting.meaning)} |"
        for setting in load_settings().SETTINGS
    ]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _kind(value: object) -> str:
    return value.__name__ if isinstance(value, type) else _cell(value)


def _default(value: object) -> str:
    return "unset" if value in (None, "") else f"`{_cell(value)}`"


if __name__ == "__main__":
    print(table())
