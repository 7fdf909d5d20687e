"""Small helpers that programs import from horovod.common.util."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from mpiddp.horovod import questions
from mpiddp.horovod.adasum import is_power_of_two

__all__ = [
    "ccl_built",
    "check_extension",
    "ddl_built",
    "env",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

Element = TypeVar("Element")


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless this is about PyTorch: mpiddp is for nothing else. Not collective.

    Args:
        ext_name: such as "horovod.torch".
        ext_env_var: without effect, as those that follow.
        pkg_path: of Horovod's files.
        args: of Horovod's files.
    """
    if ext_name.rpartition(".")[2] != "torch":
        raise ImportError(f"mpiddp stands in for Horovod on PyTorch, and not for {ext_name}")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether `ext_base_name` is "torch". Not collective."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether torch sees a GPU. Not collective."""
    return ext_base_name == "torch" and torch.cuda.is_available()


def mpi_built(verbose: bool = False) -> bool:
    """Return True. Not collective."""
    return questions.mpi_built()


def gloo_built(verbose: bool = False) -> bool:
    """Return False. Not collective."""
    return questions.gloo_built()


def nccl_built(verbose: bool = False) -> bool:
    """Return False. Not collective."""
    return bool(questions.nccl_built())


def ddl_built(verbose: bool = False) -> bool:
    """Return False. Not collective."""
    return questions.ddl_built()


def ccl_built(verbose: bool = False) -> bool:
    """Return False. Not collective."""
    return questions.ccl_built()


@contextmanager
def env(**kwargs: Any) -> Iterator[None]:
    """Within, have these variables in the environment; None removes one. Not collective."""
    before = {name: os.environ.get(name) for name in kwargs}
    _set(kwargs)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, Any]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether it is 1, 2, 4 and so on. Not collective."""
    return is_power_of_two(num_rank)


def split_list(l: Sequence[Element], n: int) -> list[Sequence[Element]]:  # noqa: E741
    """Return `n` parts of neighbours; the first ones have one more. Not collective."""
    least, more = divmod(len(l), n)
    ends = [part * least + min(part, more) for part in range(n + 1)]
    return [l[ends[part] : ends[part + 1]] for part in range(n)]


def is_iterable(x: Any) -> bool:
    """Return whether `iter` takes it. Not collective."""
    try:
        iter(x)
    except TypeError:
        return False
    return True
