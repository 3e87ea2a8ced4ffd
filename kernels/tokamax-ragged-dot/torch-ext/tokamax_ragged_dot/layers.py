"""No layers: Transformers swaps experts by ALL_EXPERTS_FUNCTIONS, not by layer names; see experts.py."""

__all__: list[str] = []
