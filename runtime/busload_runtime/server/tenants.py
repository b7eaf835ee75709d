"""Who a request belongs to. Fair turns, shares of the queue and cached prefixes go by it.

With API keys the tenant is the key's name. Without them it is what a header says, which fits behind a gateway that sets
that header on each request and drops the client's own: whoever may write it can be as many tenants as they like.
"""

import hashlib
from dataclasses import dataclass

MAX_NAME_BYTES = 256
_LABEL_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Tenant:
    """The owner of requests. `name` tells tenants apart, `label` is what logs show."""

    name: str
    label: str
    weight: float = 1.0
    bounded: bool = False
    """It may fill only its share of the queue, because there are others."""


ANYBODY = Tenant("", "default")
"""Requests that name no tenant."""


def tenant_of_header(value: str) -> Tenant:
    """The tenant that a header's value names. The value itself, which may be a person's name, is kept nowhere: a hash
    of it stands for it, the same in each replica and after a restart."""
    digest = hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
    return Tenant(f"header:{digest}", digest[:_LABEL_DIGITS], bounded=True)
