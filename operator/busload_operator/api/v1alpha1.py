"""`InferenceService` busload.dev/v1alpha1: one served model, its objectives and the bounds of its tuning.

Docstrings of fields become the descriptions that `kubectl explain` prints. Defaults here are part of the API and stay
in stored objects: never change one within this version. Models that read are tolerant: fields they do not know are
ignored, so that an older operator can run beside a newer one; `check_authored` is as strict as the API server.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from busload_operator.api.schema import Integer, Model, Problem, Rule, cel_path, problems, unknown_field
from busload_operator.api.status import Status
from busload_operator.api.units import (
    ByteQuantity,
    Count,
    CpuQuantity,
    Duration,
    parse_bytes,
    parse_cpu,
    parse_duration,
)

GROUP = "busload.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "InferenceService"
PLURAL = "inferenceservices"

_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_GGUF_PATH = r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*[.]gguf$"
GPU = "nvidia.com/gpu"
"""The extended resource of NVIDIA's device plugin: whole GPUs, or MIG slices under the same name."""
# Children carry the service's name: these two would take over objects that Kubernetes itself keeps in a namespace.
_RESERVED_NAMES = ("default", "kubernetes")

BundledName = Literal["smollm2-135m-instruct"]
BUNDLED_CONTEXTS: dict[str, int] = {"smollm2-135m-instruct": 8192}
"""Longest sequence of each bundled model, in tokens: what its file says. The runtime refuses limits above it."""
Text = Annotated[str, Field(min_length=1, max_length=512)]


class ImageSource(Model):
    """A model file inside a container image. Reserved: not served by this version."""

    reference: Text
    """Image reference, like registry.example/models/chat:v1."""
    path: Text
    """Path of the GGUF file in the image."""


class PersistentVolumeClaimSource(Model):
    """A GGUF file on a claim of the service's namespace, mounted read-only into every replica."""

    rules = (
        Rule(
            f"self.path.matches('{_GGUF_PATH}')",
            lambda s: re.fullmatch(_GGUF_PATH, s.path) is not None,
            "path {path} must lead from the root of the claim to a GGUF file, like models/chat.gguf: "
            "no leading slash, no '..', letters, digits and ._- in names, and .gguf at the end",
            "path",
        ),
    )
    claim_name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
    """Name of the PersistentVolumeClaim. With more than one replica on several nodes it must allow ReadOnlyMany or
    ReadWriteMany."""
    path: Text
    """Path of the GGUF file from the root of the claim."""


class HuggingFaceSource(Model):
    """A file of a Hugging Face repository. Reserved: not served by this version."""

    repository: Text
    """Repository, like organisation/name."""
    revision: Annotated[str, Field(max_length=128)] = "main"
    """Branch, tag or commit."""
    file: Text
    """Name of the GGUF file in the repository."""


def _sources(source: Any) -> int:
    every = (source.bundled, source.image, source.persistent_volume_claim, source.hugging_face)
    return sum(one is not None for one in every)


class ModelSource(Model):
    """Where the model's file comes from: exactly one of the fields."""

    rules = (
        Rule(
            "[has(self.bundled), has(self.image), has(self.persistentVolumeClaim), has(self.huggingFace)]"
            ".filter(given, given).size() == 1",
            lambda s: _sources(s) == 1,
            "name exactly one model source: bundled or persistentVolumeClaim",
        ),
        Rule(
            "!has(self.image)",
            lambda s: s.image is None,
            "models in an image are not served by this version; use bundled, or put the GGUF file on a claim and "
            "name it under persistentVolumeClaim",
            "image",
            "FieldValueForbidden",
        ),
        Rule(
            "!has(self.huggingFace)",
            lambda s: s.hugging_face is None,
            "downloads from Hugging Face are not served by this version; download the GGUF file to a claim and "
            "name it under persistentVolumeClaim",
            "huggingFace",
            "FieldValueForbidden",
        ),
    )
    bundled: BundledName | None = None
    """A model that the runtime image contains."""
    image: ImageSource | None = None
    persistent_volume_claim: PersistentVolumeClaimSource | None = None
    hugging_face: HuggingFaceSource | None = None


class ModelSpec(Model):
    """The model to serve."""

    rules = (
        Rule(
            "self.weightPrecision != 'INT4'",
            lambda s: s.weight_precision != "INT4",
            "weightPrecision INT4 needs an evaluation that passed for this model, and this version has none; use Auto",
            "weightPrecision",
            "FieldValueForbidden",
        ),
    )
    source: ModelSource
    weight_precision: Literal["Auto", "FP16", "INT8", "FP8", "INT4"] = "Auto"
    """Precision of the weights in memory. Auto: INT8 on a GPU, what the model's file holds on CPUs. FP16: 16 bits,
    bfloat16 on a GPU. The others are for GPUs, and INT4 needs an evaluation that passed."""
    served_name: Annotated[str, Field(max_length=128, pattern=r"^([A-Za-z0-9][A-Za-z0-9._:/-]*)?$")] | None = None
    """Name of the model in the OpenAI API; the name of the InferenceService if absent or empty."""


def _between(field: str, low: str, high: str) -> Rule:
    attribute = {"timeToFirstToken": "time_to_first_token", "interTokenLatency": "inter_token_latency"}[field]
    seconds = (parse_duration(low), parse_duration(high))
    return Rule(
        f"duration(self.{field}) >= duration('{low}') && duration(self.{field}) <= duration('{high}')",
        lambda o: seconds[0] <= parse_duration(getattr(o, attribute)) <= seconds[1],
        f"{field} {{{field}}} must be from {low} to {high}",
        field,
    )


class Objectives(Model):
    """What clients should feel, as means over some seconds. Tuning never trades these away for throughput."""

    rules = (_between("timeToFirstToken", "1ms", "1h"), _between("interTokenLatency", "1ms", "1m"))
    time_to_first_token: Duration = "2s"
    """From the arrival of a request to its first token. The wait (queue depth / finish rate) is held against it."""
    inter_token_latency: Duration = "100ms"
    """Between two tokens of a request. A larger batch must not miss it."""
    percentile: Annotated[int, Field(ge=50, le=99)] = 99
    """Percent of requests that should meet both. Replicas are planned for it: a lower one leaves them less room for
    bursts, and costs fewer of them."""


_MIN_UP_TO_MAX = Rule(
    "self.min <= self.max",
    lambda b: b.min <= b.max,
    "min {min} is above max {max}: lower min or raise max (a bound that is not given takes its default)",
    "min",
)


_INITIAL_INSIDE = Rule(
    "!has(self.initial) || (self.initial >= self.min && self.initial <= self.max)",
    lambda b: b.initial is None or b.min <= b.initial <= b.max,
    "initial {initial} is outside min {min} to max {max} (a bound that is not given takes its default)",
    "initial",
)


class SequenceLengthBounds(Model):
    """Bounds of the longest request, prompt and output together, in tokens."""

    rules = (_MIN_UP_TO_MAX, _INITIAL_INSIDE)
    initial: Annotated[Integer, Field(ge=16, le=1_048_576)] | None = None
    """What a new service starts with; max, as far as model and memory carry it, if absent."""
    min: Annotated[Integer, Field(ge=16, le=1_048_576)] = 1024
    """Requests up to this length are always accepted."""
    max: Annotated[Integer, Field(ge=16, le=1_048_576)] = 8192
    """Longer requests are always refused. The model's own context limits it further."""


class KvCachePercentBounds(Model):
    """Bounds of the KV cache, in percent of the memory left after weights and activations."""

    rules = (_MIN_UP_TO_MAX, _INITIAL_INSIDE)
    initial: Annotated[Integer, Field(ge=1, le=100)] | None = None
    """What a new service starts with; max if absent."""
    min: Annotated[Integer, Field(ge=1, le=100)] = 20
    """The KV cache never gets less."""
    max: Annotated[Integer, Field(ge=1, le=100)] = 90
    """The KV cache never gets more."""


class BatchSizeBounds(Model):
    """Bounds of the batch limit: requests that run in one step."""

    rules = (_MIN_UP_TO_MAX, _INITIAL_INSIDE)
    initial: Annotated[Integer, Field(ge=1, le=4096)] | None = None
    """What a new service starts with; 8, or the nearest value inside the bounds, if absent."""
    min: Annotated[Integer, Field(ge=1, le=4096)] = 1
    """The batch limit never goes lower."""
    max: Annotated[Integer, Field(ge=1, le=4096)] = 64
    """The batch limit never goes higher."""


class ReplicaBounds(Model):
    """Bounds of the number of replicas."""

    rules = (_MIN_UP_TO_MAX,)
    min: Annotated[Integer, Field(ge=1, le=1000)] = 1
    """Replicas that always run."""
    max: Annotated[Integer, Field(ge=1, le=1000)] = 4
    """Replicas that are never exceeded, in any scaling mode."""


class Bounds(Model):
    """What the operator may change, and how far. The user owns the bounds, the operator moves inside them."""

    max_sequence_length: SequenceLengthBounds = Field(default_factory=SequenceLengthBounds)
    kv_cache_percent: KvCachePercentBounds = Field(default_factory=KvCachePercentBounds)
    batch_size: BatchSizeBounds = Field(default_factory=BatchSizeBounds)
    replicas: ReplicaBounds = Field(default_factory=ReplicaBounds)


class ApiKeys(Model):
    """Who may send requests. Without it everybody who reaches the service may."""

    secret_name: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
    """Name of a Secret in the service's namespace. Its entry keys has a line NAME:SHA256 or NAME:SHA256:WEIGHT for each
    key, with the SHA-256 of the key in hex. A change counts within about a minute; replicas wait until the Secret
    exists."""


class Tuning(Model):
    """Whether the operator changes the service's limits."""

    mode: Literal["Auto", "Recommend", "Off"] = "Auto"
    """Auto changes limits inside the bounds; Recommend only reports what it would change; Off neither."""


class Scaling(Model):
    """Who decides the number of replicas."""

    mode: Literal["Observed", "External"] = "Observed"
    """Observed: the operator, from batch and queue. External: whoever writes spec.replicas, like an autoscaler through
    the scale subresource."""


class ResourceRequests(Model):
    """What the scheduler sets aside for each replica."""

    cpu: CpuQuantity = "2"
    """CPUs; also the number of compute threads."""
    memory: ByteQuantity = "2Gi"


class ResourceLimits(Model):
    """What each replica may use at most."""

    cpu: CpuQuantity | None = None
    """Best left out: a CPU limit stalls whole steps when it throttles."""
    memory: ByteQuantity = "2Gi"
    """Weights, activations and KV cache together; the runtime plans its memory by it. With a GPU, which holds these:
    what the process itself takes, at least 4Gi."""
    gpus: Annotated[Count | None, Field(alias=GPU)] = None
    """1: the replica computes on a whole GPU of its own. Absent: it computes on CPUs."""


_GPUS = f"limits['{GPU}']"
_CEL_GPUS = f"self.{cel_path(_GPUS)}"


class Resources(Model):
    """Resources of each replica."""

    rules = (
        Rule(
            f"!has({_CEL_GPUS}) || {_CEL_GPUS} == 1 || {_CEL_GPUS} == '1'",
            lambda r: r.limits.gpus in (None, 1, "1"),
            f"{GPU} {{{_GPUS}}} must be 1: a replica computes on one whole GPU. More need a model split "
            "over GPUs, which this version cannot do; shares of one cannot be measured, so nothing could be tuned. For "
            "more throughput raise bounds.replicas; for CPUs leave it out",
            _GPUS,
        ),
        Rule(
            f"!has(self.gpuMemory) || has({_CEL_GPUS})",
            lambda r: r.gpu_memory is None or r.limits.gpus is not None,
            f"gpuMemory {{gpuMemory}} is given, but no GPU: add {GPU}: 1 to limits, or remove gpuMemory",
            "gpuMemory",
        ),
        Rule(
            "!has(self.gpuMemory) || quantity(self.gpuMemory).compareTo(quantity('1Gi')) >= 0",
            lambda r: r.gpu_memory is None or parse_bytes(r.gpu_memory) >= parse_bytes("1Gi"),
            "gpuMemory {gpuMemory} is below 1Gi, which the CUDA context alone takes; is the unit (Gi) missing?",
            "gpuMemory",
        ),
        Rule(
            f"!has({_CEL_GPUS}) || quantity(self.limits.memory).compareTo(quantity('4Gi')) >= 0",
            lambda r: r.limits.gpus is None or parse_bytes(r.limits.memory) >= parse_bytes("4Gi"),
            "memory limit {limits.memory} is below 4Gi, which a process on a GPU needs beside the GPU's own memory: "
            "raise the limit (one that is not given takes its default)",
            "limits.memory",
        ),
        Rule(
            "quantity(self.limits.memory).compareTo(quantity(self.requests.memory)) >= 0",
            lambda r: parse_bytes(r.limits.memory) >= parse_bytes(r.requests.memory),
            "memory limit {limits.memory} is below the request {requests.memory}: raise the limit or lower the "
            "request (one that is not given takes its default)",
            "limits.memory",
        ),
        Rule(
            "quantity(self.requests.memory).compareTo(quantity('64Mi')) >= 0",
            lambda r: parse_bytes(r.requests.memory) >= parse_bytes("64Mi"),
            "memory request {requests.memory} is below 64Mi, which no model fits; is the unit (Mi, Gi) missing?",
            "requests.memory",
        ),
        Rule(
            "quantity(self.requests.cpu).compareTo(quantity('10m')) >= 0",
            lambda r: parse_cpu(r.requests.cpu) >= 10,
            "CPU request {requests.cpu} is below 10m",
            "requests.cpu",
        ),
        Rule(
            "!has(self.limits.cpu) || quantity(self.limits.cpu).compareTo(quantity(self.requests.cpu)) >= 0",
            lambda r: r.limits.cpu is None or parse_cpu(r.limits.cpu) >= parse_cpu(r.requests.cpu),
            "CPU limit {limits.cpu} is below the request {requests.cpu}: raise the limit, lower the request, or leave "
            "the limit out",
            "limits.cpu",
        ),
    )
    requests: ResourceRequests = Field(default_factory=ResourceRequests)
    limits: ResourceLimits = Field(default_factory=ResourceLimits)
    gpu_memory: ByteQuantity | None = None
    """Memory of the GPU that a replica may use, like 76Gi; only with a GPU. With it the service is planned before a pod
    exists, and pods take no more; without it pods use what their GPU has free, and say how much that is."""


class Spec(Model):
    """What the user wants."""

    rules = (
        Rule(
            "self.scaling.mode != 'External' || "
            "(self.replicas >= self.bounds.replicas.min && self.replicas <= self.bounds.replicas.max)",
            lambda s: s.scaling.mode != "External" or s.bounds.replicas.min <= s.replicas <= s.bounds.replicas.max,
            "replicas {replicas} is outside bounds.replicas, {bounds.replicas.min} to {bounds.replicas.max}; "
            "in scaling mode External set replicas inside the bounds or widen them",
            "replicas",
        ),
        Rule(
            "!has(self.model.source.bundled) || "
            f"self.bounds.maxSequenceLength.min <= {BUNDLED_CONTEXTS}[self.model.source.bundled]",
            lambda s: (
                s.model.source.bundled is None
                or s.bounds.max_sequence_length.min <= BUNDLED_CONTEXTS[s.model.source.bundled]
            ),
            "min {bounds.maxSequenceLength.min} is above the context length of {model.source.bundled}, "
            f"{', '.join(f'{length} ({name})' for name, length in BUNDLED_CONTEXTS.items())}: lower min",
            "bounds.maxSequenceLength.min",
        ),
        Rule(
            f"self.model.weightPrecision in ['Auto', 'INT4'] || has(self.resources.{cel_path(_GPUS)})",
            lambda s: s.model.weight_precision in ("Auto", "INT4") or s.resources.limits.gpus is not None,
            "weightPrecision {model.weightPrecision} is for GPUs; on CPUs this version runs the weights as the model's "
            f"file holds them: use Auto, or ask for a GPU ({GPU}: 1 in resources.limits)",
            "model.weightPrecision",
            "FieldValueForbidden",
        ),
    )
    model: ModelSpec
    objectives: Objectives = Field(default_factory=Objectives)
    bounds: Bounds = Field(default_factory=Bounds)
    tuning: Tuning = Field(default_factory=Tuning)
    scaling: Scaling = Field(default_factory=Scaling)
    replicas: Annotated[Integer, Field(ge=1, le=1000)] = 1
    """Replicas to run; read only in scaling mode External, where the scale subresource writes it."""
    resources: Resources = Field(default_factory=Resources)
    api_keys: ApiKeys | None = None


class ObjectMeta(Model):
    """The part of an object's metadata that the operator reads."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: str | None = None


class InferenceService(Model):
    """An LLM served by busload's own runtime, with its objectives and the bounds of its tuning."""

    rules = (
        Rule(
            "size(self.metadata.name) <= 52",
            lambda s: len(s.metadata.name) <= 52,
            "a name has at most 52 characters, so that the names of pods and children fit",
            "metadata.name",
        ),
        Rule(
            f"self.metadata.name.matches('{_NAME}')",
            lambda s: re.fullmatch(_NAME, s.metadata.name) is not None,
            "a name starts with a letter and has only a-z, 0-9 and -, because the Service carries it",
            "metadata.name",
        ),
        Rule(
            f"!(self.metadata.name in {list(_RESERVED_NAMES)})",
            lambda s: s.metadata.name not in _RESERVED_NAMES,
            "this name belongs to an object that Kubernetes keeps in the namespace; choose another",
            "metadata.name",
        ),
    )
    api_version: Literal["busload.dev/v1alpha1"] = "busload.dev/v1alpha1"
    kind: Literal["InferenceService"] = "InferenceService"
    metadata: ObjectMeta
    spec: Spec
    status: Status = Field(default_factory=Status)


def check(manifest: dict[str, Any]) -> list[Problem]:
    """What is wrong with a stored object; empty if nothing. Fields that a newer version has added are no problem."""
    try:
        InferenceService.model_validate(manifest)
    except ValidationError as error:
        return problems(error)
    return []


def check_authored(manifest: dict[str, Any]) -> list[Problem]:
    """What is wrong with a manifest that a user wrote: `check`, and unknown fields as `kubectl apply` refuses them."""
    known = {field.alias for field in InferenceService.model_fields.values()}
    found = [unknown_field(key) for key in sorted(set(manifest) - known)]
    try:
        Spec.model_validate(manifest.get("spec"), extra="forbid")
    except ValidationError as error:
        found += problems(error, "spec", only="extra_forbidden")
    return found + check(manifest)
