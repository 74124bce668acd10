"""What an installed pycomm is worth on this machine: ``python -m pycomm.check``.

Ranks run every operation, codec, optimizer and front end of training, and compare results with
plain torch. All ranks must have the same bits; on a GPU these must also be the CPU's. The ranks are
processes, then the threads of one process as on two nodes; on GPUs a process per GPU, or threads if
there is one GPU. Their start and each item have a deadline, and no rank outlives it.
"""
