"""Compile kernels for real TPUs on a machine without one, and report what the compiler made of them."""

from pallas_hub.bench.aot.report import KernelReport, Report, compile_report

__all__ = ["KernelReport", "Report", "compile_report"]
