"""Pairs of Transformers and kernels, told in words."""

from __future__ import annotations

import pytest

from pallas_hub.layers import compat


@pytest.mark.parametrize(
    ("transformers", "kernels"),
    [("5.20.0", "0.17.2"), ("5.22.2", "0.17.2"), ("5.22.2", "0.17.9"), ("5.23.0", "0.18.2"), (None, "0.17.2")],
)
def test_pairs_that_work(transformers, kernels):
    assert compat.diagnose(transformers, kernels) is None


@pytest.mark.parametrize(
    ("transformers", "kernels", "message"),
    [
        (
            "5.23.0",
            "0.17.2",
            "transformers 5.23.0 wants kernels >= 0.18.2 and treats kernels 0.17.2 as not installed: its layers are "
            "not marked, KernelConfig and use_kernels=True do nothing useful. Try: pip install transformers==5.22.2 "
            "(which accepts kernels 0.17.2), or pip install kernels==0.18.2",
        ),
        ("5.24.0.dev0", "0.17.2", "transformers 5.24.0.dev0 wants kernels >= 0.18.2 and treats kernels 0.17.2 as not"),
        ("5.22.2", "0.18.2", "wants kernels >= 0.17.2, < 0.18.0 and treats kernels 0.18.2 as not installed"),
        ("5.22.2", "0.16.0", "Try: pip install kernels==0.17.2"),
        ("4.57.1", "0.17.2", "transformers 4.57.1 is older than 5.20"),
        ("5.22.2", None, "kernels is not installed: marked layers and Hub repos cannot be used. Try: pip install"),
    ],
)
def test_pairs_that_do_not_work_are_explained(transformers, kernels, message):
    assert message in compat.diagnose(transformers, kernels)


def test_what_is_installed_here_works_and_agrees_with_transformers():
    from transformers.utils.import_utils import KERNELS_MAX_VERSION, KERNELS_MIN_VERSION, is_kernels_available

    assert (compat.diagnose_installed() is None) == is_kernels_available()
    assert compat.diagnose("5.22.2", KERNELS_MIN_VERSION) is None
    assert compat.diagnose("5.22.2", KERNELS_MAX_VERSION) is not None


def test_a_version_must_look_like_one():
    with pytest.raises(ValueError, match=r"a version looks like 5\.22\.2; got 'unknown'"):
        compat.diagnose("unknown", "0.17.2")
