"""Predicts the cost of exchanges between nodes: ``python -m pycomm.advise``.

`model` predicts, as docs/explanation/prediction.md derives it, from `constants`, which `measure`
measures. `advice` chooses and says why, `plot` draws, and `cli` is the command line.
"""
