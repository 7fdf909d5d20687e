# Nothing here is for Python.
