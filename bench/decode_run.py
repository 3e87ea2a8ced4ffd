"""`pallas-hub bench decode`: build the model, decode at every batch size, print."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from pallas_hub.bench import decode, decode_report, machine, report
from pallas_hub.bench.decode_models import DEFAULT_MODEL, MODELS, build


@dataclass(frozen=True)
class Options:
    workload: str | None = None
    dtype: str = "bfloat16"
    layers: int = 4
    batch: tuple[int, ...] = (1, 8, 64)
    prompt: int = 16
    new_tokens: int = 16
    device: str = "cpu"
    repo: str | None = None
    source: bool = False
    everything: bool = False
    json: bool = False


def run(options: Options) -> int:
    """Exit code 1 if some way decoded something else than Transformers' own loop does."""
    import torch

    name = options.workload or DEFAULT_MODEL
    if name not in MODELS:
        raise ValueError(f"--workload must be one of {', '.join(MODELS)} for decode; got {name!r}.")
    if options.new_tokens < 2:
        raise ValueError(f"--new-tokens must be at least 2, to have a median; got {options.new_tokens}.")
    chosen, dtype = MODELS[name], getattr(torch, options.dtype)
    about = machine.describe_machine()
    device = _device(options.device)
    if device.type != "cpu":
        about["measured_on"] = f"{device.type}, decoding; host"
    if not options.json:
        print("\n".join(report.header_lines(about)), flush=True)
    _progress(f"{chosen.title}: drawing the weights of {options.layers} layers ...")
    model = build(chosen, options.layers, dtype, str(device))
    with _kernels_from_source() if options.source else nullcontext():
        choice: dict[str, Any] = {"experts": options.repo} if options.repo else {}
        ways, about["kernels"] = decode.make_ways(
            model, decode.prompt_of(model, 1, options.prompt), choice, device.type
        )
    nbytes = sum(weight.nbytes for weight in model.parameters())
    if not options.json:
        lines = [*(f"kernel {line}" for line in about["kernels"]), ""]
        lines += [decode_report.title_line(chosen, options.layers, options.dtype, nbytes)]
        print("\n".join([*lines, *decode_report.explanation_lines()]), flush=True)
    results = []
    tolerance = decode.tolerance_for(dtype, options.layers)
    for batch in options.batch:
        _progress(f"batch {batch} ...")
        prompt = decode.prompt_of(model, batch, options.prompt)
        results.append(decode.decode(ways, chosen, prompt, options.new_tokens, tolerance, options.everything))
        if not options.json:
            print("\n".join(["", *decode_report.result_lines(results[-1], chosen, options.layers)]), flush=True)
    if options.json:
        print(json.dumps(decode_report.to_json(about, chosen, options.layers, options.dtype, results), indent=2))
    return 1 if any(result.failed for result in results) else 0


def _device(name: str) -> Any:
    import torch

    if name.startswith("tpu"):
        import torch_tpu  # noqa: F401  registers the device, which the command has kept torch from loading by itself
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:
        raise ValueError(f"--device {name} cannot be used here: {(str(error).splitlines() or [''])[0]}") from error
    return device


def _kernels_from_source() -> Any:
    from pallas_hub.layers import use_loader
    from pallas_hub.registry.load import load_source

    return use_loader(lambda repo_id, version: load_source(repo_id.split("/")[1]))


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
