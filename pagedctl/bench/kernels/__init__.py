"""Times of the kernels on a GPU: each op, and a model's linear layers, beside floor and vendor.

* ``shapes``: the model shapes and the batches that stand for the workloads; imports no torch.
* ``replay``: medians of CUDA graph replays, candidates in turn.
* ``ceilings``: what this GPU reads and multiplies at best.
* ``bench``: the device, and the house's leaves on it.
* ``linear_stack``: every linear layer of a model in one graph, ours and cuBLAS.
* ``case``: one op at one shape; ``row_cases``, ``product_cases``, ``logit_cases`` and
  ``attention_cases`` make them of a batch.
* ``report``: runs them, and the tables.

All but ``shapes`` import torch and need a GPU.
"""
