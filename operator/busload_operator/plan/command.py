"""What `busload plan` does: options -> facts, machine, limits -> account. The only place of the plan that prints."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from busload_operator.api.schema import problems
from busload_operator.api.units import parse_bytes, parse_duration
from busload_operator.api.v1alpha1 import InferenceService
from busload_operator.plan import bandwidth as bandwidths
from busload_operator.plan.render import as_json, table
from busload_operator.resources.gpu import gpu_budget, wants_gpu, weight_bits
from busload_operator.resources.initial_limits import compute_threads, initial_limits
from busload_operator.tuning import words
from busload_operator.tuning.feasible import Bandwidth, Feasibility, judge
from busload_operator.tuning.models import BUNDLED, BUNDLED_ON_GPU
from busload_operator.tuning.planner import MemoryPlan, ModelFacts, plan_memory
from busload_runtime.contract import Limits, default_token_budget

_DEFAULT_LENGTH = 8192
_DEFAULT_BATCH = 8
_DEFAULT_PERCENT = 90


class PlanError(ValueError):
    """Options that cannot be planned with; the message names the option, its value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command's options, as its help describes them. None: not given."""

    service: Path | None
    model: str | None
    memory: str | None
    threads: int | None
    max_sequence_length: int | None
    batch_size: int | None
    kv_cache_percent: int | None
    token_budget: int | None
    inter_token_latency: str | None
    bandwidth: float | None
    device: str | None
    weight_bits: float | None
    kv_bits: int | None
    overhead: str | None


@dataclass(frozen=True, slots=True)
class Account:
    """Everything that is printed."""

    plan: MemoryPlan
    """Of the longest sequence that was asked for."""
    verdict: Feasibility
    shortest: int
    """Tokens of the request that must fit."""
    longest: int
    bandwidth: Bandwidth | None
    objective: float
    """Inter-token latency, seconds."""
    threads: int
    device: str
    start: Limits | None
    """What the operator starts this very service with; None where an option replaces what the manifest says."""


def run(options: Options, json_output: bool) -> tuple[str, bool]:
    """The text to print, and whether all of it is possible. Raises `PlanError` for what cannot be planned."""
    account = plan(options)
    text = json.dumps(as_json(account), indent=2) if json_output else table(account)
    return text, account.verdict.possible is not False


def plan(options: Options) -> Account:
    """Raises `PlanError`."""
    service = None if options.service is None else _read_service(options.service)
    if options.device is None:
        options = replace(options, device="gpu" if service is not None and wants_gpu(service.spec) else "cpu")
    facts = _facts(options, service)
    threads = options.threads or (2 if service is None else compute_threads(service.spec))
    budget = _budget(options, service)
    if service is None:
        length = options.max_sequence_length or min(_DEFAULT_LENGTH, facts.context_length)
        wanted = _limits(options, length)
        shortest, objective = length, "100ms"
    else:
        bounds = service.spec.bounds.max_sequence_length
        wanted = _limits(options, options.max_sequence_length or bounds.max, initial_limits(service.spec))
        shortest = min(wanted.max_sequence_length, bounds.min)
        objective = service.spec.objectives.inter_token_latency
    objective = options.inter_token_latency or objective
    try:
        seconds = parse_duration(objective)
    except ValueError as error:
        raise PlanError(f"--inter-token-latency {error}") from None
    bandwidth = _bandwidth(options, threads)
    must = plan_memory(facts, budget, replace(wanted, max_sequence_length=shortest), threads)
    if options.device == "gpu":
        must = replace(must, budget_name="--memory" if service is None or options.memory is not None else "gpuMemory")
    return Account(
        plan=replace(must, limits=wanted),
        verdict=judge(must, wanted.max_sequence_length, seconds, bandwidth),
        shortest=shortest,
        longest=wanted.max_sequence_length,
        bandwidth=bandwidth,
        objective=seconds,
        threads=threads,
        device=options.device or "cpu",
        start=_start(options, service),
    )


def _start(options: Options, service: InferenceService | None) -> Limits | None:
    replaced = (options.model, options.memory, options.threads, options.overhead, options.weight_bits, options.kv_bits)
    its_own = service is not None and (options.device == "gpu") == wants_gpu(service.spec)
    if service is None or not its_own or any(value is not None for value in replaced):
        return None
    return initial_limits(service.spec)


def _limits(options: Options, length: int, start: Limits | None = None) -> Limits:
    """Limits of a service, or the defaults of one, with what the options replace."""
    batch = options.batch_size or (_DEFAULT_BATCH if start is None else start.batch_size)
    budget = options.token_budget or default_token_budget(batch)
    return Limits(
        max_sequence_length=length,
        batch_size=batch,
        kv_cache_percent=options.kv_cache_percent or (_DEFAULT_PERCENT if start is None else start.kv_cache_percent),
        token_budget=max(budget, batch),
        max_queued_requests=0,
        max_queued_tokens=0,
    )


def _read_service(path: Path) -> InferenceService:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"-f {path} cannot be read: {error}") from None
    found = [
        item for item in _documents(path, text) if isinstance(item, dict) and item.get("kind") == "InferenceService"
    ]
    if len(found) != 1:
        raise PlanError(f"-f {path} holds {len(found)} objects of kind InferenceService; give a file with exactly one")
    try:
        return InferenceService.model_validate(found[0])
    except ValidationError as error:
        raise PlanError("\n".join(f"-f {path}: {problem}" for problem in problems(error))) from None


def _documents(path: Path, text: str) -> list[Any]:
    try:
        import yaml
    except ImportError:  # the runtime's installation has none; JSON is YAML as well
        try:
            return [json.loads(text)]
        except ValueError:
            raise PlanError(f"-f {path} is not JSON, and YAML needs a library; run: pip install PyYAML") from None
    try:
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise PlanError(f"-f {path} is no YAML: {' '.join(str(error).split())}") from None


def _facts(options: Options, service: InferenceService | None) -> ModelFacts:
    source = options.model
    if source is None and service is not None and service.spec.model.source.bundled is not None:
        source = f"bundled:{service.spec.model.source.bundled}"
    if source is None and service is not None:
        claim = service.spec.model.source.persistent_volume_claim
        place = f"{claim.path} on the claim {claim.claim_name}" if claim else "not bundled"
        raise PlanError(f"the service's model is {place}, which is not read here; give a copy: --model FILE.gguf")
    if source is None:
        raise PlanError("nothing to plan: give -f SERVICE.yaml, or --model bundled:NAME or FILE.gguf")
    table = BUNDLED_ON_GPU[8 if service is None else weight_bits(service.spec)] if options.device == "gpu" else BUNDLED
    known = table.get(source.removeprefix("bundled:")) if source.startswith("bundled:") else None
    other_elements = options.device == "gpu" and (options.weight_bits, options.kv_bits) != (None, None)
    if known is not None and not other_elements:
        return (
            known if options.overhead is None else replace(known, overhead_bytes=_bytes("--overhead", options.overhead))
        )
    if service is not None and options.weight_bits is None and weight_bits(service.spec) == 16:
        options = replace(options, weight_bits=16)
    return _facts_of_file(options, source)


def _facts_of_file(options: Options, source: str) -> ModelFacts:
    from busload_operator.plan import gguf_facts
    from busload_runtime.model.errors import ModelError

    overhead = None if options.overhead is None else _bytes("--overhead", options.overhead)
    try:
        name, file, config = gguf_facts.read_header(source)
        if options.device == "gpu":
            elements = gguf_facts.GpuElements(options.weight_bits, options.kv_bits)
            facts = gguf_facts.gpu_facts(name, file, config, elements)
        else:
            facts = gguf_facts.cpu_facts(name, file, config)
    except ModelError as error:
        raise PlanError(f"--model {error}") from None
    return facts if overhead is None else replace(facts, overhead_bytes=overhead)


def _budget(options: Options, service: InferenceService | None) -> int:
    if options.memory is not None:
        return _bytes("--memory", options.memory)
    if service is None:
        raise PlanError("--memory is missing: give what one replica may use, like 768Mi or 2Gi")
    if options.device == "gpu":
        available = gpu_budget(service.spec)
        if available is None:
            raise PlanError(
                "the service does not say how much memory its GPU has: give spec.resources.gpuMemory, or --memory"
            )
        return available
    return parse_bytes(service.spec.resources.limits.memory)


def _bytes(option: str, text: str) -> int:
    try:
        value = parse_bytes(text)
    except ValueError as error:
        raise PlanError(f"{option} {error}") from None
    if value < 1:
        raise PlanError(f'{option} {text!r} must be above 0, like "768Mi"')
    return value


def _bandwidth(options: Options, threads: int) -> Bandwidth | None:
    if options.bandwidth is not None:
        if not 0 < options.bandwidth < 1e6:
            raise PlanError(f"--bandwidth {options.bandwidth:g} must be GB/s above 0 and below 1000000")
        return Bandwidth(options.bandwidth * 1e9, "given")
    if options.device == "gpu":
        return None
    return Bandwidth(bandwidths.measure(threads), f"measured here, {words.count(threads, 'thread')}")
