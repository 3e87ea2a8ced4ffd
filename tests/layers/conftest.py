"""What several files here share. The helpers are modules of their own: layers_fakes.py and layers_models.py."""

import pytest


@pytest.fixture
def fresh_pallas(monkeypatch):
    """As if "pallas" had just been entered in Transformers' table and nothing had been loaded for it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from pallas_hub.layers import interface

    monkeypatch.setattr(interface, "_DEFAULT", [])
    monkeypatch.delitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "pallas", raising=False)
    interface.register()
