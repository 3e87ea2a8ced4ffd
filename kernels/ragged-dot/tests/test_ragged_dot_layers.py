"""The layers module: empty by decision, and the decision holds as long as Transformers names no experts layer."""

import re
from pathlib import Path

import pytest
import ragged_dot


def test_public_names():
    assert ragged_dot.__all__ == ["experts_forward", "grouped_mm", "layers", "moe_experts", "ragged_dot"]
    assert all(hasattr(ragged_dot, name) for name in ragged_dot.__all__)


def test_importing_the_kernel_imports_neither_jax_nor_transformers():
    import subprocess
    import sys

    code = (
        f"import sys; sys.path.insert(0, {str(Path(ragged_dot.__file__).parents[1])!r}); import ragged_dot, torch; "
        "ragged_dot.ragged_dot(torch.ones(2, 2), torch.ones(1, 2, 2), torch.tensor([2])); "
        "print([m for m in ('jax', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_no_experts_class_of_transformers_has_a_layer_name():
    transformers = pytest.importorskip("transformers")
    marked = set()
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        for name, class_name in re.findall(
            r"@use_kernel_forward_from_hub\(\"(\w+)\"\)\s*(?:@[^\n]*\n)*class (\w+)", file.read_text(encoding="utf-8")
        ):
            marked |= {(name, class_name)} if class_name.endswith("Experts") else set()
    assert not marked
    assert ragged_dot.layers.__all__ == []
