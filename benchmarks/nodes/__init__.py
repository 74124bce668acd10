"""Exchanges between nodes: ``python -m benchmarks.nodes`` in a clone, as root.

`namespaces` emulates nodes by network namespaces of one machine. `cases` defines what is measured
between them, and the predictions of ``python -m pycomm.advise``. `ranks` runs on every rank, and
`cli` ties everything together.
"""
