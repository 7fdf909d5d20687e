from collections.abc import Sequence

import torch

ELEMENTS: dict[torch.dtype, int]

def available() -> tuple[str, ...]: ...
def selected() -> str: ...
def use(name: str) -> None: ...
def mean_in_place(
    name: str, buffers: Sequence[torch.Tensor], first: int, count: int, divisor: float
) -> None: ...
def sum_to(
    name: str, out: torch.Tensor, buffers: Sequence[torch.Tensor], first: int, count: int
) -> None: ...
def spread_mean(
    name: str,
    buffers: Sequence[torch.Tensor],
    first: int,
    count: int,
    sums: torch.Tensor,
    divisor: float,
) -> int: ...
def scaled_sum_to(
    name: str,
    out: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    first: int,
    count: int,
    divisor: float,
) -> None: ...
def spread_scaled_mean(
    name: str,
    buffers: Sequence[torch.Tensor],
    first: int,
    count: int,
    sums: torch.Tensor,
    scaled: torch.Tensor,
    divisor: float,
) -> None: ...
def mean_to(
    name: str,
    out: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    first: int,
    count: int,
    divisor: float,
) -> None: ...
def scaled_sum_as_element(
    name: str,
    out: torch.Tensor,
    buffers: Sequence[torch.Tensor],
    first: int,
    count: int,
    divisor: float,
) -> None: ...
def are_finite(name: str, array: torch.Tensor) -> bool: ...
def replace_special(name: str, array: torch.Tensor, other: torch.Tensor) -> None: ...
def convert(name: str, out: torch.Tensor, array: torch.Tensor) -> None: ...
