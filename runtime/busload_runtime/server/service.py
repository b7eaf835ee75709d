"""What the routes share: the one place where the parts of the HTTP process meet."""

import time
from dataclasses import dataclass, field, replace

from busload_runtime.contract import Limits, Pace, StepLaw
from busload_runtime.engine.messages import Ready, Stats
from busload_runtime.server.admission import Admission
from busload_runtime.server.api_keys import ApiKeys
from busload_runtime.server.body import BodyReader
from busload_runtime.server.deadline import Timeouts
from busload_runtime.server.engine_client import EngineClient
from busload_runtime.server.errors import ApiError
from busload_runtime.server.grammar_check import GrammarChecker
from busload_runtime.server.metrics import Metrics
from busload_runtime.server.tokenise import PromptEncoder
from busload_runtime.server.tracing import Tracing

_BODY_BYTES_PER_TOKEN = 64


@dataclass(slots=True)
class Service:
    """State of one `busload serve`. Belongs to the event loop's thread."""

    model_name: str
    metrics: Metrics
    admission: Admission
    engine: EngineClient
    created: int = field(default_factory=lambda: int(time.time()))
    text: PromptEncoder | None = None
    ready: Ready | None = None
    bodies: BodyReader = field(default_factory=BodyReader)
    plans_by_own_law: bool = False
    """The engine's step law is the one in force: there is no limits file that could tell one."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    keys: ApiKeys | None = None
    """API keys in force; None: everybody is welcome."""
    tenant_header: str = ""
    """Name of the header that tells tenants apart; empty: none does."""
    log_format: str = "json"
    log_prompts: bool = False
    tracing: Tracing | None = None
    quiescing: bool = False
    """SIGUSR1 or SIGTERM came: not ready, and every response closes its connection."""
    open_responses: int = 0
    grammars: GrammarChecker = field(default_factory=GrammarChecker)

    @property
    def limits(self) -> Limits:
        """The limits in force."""
        return self.admission.limits

    @property
    def max_body_bytes(self) -> int:
        """The largest request body read: ample for the longest prompt with every character escaped, and for batches."""
        return 2**20 + _BODY_BYTES_PER_TOKEN * self.limits.max_sequence_length

    @property
    def pace(self) -> Pace:
        """Objectives and step law in force."""
        return self.metrics.pace

    def on_limits(self, generation: int, limits: Limits, pace: Pace) -> None:
        """The engine runs under these now."""
        self.metrics.pace = pace
        self.admission.limits = limits
        self.admission.rate.law = pace.law
        newest = self.engine.stats or self.ready
        self._on_own_law(None if newest is None else newest.step_law)
        self.metrics.limits = limits
        self.metrics.generation = generation

    def on_keys(self, keys: ApiKeys) -> None:
        """Requests need one of these keys from now on."""
        self.keys = keys
        self.metrics.api_keys = len(keys.entries)
        self.metrics.name_tenants(tenant.label for _, tenant in keys.entries)

    def on_stats(self, stats: Stats) -> None:
        self._on_own_law(stats.step_law)
        self.metrics.observe(stats)
        self.admission.observe(stats)

    def _on_own_law(self, coefficients: tuple[float, float, float, float] | None) -> None:
        """The engine finds this step law; it counts while no other is told."""
        law = None if coefficients is None else StepLaw(*coefficients)
        if self.plans_by_own_law:
            self.metrics.pace = replace(self.metrics.pace, law=law)
        if self.metrics.pace.law is None or self.plans_by_own_law:
            self.admission.rate.law = law

    def loaded(self) -> tuple[PromptEncoder, Ready]:
        """The model, once it answers. Raises `ApiError` 503 before that and when the engine is gone."""
        if not self.engine.alive:
            raise ApiError(
                503,
                f"the engine is gone and this server about to restart: {self.engine.failed.result()}",
                code="engine_error",
                retry_after=5,
            )
        if self.text is None or self.ready is None:
            raise ApiError(503, "the model is still loading; try again in a moment", code="loading", retry_after=2)
        return self.text, self.ready

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` 404 when a request names another model."""
        if name is not None and name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
                reason="invalid",
            )
