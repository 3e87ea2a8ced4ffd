"""What the model needs to know of each TPU generation.

Peak rates are the published ones. The clock follows from them: published bf16 peak divided by the multiply-adds the
compiler's own matmul issues per cycle. For v5p and TPU7x the clock implied by the compiler's cost model is 15 % lower,
so modelled compute times on those two are uncertain by that much.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One TensorCore's view of a TPU generation.

    Units   hbm_gb_s in 1e9 bytes/s; clock_ghz in 1e9 cycles/s; bf16_tflop_s in 1e12 FLOP/s; vmem_mib in MiB
    """

    target: str
    device_kind: str
    hbm_gb_s: float
    bf16_tflop_s: float
    clock_ghz: float
    vmem_mib: int  # physical
    default_scoped_vmem_mib: int  # what a kernel may use unless it asks for more

    def bandwidth_us(self, nbytes: float) -> float:
        """Microseconds to move `nbytes` through HBM at the published rate."""
        return nbytes / self.hbm_gb_s / 1e3

    def cycles_us(self, cycles: float) -> float:
        return cycles / self.clock_ghz / 1e3


HARDWARE = {
    h.target: h
    for h in (
        Hardware("v5e", "TPU v5 lite", 819, 197, 1.5, 128, 16),
        Hardware("v5p", "TPU v5", 2765, 459, 1.75, 128, 16),
        Hardware("v6e", "TPU v6 lite", 1640, 918, 1.75, 128, 32),
        # Figures per device; a TPU7x chip holds two.
        Hardware("tpu7x", "TPU7x", 3690, 1153, 2.2, 64, 32),
    )
}
