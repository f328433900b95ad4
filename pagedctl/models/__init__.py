"""Models as data: where a model lies, what its config.json means, which tensors it needs.

Nothing in this package's torch-free modules imports torch, numpy, transformers or
tokenizers, so the planner and the command line read the same :class:`ModelSpec` as the
loader without paying for them.
"""
