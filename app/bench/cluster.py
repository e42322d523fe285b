"""Joining the Ray cluster of a server, to ask its replicas and controller themselves."""

from __future__ import annotations

import logging

import ray

from app.errors import UnavailableError


def join_cluster(address: str) -> None:
    """`ray.shutdown` leaves it again. Raises UnavailableError if there is none at the address."""
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        ray.init(address, namespace="serve", log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise UnavailableError(f"no Ray cluster at {address}: {error}") from None
