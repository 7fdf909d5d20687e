"""The watch over ranks that are late, silent or dead: notice it, say who, end the job.

May import: the leaves, system, mpi, engine, flight_recorder. Must never start an operation of a
process group: it knows groups as `interface.py` says, and has its own communicators and sockets.
"""
