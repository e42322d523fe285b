"""Serve's part in the choice of a replica: it sends to the one our router names. Imports only the stdlib and ray.

Serve loads this class wherever a handle to a pool lives, and in its controller.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class NamedReplicaRouter(RequestRouter):
    """The replica that the call names in its `session_id`; the less loaded of two drawn by chance where it names none,
    or where that one has gone or is full.

    Every call needs a request id of its own: make it in an empty context.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        name = pending_request.metadata.session_id if pending_request is not None else ""
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
        others = [replica for replica in candidate_replicas if replica.replica_id.unique_id != name]
        return [rank for rank in (named, random.sample(others, min(2, len(others)))) if rank]
