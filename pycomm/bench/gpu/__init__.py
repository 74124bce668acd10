"""What needs a GPU: ``python -m pycomm.bench.gpu``. Method and goals: docs/performance.md.

`cases` says what is timed in one process and with which goals, `ranks` what is timed among ranks
that share the GPU, `cli` how. `small` runs every kernel once, for compute-sanitizer.
"""
