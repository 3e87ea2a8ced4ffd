"""Forgets to say what its public API is."""


def scale(x):
    return x * 2
