"""Imports what a published kernel may not."""

import transformers

__all__ = ["transformers"]
