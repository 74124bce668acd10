"""What an exchange between nodes will cost, before it is tried: ``python -m pycomm.advise``.

The model is documented in docs/advisor.md. Its constants were measured (:mod:`.constants`).
"""
