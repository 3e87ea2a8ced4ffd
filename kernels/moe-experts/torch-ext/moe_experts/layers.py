"""No layers: Transformers swaps experts by ALL_EXPERTS_FUNCTIONS, not by layer names; see moe.experts_forward.

The one layer name of Transformers that covers experts, MegaBlocksMoeMLP of gpt-oss, includes the router. Its experts go
through the same function, so the block runs this kernel without a layer of its own.
"""

__all__: list[str] = []
