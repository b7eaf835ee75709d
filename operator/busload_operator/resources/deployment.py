"""The Deployment of the runtime pods.

The pod template does not depend on the limits: a change of limits restarts nothing.
"""

from typing import Any

from busload_operator.api.units import parse_bytes
from busload_operator.api.v1alpha1 import GPU, InferenceService
from busload_operator.resources import gpu
from busload_operator.resources.gpu import wants_gpu
from busload_operator.resources.initial_limits import compute_threads
from busload_operator.resources.labels import labels, metadata, selector
from busload_operator.resources.limits_config_map import limits_config_map_name
from busload_operator.resources.service import PORT, PORT_NAME
from busload_operator.resources.settings import RuntimeSettings
from busload_runtime.contract import LIMITS_KEY

CONTAINER = "runtime"
USER = 65532
QUIESCE_SECONDS = 5
"""Time for endpoints to forget a pod that goes; it still serves meanwhile."""
DRAIN_SECONDS = 300
"""Time for running and queued requests to finish after SIGTERM. Generous, because a pod without requests goes at once
and a cut stream is lost work: a few hundred tokens on a busy CPU node take minutes."""
EXIT_SECONDS = 10
"""Time to exit after the drain, before the kubelet kills."""
LIMITS_DIRECTORY = "/etc/busload"
MODEL_DIRECTORY = "/models"
API_KEYS_DIRECTORY = "/etc/busload-api-keys"
API_KEYS_ENTRY = "keys"


def deployment(service: InferenceService, settings: RuntimeSettings, replicas: int) -> dict[str, Any]:
    """The runtime pods of a service. Raises `NoGpuImageError`, and ValueError for a spec that admission would have
    refused."""
    name = service.metadata.name
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata(service, name),
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 3,
            # Long enough to load a model from a slow disk; after it the Deployment says that it is stuck.
            "progressDeadlineSeconds": 900,
            "selector": {"matchLabels": selector(name)},
            # A new pod serves before an old one goes, so that no request meets a missing replica. This needs room for
            # one more replica during a change.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": _template(service, settings),
        },
    }


def _template(service: InferenceService, settings: RuntimeSettings) -> dict[str, Any]:
    name = service.metadata.name
    return {
        "metadata": {
            "labels": labels(name),
            "annotations": {
                "kubectl.kubernetes.io/default-container": CONTAINER,
                "prometheus.io/scrape": "true",
                "prometheus.io/port": str(PORT),
                "prometheus.io/path": "/metrics",
            },
        },
        "spec": {
            "serviceAccountName": name,
            "automountServiceAccountToken": False,
            # Environment variables for every Service of the namespace would be noise at best.
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": QUIESCE_SECONDS + DRAIN_SECONDS + EXIT_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER,
                "runAsGroup": USER,
                "fsGroup": USER,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "ScheduleAnyway",
                    "labelSelector": {"matchLabels": selector(name)},
                }
            ],
            **({"tolerations": gpu.TOLERATIONS} if wants_gpu(service.spec) else {}),
            "containers": [_container(service, settings)],
            "volumes": _volumes(service),
        },
    }


def _container(service: InferenceService, settings: RuntimeSettings) -> dict[str, Any]:
    return {
        "name": CONTAINER,
        "image": gpu.image(settings) if wants_gpu(service.spec) else settings.image,
        # The last lines of a container that failed go into its status, and from there into Ready's message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["busload", "serve"],
        "args": _arguments(service),
        "env": _environment(service),
        "ports": [{"name": PORT_NAME, "containerPort": PORT, "protocol": "TCP"}],
        "resources": _resources(service),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        # Loading is the startup probe's business alone: the other two start after it and can be strict.
        "startupProbe": _probe("startup", period=1, timeout=5, failures=600),
        "readinessProbe": _probe("ready", period=2, timeout=5, failures=2),
        "livenessProbe": _probe("live", period=10, timeout=10, failures=3),
        # Quiesce: unready at once and still serving, until no proxy sends new requests. Then the kubelet's SIGTERM
        # starts the drain.
        "lifecycle": {"preStop": {"exec": {"command": ["/bin/sh", "-c", f"kill -USR1 1; sleep {QUIESCE_SECONDS}"]}}},
        "volumeMounts": _volume_mounts(service),
    }


def _arguments(service: InferenceService) -> list[str]:
    keys = [f"--api-keys-file={API_KEYS_DIRECTORY}/{API_KEYS_ENTRY}"] if service.spec.api_keys else []
    return [
        f"--model={_model(service)}",
        f"--served-model-name={service.spec.model.served_name or service.metadata.name}",
        "--host=0.0.0.0",
        f"--port={PORT}",
        *_memory(service),
        f"--limits-file={LIMITS_DIRECTORY}/{LIMITS_KEY}",
        f"--drain-seconds={DRAIN_SECONDS}",
        *keys,
    ]


def _memory(service: InferenceService) -> list[str]:
    if wants_gpu(service.spec):
        return gpu.arguments(service.spec)
    return [f"--memory={parse_bytes(service.spec.resources.limits.memory)}"]


def _model(service: InferenceService) -> str:
    source = service.spec.model.source
    if source.bundled:
        return f"bundled:{source.bundled}"
    if source.persistent_volume_claim:
        return f"{MODEL_DIRECTORY}/{source.persistent_volume_claim.path}"
    raise ValueError("spec.model.source: neither bundled nor persistentVolumeClaim is given")


def _environment(service: InferenceService) -> list[dict[str, Any]]:
    # Libraries start one thread per CPU of the node otherwise, and then fight over the pod's share.
    threads = str(compute_threads(service.spec))
    return [
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "OMP_NUM_THREADS", "value": threads},
        {"name": "OPENBLAS_NUM_THREADS", "value": threads},
        *(gpu.environment() if wants_gpu(service.spec) else []),
    ]


def _resources(service: InferenceService) -> dict[str, Any]:
    requests, limits = service.spec.resources.requests, service.spec.resources.limits
    wanted = {"cpu": requests.cpu, "memory": requests.memory}
    most = {"memory": limits.memory} | ({"cpu": limits.cpu} if limits.cpu else {})
    if wants_gpu(service.spec):
        most |= {GPU: str(limits.gpus)}  # of an extended resource the request is the limit
    return {"requests": wanted, "limits": most}


def _probe(path: str, *, period: int, timeout: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": f"/health/{path}", "port": PORT_NAME, "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def _volumes(service: InferenceService) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "limits", "configMap": {"name": limits_config_map_name(service.metadata.name)}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "256Mi"}},
    ]
    if claim := service.spec.model.source.persistent_volume_claim:
        volumes.append(
            {"name": "model", "persistentVolumeClaim": {"claimName": claim.claim_name, "readOnly": True}},
        )
    if keys := service.spec.api_keys:
        # Readable to the runtime by its group, fsGroup, and to nobody else.
        volumes.append({"name": "api-keys", "secret": {"secretName": keys.secret_name, "defaultMode": 0o440}})
    return [*volumes, *(gpu.volumes() if wants_gpu(service.spec) else [])]


def _volume_mounts(service: InferenceService) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        # The whole directory: a subPath mount would never see a change.
        {"name": "limits", "mountPath": LIMITS_DIRECTORY, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if service.spec.model.source.persistent_volume_claim:
        mounts.append({"name": "model", "mountPath": MODEL_DIRECTORY, "readOnly": True})
    if service.spec.api_keys:
        mounts.append({"name": "api-keys", "mountPath": API_KEYS_DIRECTORY, "readOnly": True})
    return [*mounts, *(gpu.volume_mounts() if wants_gpu(service.spec) else [])]
