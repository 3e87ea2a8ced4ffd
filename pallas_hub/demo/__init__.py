"""The main job, end to end, on this machine: two kernels from source to a Hub repo to a verified, measured MoE model.

Nothing leaves the machine: the Hub is a loopback server over a temporary folder, and so are the caches. Each step says
what it did and checks it; the first failed check ends the run.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pallas_hub.demo.check_steps import check_interpreted, check_kernels
from pallas_hub.demo.hub_steps import load_kernels, publish_kernels, start_hub
from pallas_hub.demo.state import Demo, Step, StepFailed
from pallas_hub.demo.use_steps import compile_for_tpus, swap_model, time_layer

STEPS = (
    start_hub,
    publish_kernels,
    load_kernels,
    check_kernels,
    check_interpreted,
    swap_model,
    time_layer,
    compile_for_tpus,
)


def run(say: Callable[[str], None] = print, **options: Any) -> list[Step]:
    """Run every step in order; stops after the first that fails. Needs a process that has not used a Hub before."""
    _refuse_a_used_process()
    steps: list[Step] = []
    with tempfile.TemporaryDirectory(prefix="pallas-hub-demo-") as folder, ExitStack() as stack:
        demo = Demo(say, Path(folder), stack, **options)
        for number, action in enumerate(STEPS, 1):
            step = Step((action.__doc__ or action.__name__).splitlines()[0].rstrip("."))
            steps.append(step)
            say(f"[{number}/{len(STEPS)}] {step.title}")
            if not _attempt(demo, step, action):
                break
            say(f"      done in {step.seconds:.1f} s\n")
    return steps


def _attempt(demo: Demo, step: Step, action: Callable[[Demo, Step], None]) -> bool:
    start = time.perf_counter()
    try:
        action(demo, step)
        step.passed = True
    except Exception as error:
        step.error = f"{error}" if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"
        demo.say(f"      FAILED: {step.error}")
    step.seconds = time.perf_counter() - start
    return step.passed


def _refuse_a_used_process() -> None:
    """huggingface_hub reads HF_ENDPOINT once, when it is imported."""
    if "huggingface_hub" in sys.modules:
        raise RuntimeError(
            "demo: huggingface_hub was imported before the demo could point it to its own Hub. Run `pallas-hub demo` "
            "or call pallas_hub.demo.run() in a fresh process."
        )
