"""No layers: Transformers swaps attention by attn_implementation="pallas-hub/flash-attention", not by layer names."""

__all__: list[str] = []
