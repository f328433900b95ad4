"""Measuring: stated work, timed runs, and what the times mean.

* ``shapes``: the built-in workloads' parameters and draws; ``workload_spec`` parses them.
* ``workloads``: from ``--workload`` to a list of requests; ``jsonl_workload`` reads a file's.
* ``run``: serve a workload several times.
* ``timing``, ``metrics``: from the times of steps to latencies, medians and spreads.

Nothing here imports torch, except ``kernels``: the times of single kernels on a GPU.
"""
