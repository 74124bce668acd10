"""The benchmark: ``python -m pycomm.bench all_reduce``, with nccl-tests' columns.

One idea per module: `cases` says what is measured, `contestants`, `peers` and `floor` who competes,
`measure` how the clock is read, `verify` and `verify_compressed` what the results must be, `report`
and `plot` how they are shown, `launch` where the ranks come from, `session` ties them together on
every rank.

``python -m pycomm.bench codec`` needs no ranks: `codec_tasks` says what is measured, `streams` what
memory allows, `codec_report` how it is shown, and `codec_session` ties them together.

`overlap` and `step` time training steps; `training` says what trains.

The sub-packages have command lines of their own: `gpu` times every kernel on a GPU, `nodes` what
goes between nodes.
"""
