"""Run a script that was written for torchrun, as it is, on MPI.

mpirun -n 16 python -m mpiddp train.py --epochs 5
"""

import sys

from mpiddp.runner.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
