# Nothing to cimport: which MPI this build belongs to is asked from Python.
