# Nothing to cimport: the operations are made from Python.
