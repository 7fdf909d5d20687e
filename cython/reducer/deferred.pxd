# Nothing of this module is called from another compiled one.
