"""Bundle lists: a listing made by hand with known counts, and what the compiler really writes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pallas_hub.bench.aot.bundles import read_kernels
from pallas_hub.bench.aot.errors import DumpError

LISTING = """\
LH: loop header
LB: loop body
     0   :  { %s0_s1 = smov.u32 0 }
   0x1 LB: > { %p1_p0 = scmp.gt.s32.totalorder %s2_s3, 0 /* a comment
over two lines */  ;;  %p2_p1 = scmp.le.s32.totalorder %s2_s3, 0 }
   0x2   : > { %5 = sbr.rel (%p2_p1) target = $region4 }
   0x3   : > { %6 = vdelay 1 }
   0x4   : > { %6 = vdelay 1 }
   0x5   : > { %6 = vdelay 1 }
   0x6   :  {}
   0x7   : > { %7 = vmatmul }
   0x8 LB: >> { %8 = vadd }
   0x9   : >> { %p3_p4 = scmp.ge.s32.totalorder %s4_s5, 7 /* loop exit test */ }
   0xa   : > { %9 = vst }
   0xb PF: > { %10 = sbr.rel (%p1_p0) target = $region8 } /* Start/End empty region 4 :: Start region 6 */
   0xc   : > { %6 = vdelay 1 }
   0xd   : > { %6 = vdelay 1 }
   0xe   : > { %6 = vdelay 1 }
   0xf   :  {}
  0x10   : > { %11 = vst }
  0x11 PF: > { %p9_p9 = scmp.ge.s32.totalorder %s1_s1, 6 /* loop exit test */ } /* Start/End empty region 8 */
  0x12   :  { %12 = vsyncpa }
"""
UNITS = "MATMUL, MATPUSH, VALU, VLOAD:FILL, VSTORE:SPILL"


def write_dump(folder, listing=LISTING, units=UNITS, rows=None):
    prefix = f"{folder}/123-toy.1"
    count = sum(line.lstrip().startswith(("0x", "0 ")) for line in listing.splitlines())
    table = rows or [[1 if i == 7 else 0, 0, 1, 0, 1 if i == 9 else 0] for i in range(count)]
    text = "\n".join(" ".join(map(str, row)) for row in table)
    files = {
        "01-original.txt": "#allocation1 [shape = 'u8[4096]', space=vmem, size = 0x1000, scoped]\n"
        "#allocation2 [shape = 'u8[64]', space=smem, size = 0x40, scoped]\n",
        "70-final_hlo-static-per-bundle-utilization.txt": f"=\n{units}\n 2 2 4 3 2\n=\n{text}\n",
        "71-schedule-analysis_final_bundles.txt": 'custom_call_target="tpu_custom_call"\n',
        "72-final_bundles.txt": listing,
    }
    for name, content in files.items():
        with open(f"{prefix}-{name}", "w") as file:
            file.write(content)
    return folder


def test_loops_branches_and_either_or_are_weighed(tmp_path):
    (kernel,) = read_kernels(write_dump(tmp_path))
    assert kernel.name == "toy"
    assert kernel.vmem_bytes == 4096
    # 17 bundles of the grid loop; the inner loop's two go round seven times; of the two arms (2 + 14 and 1) one counts.
    assert kernel.step.bundles == 17 + 6 * 2 - 1
    assert kernel.whole.bundles == 2 + 6 * (17 + 6 * 2 - 1)
    assert kernel.step.matmul == 1
    assert kernel.step.spills == 7  # in the inner loop
    assert kernel.step.unknown_loops == 0


def test_a_loop_without_a_constant_bound_is_told(tmp_path):
    (kernel,) = read_kernels(write_dump(tmp_path, LISTING.replace(", 7 /* loop exit test */", ", %s7_s7 /* test */")))
    assert kernel.step.unknown_loops == 1


def test_a_branch_that_may_be_skipped_is_told(tmp_path):
    (kernel,) = read_kernels(write_dump(tmp_path, LISTING.replace("scmp.gt", "scmp.eq")))
    assert kernel.step.bundles == 17 + 6 * 2
    assert kernel.step.conditional == 1


def test_rows_that_do_not_match_are_refused(tmp_path):
    with pytest.raises(DumpError, match=r"123-toy\.1: 19 bundles but 1 utilization rows"):
        read_kernels(write_dump(tmp_path, rows=[[0, 0, 0, 0, 0]]))


def test_an_unknown_table_is_refused(tmp_path):
    with pytest.raises(DumpError, match="no column VSTORE:SPILL"):
        read_kernels(write_dump(tmp_path, units="MATMUL, MATPUSH, VALU, VLOAD:FILL, SPILL"))


SCRIPT = """
import os, sys
sys.path[:0] = [{tests!r}, {root!r}]
os.environ["LIBTPU_INIT_ARGS"] = "--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
import jax, jax.numpy as jnp
import aot_kernels
from pallas_hub.bench.tpu_compile import compile_for_tpu
shape = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
compile_for_tpu(aot_kernels.matmul, *shape, target={target!r})
"""


@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_real_dump_holds_the_matmuls_of_a_step(tmp_path, target):
    pytest.importorskip("jax")
    pytest.importorskip("libtpu", reason="skipped: needs libtpu, the TPU compiler")
    here = os.path.dirname(__file__)
    script = SCRIPT.format(tests=here, root=os.path.dirname(os.path.dirname(here)), dump=tmp_path, target=target)
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, capture_output=True)
    (kernel,) = read_kernels(tmp_path)
    assert kernel.name == "toy_matmul"
    # (128, 256) @ (256, 256) in bf16, 16 rows per instruction: 8 on a 256-wide unit, 8 * 2 * 2 on a 128-wide one.
    instructions = {"v5e": 32, "v6e": 8}[target]
    assert instructions <= kernel.step.matmul < kernel.step.matmul_slots
    # Four steps of the grid, and two rounds more for the copies in flight.
    assert kernel.whole.matmul == 6 * kernel.step.matmul
    assert kernel.step.unknown_loops == 0
    assert kernel.vmem_bytes >= 2 * (128 * 256 + 128 * 256) + 256 * 256 * 2
