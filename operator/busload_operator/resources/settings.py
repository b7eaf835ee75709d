"""What the children need to know beside the spec."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """How runtime pods are run in this cluster; set by whoever installed the operator."""

    image: str
    """Image of the runtime."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    gpu_image: str | None = None
    """The same with the libraries for GPUs; None: services cannot have one."""
