"""Predicts the cost of exchanges between nodes: ``python -m pycomm.advise``.

docs/advisor.md derives the model. Its constants were measured (:mod:`.constants`).
"""
