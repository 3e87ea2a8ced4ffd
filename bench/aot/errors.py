"""Errors of the compile reports."""


class DumpError(ValueError):
    """The compiler's dump is not in the form this package knows, as after an update of libtpu."""
