# Nothing for Python: the engine cimports this.
