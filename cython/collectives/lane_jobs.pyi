# Nothing for Python: group_lanes cimports this.
