"""The snippets of docs/diffusers.md run, one after the other, with a pipeline and its inputs."""

import re
from pathlib import Path

import torch
from tiny_pipelines import flux

import pallas_hub

DOC = (Path(__file__).parents[2] / "docs" / "diffusers.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE)


def test_the_snippets_run_the_kernel_and_change_no_image(ran, capsys):
    tiny = flux()
    wanted = tiny.latents()
    run = {**tiny.inputs, "num_inference_steps": 2, "output_type": "latent"}
    assert len(SNIPPETS) == 2
    for snippet in SNIPPETS:
        run["generator"] = torch.Generator().manual_seed(0)
        names = {"pipe": tiny.pipe, "inputs": run, "pallas_hub": pallas_hub}
        exec(compile(snippet, "diffusers.md", "exec"), names)
        torch.testing.assert_close(names["images"].images, wanted, rtol=1e-5, atol=1e-5)
        assert [op for op, _ in ran].count("flash_attention::attention") == 4
        assert pallas_hub.explain(tiny.pipe).left_alone
        ran.clear()
    assert "FluxPipeline: 8 of 8 layers run Hub kernels" in capsys.readouterr().out


def test_verify_as_the_text_says():
    tiny = flux()
    report = pallas_hub.kernelize(tiny.pipe, verify={**tiny.inputs, "num_inference_steps": 1, "output_type": "latent"})
    assert all(layer.within_tolerance for layer in report)
