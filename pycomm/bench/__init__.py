"""The benchmark: ``python -m pycomm.bench``. Everything runs beside other libraries.

`cli` is the command line, and `launch` starts the ranks.

The modules `collectives`, `codecs` and `optimizers` measure their subjects. `training` measures
steps, `scaling` steps of more and more ranks, `sharding` the exchange together with the optimizer's
step, and `c10d` the operations of torch.distributed. Each has settings, contestants, the row of a
table, and a ``run``.

They share the other modules. `measure` times contestants in interleaved rounds, `streams` adds the
time that memory alone takes, `verify` checks results first, and `report` prints the table and
writes JSON. `timeline` records when a step computes and exchanges. `plot` draws tables. `peers` are
the other libraries. Collectives also have `contestants` and a `floor`.

`choose` makes a table of algorithms from times of all-reduces between nodes. `gpu` times every
kernel on a GPU.
"""
