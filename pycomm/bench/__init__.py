"""The benchmark: ``python -m pycomm.bench all_reduce``, with nccl-tests' flags and columns.

One idea per module: `cases` says what is measured, `contestants`, `peers` and `floor` who competes,
`measure` how the clock is read, `verify` what the results must be, `report` and `plot` how they are
shown, `launch` where the ranks come from, `session` ties them together on every rank.
"""
