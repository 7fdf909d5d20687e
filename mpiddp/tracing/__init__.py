"""A trace: when each rank did what in some steps, on one clock, as Chrome's JSON.

    with mpiddp.trace("folder", steps=20):
        ...  # train

or `python -m mpiddp --trace folder train.py`. docs/how-to/trace.md tells what is in the files.

May import: the leaves, system, mpi, torch_internals, engine, flight_recorder and rendezvous.
Must never cost anything while no trace is on.
"""
