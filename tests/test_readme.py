"""The README's snippets run, and print what it says they print."""

import contextlib
import io
import re
from pathlib import Path

import torch

README = (Path(__file__).parent.parent / "README.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def _run(snippet: str) -> tuple[dict, str]:
    names: dict = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(snippet, "README.md", "exec"), names)
    return names, printed.getvalue()


def test_first_snippet_prints_its_comment():
    names, printed = _run(SNIPPETS[0])
    (promised,) = re.findall(r"print\(y\)  # (.*)", SNIPPETS[0])
    assert re.sub(r"\s+", "", printed) == re.sub(r"\s+", "", promised)
    assert torch.equal(names["y"], torch.tensor([[3.0, 3.0], [30.0, 30.0], [30.0, 30.0], [0.0, 0.0]]))


def test_model_snippet_swaps_explains_and_undoes():
    torch.manual_seed(0)
    names, printed = _run(
        SNIPPETS[1]
        .replace("pallas_hub.unkernelize(model)", "swapped = model(ids).logits; #", 1)
        .replace("import pallas_hub\n", "import pallas_hub, torch\nids = torch.arange(6).view(1, 6)\n", 1)
    )
    import pallas_hub

    model = names["model"]
    assert "pallas-hub/rms-norm" in printed
    assert "pallas-hub/moe-experts" in printed
    pallas_hub.unkernelize(model)
    torch.testing.assert_close(model(names["ids"]).logits, names["swapped"], rtol=1e-5, atol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


def test_every_command_in_the_table_exists():
    from pallas_hub.cli import COMMANDS

    named = set(re.findall(r"`pallas-hub (\w+)", README)) | set(
        re.findall(r"`(download|verify|lock|info|publish)\b", README)
    )
    assert named <= set(COMMANDS)
