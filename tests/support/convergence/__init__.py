"""Proof that training survives compression: real processes, real text, real gradients.

A run is judged by its final loss on fixed training batches of all ranks, as a relative difference
to the run of plain DDP on Gloo with the same seed: same model, batches and learning rates. The mean
of these differences over the seeds must lie in a band around zero: 0 for uncompressed gradients,
0.5 % for int8 with and without feedback, 5 % for top-k 1 % with feedback, which begins after a
tenth of the steps. Broken versions, which exist only here, must lie outside.
"""
