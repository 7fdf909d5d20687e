# Nothing of it is for other compiled modules.
