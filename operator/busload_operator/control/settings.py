"""Settings of the operator process, read once from the environment."""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

_NAMESPACE = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
_OWN_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"


class SettingsError(ValueError):
    """A setting that cannot be used; the message names the variable, its value, what is allowed and what to do."""


def _names(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    names = [part.strip() for part in value.split(",") if part.strip()]
    for name in names:
        _namespace(name)
    return tuple(dict.fromkeys(names))


def _namespace(value: Any) -> Any:
    if not isinstance(value, str) or not _NAMESPACE.match(value):
        raise ValueError(f"{value!r} is no namespace name; use lower-case letters, digits and '-', at most 63")
    return value


def _writable(directory: Path | None) -> Path | None:
    if directory is not None and not (directory.is_dir() and os.access(directory, os.W_OK)):
        raise ValueError("it is not a directory that can be written to; create it, or mount a volume there")
    return directory


class Settings(BaseModel):
    """What the operator needs to know about its surroundings. The alias of each field is its environment variable."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime_image: Annotated[str, Field(alias="BUSLOAD_RUNTIME_IMAGE", min_length=1, max_length=512)]
    """Image of the runtime pods."""
    gpu_runtime_image: Annotated[str | None, Field(alias="BUSLOAD_GPU_RUNTIME_IMAGE", min_length=1, max_length=512)] = (
        None
    )
    """Image of the runtime pods on GPUs; not given: services that ask for a GPU are told so."""
    image_pull_policy: Annotated[
        Literal["Always", "IfNotPresent", "Never"], Field(alias="BUSLOAD_IMAGE_PULL_POLICY")
    ] = "IfNotPresent"
    namespace: Annotated[str, BeforeValidator(_namespace), Field(alias="BUSLOAD_NAMESPACE")] = "busload-system"
    """The operator's own namespace, where its Lease lives."""
    watch_namespaces: Annotated[tuple[str, ...], BeforeValidator(_names), Field(alias="BUSLOAD_WATCH_NAMESPACES")] = ()
    """Namespaces whose services are served; empty: all."""
    scrape_seconds: Annotated[float, Field(alias="BUSLOAD_SCRAPE_SECONDS", ge=0.2, le=60)] = 2.0
    """Seconds between two observations of a service."""
    resync_seconds: Annotated[float, Field(alias="BUSLOAD_RESYNC_SECONDS", ge=1, le=3600)] = 300.0
    """Seconds between two complete lists, which notice what the watches missed."""
    memory_bandwidth: Annotated[float | None, Field(alias="BUSLOAD_MEMORY_BANDWIDTH", gt=0, lt=1e6)] = None
    """Memory bandwidth that a runtime pod gets on this cluster's nodes, in GB/s (10^9 bytes), as `busload plan`
    measures it; not given: each service's pods measure it, and say so when they are ready."""
    record_directory: Annotated[Path | None, AfterValidator(_writable), Field(alias="BUSLOAD_RECORD_DIRECTORY")] = None
    """Where each service's steps are recorded for `busload replay`; not given: nowhere. It must exist."""
    record_max_mib: Annotated[int, Field(alias="BUSLOAD_RECORD_MAX_MIB", ge=1, le=65536)] = 32
    """MiB that the recordings of one service take at most."""
    log_level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Field(alias="BUSLOAD_LOG_LEVEL")] = "INFO"
    http_port: Annotated[int, Field(alias="BUSLOAD_HTTP_PORT", ge=0, le=65535)] = 8080
    """Probes and /metrics; 0: any free port."""
    identity: Annotated[str, Field(alias="POD_NAME", min_length=1, max_length=253)] = Field(
        default_factory=socket.gethostname
    )
    """Name of this process in the Lease and in events."""
    workers: Annotated[int, Field(alias="BUSLOAD_WORKERS", ge=1, le=64)] = 8

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Raises `SettingsError` with one line per wrong variable. An empty variable counts as not set."""
        variables = [field.alias for field in cls.model_fields.values() if field.alias]
        values = {name: environment[name] for name in variables if environment.get(name)}
        if "BUSLOAD_NAMESPACE" not in values and (own := _own_namespace()):
            values["BUSLOAD_NAMESPACE"] = own
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SettingsError("\n".join(_explain(item, values) for item in error.errors())) from None


def _own_namespace() -> str | None:
    try:
        with open(_OWN_NAMESPACE_FILE, encoding="utf-8") as file:
            return file.read().strip() or None
    except OSError:
        return None


def _explain(item: Any, values: Mapping[str, str]) -> str:
    variable = str(item["loc"][0])
    if item["type"] == "missing":
        return f"{variable} is not set: it must name the image of the runtime pods, such as example.org/busload:1.0"
    return f"{variable}={values.get(variable, '')!r} is not usable: {item['msg']}; correct the variable and start again"
