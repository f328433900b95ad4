"""The kernel package: what an op computes, who implements it, and in which order it rounds.

Importing this package, its specs and its registry needs no torch; binding a plan does.
It knows nothing of requests, schedulers or files.
"""
