from collections.abc import Sequence

import numpy

COMPARED: int

Seconds = tuple[float, float, float, float, float, float]

class StepTimes:
    steps: int
    idle_steps: int
    def last(self) -> Seconds: ...
    def numbers(self) -> dict[str, float]: ...
    def totals(self) -> Seconds: ...
    def last_waits(self) -> list[float]: ...
    def show_comparison(
        self, last: numpy.ndarray, waited: float, mean_step: float, world_ranks: Sequence[int]
    ) -> None: ...

def seconds_per_show(count: int) -> float: ...
