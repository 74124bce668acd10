"""Exchanges between nodes: ``python -m pycomm.bench.nodes``; needs root.

`namespaces` makes nodes of one machine's network namespaces, `cases` says what is measured between
them and what the model of ``python -m pycomm.advise`` predicts, `ranks` what every rank does, and
`cli` ties them together.
"""
