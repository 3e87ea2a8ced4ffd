"""Time several implementations of one job in the same interleaved run.

Each implementation is first called alone: the first call holds imports, compilation and page faults and is reported
apart. Then come rounds. A round takes one sample of every implementation; the starting point moves on each round and
every second round runs backwards, so that nobody always follows the same neighbour. A sample ends when the work is
done, not when the call returns (`wait_for`). Short jobs are called several times per sample, because a clock read
costs about 0.1 microseconds.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

Call = Callable[[], Any]

MIN_ROUNDS = 5
MAX_ROUNDS = 1000
MIN_SAMPLE_S = 200e-6  # below this a sample is made of several calls
MAX_CALLS_PER_SAMPLE = 10_000


@dataclass(frozen=True)
class Timing:
    """What one implementation took, in seconds per call."""

    name: str
    first_s: float  # the very first call: compilation, imports, page faults
    samples_s: tuple[float, ...]  # one entry per round, waiting included
    calls_per_sample: int
    cold: bool

    @property
    def repeats(self) -> int:
        return len(self.samples_s)

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def min_s(self) -> float:
        return min(self.samples_s)

    @property
    def spread_s(self) -> float:
        """Distance between the quartiles: half of all samples lie in a band this wide."""
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return high - low

    def to_json(self) -> dict[str, Any]:
        derived = {"median_s": self.median_s, "spread_s": self.spread_s, "min_s": self.min_s}
        return asdict(self) | derived | {"repeats": self.repeats}


def measure(
    implementations: Mapping[str, Call],
    *,
    seconds: float = 5.0,
    warmups: int = 2,
    min_rounds: int = MIN_ROUNDS,
    max_rounds: int = MAX_ROUNDS,
    flush: Call | None = None,
    wait: Callable[[Any], None] | None = None,
) -> dict[str, Timing]:
    """Time `implementations` (name -> call without arguments) in interleaved rounds for about `seconds`.

    The budget covers the rounds, not the warm-up, and gives way to `min_rounds` when the jobs are slow.
    `flush` runs before every sample, outside the timed part (see `CacheFlush`); a sample is then one call.

    Raises   ValueError: nothing to time, or fewer than 2 rounds.
    """
    if not implementations:
        raise ValueError("measure: needs at least one implementation; got none.")
    if min_rounds < 2 or max_rounds < min_rounds:
        raise ValueError(
            f"measure: needs 2 <= min_rounds <= max_rounds; got min_rounds={min_rounds}, max_rounds={max_rounds}."
        )
    wait = wait or wait_for
    first, calls = {}, {}
    for name, call in implementations.items():
        first[name] = _sample(call, 1, wait)
        warm = min(_sample(call, 1, wait) for _ in range(max(warmups, 1)))
        calls[name] = 1 if flush else _calls_per_sample(warm)

    samples: dict[str, list[float]] = {name: [] for name in implementations}
    deadline = time.perf_counter() + seconds
    with _no_garbage_collection():
        for order in _rounds(list(implementations), max_rounds):
            if len(samples[order[0]]) >= min_rounds and time.perf_counter() >= deadline:
                break
            for name in order:
                if flush:
                    flush()
                samples[name].append(_sample(implementations[name], calls[name], wait))
    return {
        name: Timing(name, first[name], tuple(samples[name]), calls[name], cold=flush is not None)
        for name in implementations
    }


def _rounds(names: list[str], count: int) -> Iterator[list[str]]:
    for index in range(count):
        start = index % len(names)
        order = names[start:] + names[:start]
        yield order[::-1] if index % 2 else order


def _sample(call: Call, calls: int, wait: Callable[[Any], None]) -> float:
    """Seconds per call, from before the first call until the work of the last one is done."""
    start = time.perf_counter()
    for _ in range(calls):
        wait(call())
    return (time.perf_counter() - start) / calls


def _calls_per_sample(warm_s: float) -> int:
    if warm_s >= MIN_SAMPLE_S:
        return 1
    return min(MAX_CALLS_PER_SAMPLE, max(1, round(MIN_SAMPLE_S / max(warm_s, 1e-9))))


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def wait_for(result: Any) -> None:
    """Return when the work behind `result` is done.

    JAX arrays (anything with `block_until_ready`) are waited for; torch tensors synchronise their device; tuples, lists
    and dicts are searched. A CPU tensor is complete when torch returns it. `None` and numbers have nothing to wait for.
    """
    if isinstance(result, tuple | list):
        for item in result:
            wait_for(item)
    elif isinstance(result, dict):
        for item in result.values():
            wait_for(item)
    elif hasattr(result, "block_until_ready"):
        result.block_until_ready()
    else:
        device = getattr(result, "device", None)
        kind = getattr(device, "type", "cpu")
        if kind not in ("cpu", "meta"):
            _synchronize(device, kind)


def _synchronize(device: Any, kind: str) -> None:
    import torch

    module = getattr(torch, kind, None)  # torch.cuda, torch.tpu, torch.xpu, torch.mps, ...
    if not hasattr(module, "synchronize"):
        raise RuntimeError(
            f"measure: no way to wait for device {device}: torch.{kind}.synchronize does not exist. "
            "A time without the wait would be that of the launch alone; pass wait=..."
        )
    try:
        module.synchronize(device)
    except TypeError:  # torch.mps.synchronize takes no device
        module.synchronize()


class CacheFlush:
    """Empty the CPU caches by reading and writing a buffer several times as large as the last-level cache."""

    def __init__(self, nbytes: int | None = None) -> None:
        import torch

        from pallas_hub.bench.machine import last_level_cache_bytes

        self.nbytes = nbytes or 4 * last_level_cache_bytes()
        self._buffer = torch.zeros(self.nbytes // 8, dtype=torch.int64)

    def __call__(self) -> None:
        self._buffer.add_(1)
