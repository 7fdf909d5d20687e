# Nothing for Python: group_memory cimports this.
