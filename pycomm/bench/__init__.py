"""The benchmark: ``python -m pycomm.bench all_reduce``, with nccl-tests' columns.

`cases` defines what is measured; `contestants`, `peers` and `floor` define the contestants;
`measure` takes times; `verify` and `verify_compressed` check results; `report` and `plot` show
them; `launch` starts the ranks; `session` runs all of this on every rank.

``python -m pycomm.bench codec`` needs no ranks. `codec_tasks` defines what is measured, `streams`
measures memory, `codec_report` shows the results, and `codec_session` runs all of this.

`overlap` and `step` time training steps; `training` defines the models.

`gpu` has command lines of its own, which time every kernel on a GPU.
"""
