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


ONE_STEP = """\
     0   :  { %s0_s1 = smov.u32 0 }
   0x1 LB: > { %s7_s2 = sadd.s32 4294967295, %s2_s3 /* iteration index, stage = 1 */ }
   0x2   : > { %p1_p0 = scmp.ne.s32.totalorder %s7_s2, 0 }
   0x3   : > { %5 = sbr.rel (%p1_p0) target = $region4 }
   0x4   : > { %6 = vdelay 1 }
   0x5   : > { %6 = vdelay 1 }
   0x6   : > { %6 = vdelay 1 }
   0x7   :  {}
   0x8 LB: >> { %s9_s4 = sadd.s32 16, %s8_s4 }
   0x9   : >> { %p3_p4 = scmp.ge.s32.totalorder %s9_s4, 40 /* loop exit test */ }
   0xa PF: > { %9 = vst } /* Start/End empty region 4 */
   0xb   :  { %12 = vsyncpa }
"""


def test_what_only_the_first_step_runs_is_counted_apart(tmp_path):
    (kernel,) = read_kernels(write_dump(tmp_path, ONE_STEP))
    assert kernel.step.once == 2 * 3  # 40 rounds in leaps of 16
    assert kernel.step.bundles == 8
    assert kernel.whole.bundles == 2 + 8 + 2 * 3


@pytest.mark.parametrize("other", ["scmp.eq.s32.totalorder %s7_s2, 0", "scmp.ne.s32.totalorder %s5_s5, 0",
                                   "scmp.ne.s32.totalorder %s7_s2, %s5_s5"])  # fmt: skip
def test_other_branches_are_part_of_a_step(tmp_path, other):
    listing = ONE_STEP.replace("scmp.ne.s32.totalorder %s7_s2, 0", other)
    (kernel,) = read_kernels(write_dump(tmp_path, listing))
    assert kernel.step.once == 0
    assert kernel.step.bundles == 8 + 2 * 3


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


def test_the_last_bundle_of_a_loop_may_hold_the_test_of_the_one_around_it(tmp_path):
    """Then it comes under the inner test's predicate; the outer loop goes round five times, the inner one seven."""
    both = "/* loop exit test */  ;;  %p5_p1 = scmp.ge.s32.totalorder (%p3_p4), %s9_s2, 5 /* loop exit test */ }"
    listing = LISTING.replace("/* loop exit test */ }", both, 1).replace(", 6 /* loop exit test */ }", ", 6 }")
    (kernel,) = read_kernels(write_dump(tmp_path, listing))
    assert kernel.whole.bundles == 2 + 5 * (17 + 6 * 2 - 1)
    assert kernel.step.bundles == 17 + 6 * 2 - 1


def test_a_barrier_between_cores_tells_that_there_are_two(tmp_path):
    (one,) = read_kernels(write_dump(tmp_path))
    assert (one.cores, one.core_steps) == (1, 4)  # the loop goes round twice more, for the copies in flight
    barrier = "shalt.err (%p0_p0) /* scheckeq: BarrierMegacore cookie: 1 @ a.cc:1 */"
    (two,) = read_kernels(write_dump(tmp_path, LISTING.replace("smov.u32 0 }", f"smov.u32 0 ;; {barrier} }}")))
    assert (two.cores, two.core_steps) == (2, 4)


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
