"""The GPU benchmark: ``python -m pycomm.bench gpu``. Method and goals: docs/lab/performance.md.

`cases` defines the cases of one process and their goals, `ranks` the cases among ranks that share
the GPU; `session` times them. `sweep` measures the crossovers of algorithms. `small` runs every
kernel once, for compute-sanitizer, and `kernels` eight kinds of them for ncu. Ranks that are
processes are timed by ``python -m pycomm.bench all_reduce --device cuda``.
"""
