from mpiddp.gpu.runtime import Runtime, Stream

class Adder:
    runtime: Runtime
    device: int
    stream: Stream
    library: str
    def __init__(self, runtime: Runtime, device: int) -> None: ...
    def add(self, element: int, to: int, source: int, count: int) -> None: ...
