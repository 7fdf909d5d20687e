class MPIError(RuntimeError):
    code: int
    call: str
    rank: int
    def __init__(self, message: str, code: int = 0, call: str = "", rank: int = -1) -> None: ...

def error_class(error: BaseException) -> int: ...
