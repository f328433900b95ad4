"""How QK-norm, RoPE and the cache write are launched: facts of the site alone, torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from pagedctl_kernels.house import GROUP_VALUES

_PLACES = 1024
"""Of a program, in whole heads: eight a thread."""

WARPS = 4


@dataclass(frozen=True, kw_only=True)
class HeadPrograms:
    """One token's heads, dealt to programs: each takes ``heads`` of q, of k or of v."""

    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int

    def __post_init__(self) -> None:
        if self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim {self.rotary_dim} is above head_dim {self.head_dim}")

    @property
    def heads(self) -> int:
        most = _power_of_two(max(self.q_heads, self.kv_heads))
        return min(max(_PLACES // _power_of_two(self.head_dim), 1), most)

    @property
    def a_token(self) -> int:
        """Programs of one token."""
        return -(-self.q_heads // self.heads) + 2 * -(-self.kv_heads // self.heads)

    def constants(self) -> dict[str, int]:
        """What the kernel is compiled for, block size and switches apart."""
        return {
            "Q_HEADS": self.q_heads,
            "KV_HEADS": self.kv_heads,
            "HEAD_DIM": self.head_dim,
            "ROTARY_DIM": self.rotary_dim,
            "HEADS": self.heads,
            "HEAD_BLOCK": _power_of_two(self.head_dim),
            "HALF_BLOCK": _power_of_two(self.rotary_dim // 2),
            "REST_BLOCK": _power_of_two(max(self.head_dim - self.rotary_dim, 1)),
            "HALF_GROUPS": self._half_groups(),
        }

    def _half_groups(self) -> int:
        half = self.rotary_dim // 2
        whole = self.rotary_dim == self.head_dim == _power_of_two(self.head_dim)
        return half // GROUP_VALUES if whole else 0


def _power_of_two(count: int) -> int:
    """The smallest that is not below *count*."""
    return 1 << (count - 1).bit_length()
