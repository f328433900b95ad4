"""The machine-readable result of every command: strict JSON, whole files, one schema.

* ``strict_json``: JSON without NaN, Infinity or duplicate keys; float32 in fewest digits.
* ``files``: write a new file completely or not at all, never over another one.
* ``schema``: the frozen data types of ``pagedctl.manifest/1``.
* ``writer``: where a manifest lies, and the builder that a command fills and closes.
* ``reader``: read one back.
* ``peer_files``: read the result files of vLLM and SGLang (``peer_formats``, ``peer_object``,
  ``peer_result`` and ``lenient_json`` hold its parts).
* ``environment``: what this machine and this installation are (``hardware`` and
  ``capabilities`` hold its parts).

Nothing here imports torch at import time.
"""
