COMPARED: int

Seconds = tuple[float, float, float, float, float, float]

class StepTimes:
    steps: int
    idle_steps: int
    def last(self) -> Seconds: ...
    def totals(self) -> Seconds: ...
    def last_waits(self) -> list[float]: ...
