"""One InferenceService as the operator reads it: parsed, checked, in the types of the tuning core. Pure."""

from dataclasses import dataclass

from pydantic import ValidationError

from busload_operator.api.schema import problems
from busload_operator.api.units import parse_duration
from busload_operator.api.v1alpha1 import InferenceService
from busload_operator.control.kinds import Key, Object
from busload_operator.control.stored import stored_status
from busload_operator.resources.initial_limits import longest_sequence
from busload_operator.tuning.types import Bounds, Mode, Objectives, Range, Scaling

RECORD_ANNOTATION = "busload.dev/record"
"""On an InferenceService: "false" keeps it out of the recordings."""


class InvalidSpecError(ValueError):
    """A spec that got past admission (an older CRD, say) and cannot be served; names each field and what is allowed."""


@dataclass(frozen=True, slots=True)
class Service:
    """A valid service. `live` is the object as it was read, its status included."""

    key: Key
    uid: str
    generation: int
    live: Object
    parsed: InferenceService
    bounds: Bounds
    objectives: Objectives
    mode: Mode
    scaling: Scaling

    @property
    def stored(self) -> Object:
        """The stored status, without what this version does not understand."""
        return stored_status(self.live)

    @property
    def is_recorded(self) -> bool:
        """Whether its steps may be recorded, where the operator records at all."""
        annotations = self.live["metadata"].get("annotations") or {}
        return annotations.get(RECORD_ANNOTATION) != "false"

    @property
    def initial_sequence_length(self) -> int | None:
        """What the spec has a new service start with; None: with the longest that its bounds allow."""
        return self.parsed.spec.bounds.max_sequence_length.initial

    @property
    def asked_replicas(self) -> int:
        """The replicas that the spec itself asks for: the number in External scaling, else the lower bound."""
        if self.scaling is Scaling.EXTERNAL:
            return self.bounds.replicas.clamp(self.parsed.spec.replicas)
        return self.bounds.replicas.min


def read_service(live: Object) -> Service:
    """Raises `InvalidSpecError`."""
    try:
        parsed = InferenceService.model_validate({name: value for name, value in live.items() if name != "status"})
    except ValidationError as error:
        raise InvalidSpecError("; ".join(map(str, problems(error)))) from None
    metadata, spec = live["metadata"], parsed.spec
    low, high = spec.bounds.batch_size.min, spec.bounds.batch_size.max
    initial = spec.bounds.batch_size.initial
    shortest = spec.bounds.max_sequence_length.min
    return Service(
        key=Key(metadata["namespace"], metadata["name"]),
        uid=metadata["uid"],
        generation=metadata["generation"],
        live=live,
        parsed=parsed,
        bounds=Bounds(
            max_sequence_length=Range(shortest, max(shortest, longest_sequence(spec))),
            kv_cache_percent=Range(spec.bounds.kv_cache_percent.min, spec.bounds.kv_cache_percent.max),
            batch_size=Range(low, high),
            batch_size_initial=Range(low, high).clamp(8) if initial is None else initial,
            replicas=Range(spec.bounds.replicas.min, spec.bounds.replicas.max),
        ),
        objectives=Objectives(
            time_to_first_token=parse_duration(spec.objectives.time_to_first_token),
            inter_token_latency=parse_duration(spec.objectives.inter_token_latency),
            share=spec.objectives.percentile / 100,
        ),
        mode=Mode(spec.tuning.mode),
        scaling=Scaling(spec.scaling.mode),
    )
