"""Gradients and buckets, once an iteration: from autograd's hook to the engine and back.

May import: the leaves, system, torch_internals, gpu, engine, flight_recorder; process_group for
types. Must never call MPI.
"""
