"""pagedctl: a paged-KV, continuous-batching sampler that states its numerical contract."""

__version__ = "0.1.0"
