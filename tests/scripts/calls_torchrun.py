"""Call torchrun's main from Python, then go on.

python calls_torchrun.py RANKS SCRIPT ARGUMENT...
"""

import sys
import warnings

import torch.distributed.launch
import torch.distributed.run

if __name__ == "__main__":
    ranks, *script = sys.argv[1:]
    before = list(sys.argv), sys.modules["__main__"]
    torch.distributed.run.main(["--nproc-per-node", ranks, "--standalone", *script])
    warnings.simplefilter("ignore")
    torch.distributed.launch.main(["--nproc-per-node", ranks, "--use-env", *script])
    assert (sys.argv, sys.modules["__main__"]) == before
    try:
        torch.distributed.run.main(["--nproc-per-node", ranks, "--no-python", "ls"])
    except ValueError as error:
        if "asked to start the command ls, but python -m mpiddp runs only Python" in str(error):
            print("all well")
