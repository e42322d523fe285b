"""What the scaling policy last decided, where every process of the cluster can read it.

The policy runs in Serve's controller, which calls nobody; the monitor wants to show its decisions and tell routers of
pools that stop. Both reach Ray's control store, as Serve itself does for its checkpoints. A leaf of the policy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from ray.experimental import internal_kv

_NAMESPACE = "longspan"
# Ray offers no public name for its store.
_put, _get = internal_kv._internal_kv_put, internal_kv._internal_kv_get


@dataclass(frozen=True, slots=True)
class PoolDecision:
    """One pool as the policy sees it."""

    running: int
    target: int  # in force when it decided
    wanted: int
    granted: int
    reasons: tuple[str, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)

    @property
    def takes_requests(self) -> bool:
        """Routers hold requests back from a pool that has no replica, or whose last one is about to stop."""
        return self.running > 0 and self.granted > 0


def post(app: str, stamp: float, decisions: Mapping[str, PoolDecision]) -> None:
    """Replace the application's decisions; `stamp` differs each time. Takes about a millisecond."""
    text = json.dumps({"stamp": stamp, "pools": {name: asdict(one) for name, one in decisions.items()}})
    _put(_key(app), text.encode(), overwrite=True, namespace=_NAMESPACE)


def read(app: str) -> tuple[float, dict[str, PoolDecision]] | None:
    """The stamp and decisions last posted, or None. Takes about a millisecond."""
    text: bytes | None = _get(_key(app), namespace=_NAMESPACE)
    if text is None:
        return None
    found = json.loads(text)
    return found["stamp"], {
        name: PoolDecision(**{**one, "reasons": tuple(one["reasons"])}) for name, one in found["pools"].items()
    }


def _key(app: str) -> bytes:
    return f"scaling/{app}".encode()
