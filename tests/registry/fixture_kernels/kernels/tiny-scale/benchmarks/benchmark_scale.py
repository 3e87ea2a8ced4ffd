from kernels.benchmark import Benchmark
