"""The benchmark: ``python -m pycomm.bench``. Everything runs beside other libraries.

`cli` is the command line, and `launch` starts the ranks.

What is measured: `collectives`, `codecs`, `optimizers`, training steps (`training`), exchange and
optimizer step together (`sharding`), and operations of torch.distributed (`c10d`). Each module has
its settings, its contestants, the row of its table, and a ``run``.

What they share: `measure` times contestants in interleaved rounds, `streams` adds the time that
memory alone takes, `verify` checks results first, and `report` prints the table and writes JSON.
`peers` are the other libraries. Collectives also have `contestants`, a `floor`, and a `plot`.

`gpu` has command lines of its own, which time every kernel on a GPU.
"""
