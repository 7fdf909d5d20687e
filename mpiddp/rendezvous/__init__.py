"""The MPI world becomes torch's world: start, store, groups by name, and the end.

May import: the leaves, system, mpi, torch_internals, gpu, engine, flight_recorder, watch,
process_group. Must never know a wrapped module.
"""
