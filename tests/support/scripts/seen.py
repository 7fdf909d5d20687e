"""Tell what a program sees of how it was started, and use processes that import it again."""

import json
import multiprocessing
import pickle
import sys


class Thing:
    value = 1


def double(x):
    return 2 * x


if __name__ == "__main__":
    assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
    spec = globals().get("__spec__")
    # Python cannot do this in programs that are a package, a folder or an archive.
    if "spawn" in sys.argv:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(double, [1, 2]) == [2, 4]
    print(json.dumps({
        "name": __name__,
        "file": __file__,
        "spec": spec and [spec.name, spec.origin, spec.parent],
        "package": __package__,
        "loader": type(__loader__).__name__,
        "cached": globals().get("__cached__"),
        "argv": sys.argv,
        "path": sys.path[0],
        "module": sys.modules["__main__"].__dict__ is globals(),
    }))  # fmt: skip
    if "fail" in sys.argv:
        raise ValueError("broken on purpose")
