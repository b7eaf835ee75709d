"""What must hold for the children of any service."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busload_operator.api.v1alpha1 import InferenceService, Spec
from busload_operator.resources import deployment as deployment_module
from busload_operator.resources.build import children
from busload_operator.resources.gpu import NoGpuImageError
from busload_operator.resources.initial_limits import initial_limits
from busload_operator.resources.labels import selector, selector_text
from busload_operator.resources.service import endpoint
from busload_operator.resources.settings import RuntimeSettings
from busload_operator.tuning.models import BUNDLED as FACTS
from busload_runtime.contract import LIMITS_KEY, LimitsDocument, parse_limits

SETTINGS = RuntimeSettings("example.org/busload-runtime:1.0", "Never")
BUNDLED = {"bundled": "smollm2-135m-instruct"}
CLAIM = {"persistentVolumeClaim": {"claimName": "models", "path": "a/b.gguf"}}


def make(**spec: Any) -> InferenceService:
    metadata = {"name": "chat", "namespace": "team-a", "uid": "u-1", "labels": {"argocd.argoproj.io/instance": "x"}}
    return InferenceService.model_validate({"metadata": metadata, "spec": {"model": {"source": BUNDLED}, **spec}})


def build(service: InferenceService, replicas: int = 1, **limits: int) -> dict[str, dict[str, Any]]:
    document = LimitsDocument(7, replace(initial_limits(service.spec), **limits))
    return {child["kind"]: child for child in children(service, SETTINGS, document, replicas)}


def container(service: InferenceService) -> dict[str, Any]:
    found: dict[str, Any] = build(service)["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    return found


def test_order_is_what_pods_need_first():
    built = children(make(), SETTINGS, LimitsDocument(1, initial_limits(make().spec)), 1)
    assert [child["kind"] for child in built] == ["ServiceAccount", "ConfigMap", "Service", "Deployment"]


def test_every_child_is_owned_and_labelled_and_copies_nothing():
    for child in build(make()).values():
        metadata = child["metadata"]
        assert metadata["namespace"] == "team-a"
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "busload.dev/v1alpha1",
                "kind": "InferenceService",
                "name": "chat",
                "uid": "u-1",
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
        assert metadata["labels"] == {
            "app.kubernetes.io/name": "busload-runtime",
            "app.kubernetes.io/instance": "chat",
            "app.kubernetes.io/managed-by": "busload",
            "busload.dev/inferenceservice": "chat",
        }


def test_the_selector_is_one_and_the_same_everywhere():
    built = build(make())
    deployment = built["Deployment"]["spec"]
    assert deployment["selector"]["matchLabels"] == built["Service"]["spec"]["selector"] == selector("chat")
    assert selector("chat").items() <= deployment["template"]["metadata"]["labels"].items()
    assert selector_text("chat") == "busload.dev/inferenceservice=chat,app.kubernetes.io/managed-by=busload"


def test_the_pod_template_does_not_depend_on_limits_or_replicas():
    one = build(make(), 1, batch_size=4)["Deployment"]["spec"]["template"]
    other = build(make(), 3, batch_size=64, max_sequence_length=1024, kv_cache_percent=20)["Deployment"]["spec"]
    assert other["template"] == one
    assert other["replicas"] == 3


def test_the_limits_document_is_what_the_runtime_reads():
    data = build(make(), batch_size=5)["ConfigMap"]["data"]
    assert list(data) == [LIMITS_KEY]
    document = parse_limits(data[LIMITS_KEY])
    assert (document.generation, document.default.batch_size) == (7, 5)


def test_the_grace_period_covers_quiesce_drain_and_exit():
    spec = build(make())["Deployment"]["spec"]["template"]["spec"]
    (drain,) = [arg for arg in spec["containers"][0]["args"] if arg.startswith("--drain-seconds=")]
    pre_stop = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    sleep = int(pre_stop.rsplit(" ", 1)[1])
    assert pre_stop == "kill -USR1 1; sleep 5"
    assert spec["terminationGracePeriodSeconds"] >= sleep + int(drain.partition("=")[2]) + 5


def test_restricted_pod_security():
    spec = build(make(model={"source": CLAIM}))["Deployment"]["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] == 65532
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    kinds = {key for volume in spec["volumes"] for key in volume if key != "name"}
    assert kinds <= {"configMap", "emptyDir", "persistentVolumeClaim"}
    assert spec["automountServiceAccountToken"] is False


def test_limits_are_mounted_as_a_directory_so_that_changes_arrive():
    mounts = {mount["mountPath"]: mount for mount in container(make())["volumeMounts"]}
    assert "subPath" not in mounts[deployment_module.LIMITS_DIRECTORY]
    assert f"--limits-file={deployment_module.LIMITS_DIRECTORY}/{LIMITS_KEY}" in container(make())["args"]


@pytest.mark.parametrize(("source", "flag"), [(BUNDLED, "bundled:smollm2-135m-instruct"), (CLAIM, "/models/a/b.gguf")])
def test_the_model_flag(source: dict[str, Any], flag: str):
    assert f"--model={flag}" in container(make(model={"source": source}))["args"]


@pytest.mark.parametrize(("given_name", "served"), [(None, "chat"), ("", "chat"), ("team/chat", "team/chat")])
def test_the_served_name(given_name: str | None, served: str):
    args = container(make(model={"source": BUNDLED, "servedName": given_name}))["args"]
    assert f"--served-model-name={served}" in args


@pytest.mark.parametrize(("cpu", "threads"), [("2", "2"), ("3500m", "3"), ("500m", "1"), ("10m", "1"), ("0.5", "1")])
def test_threads_follow_the_cpu_request(cpu: str, threads: str):
    env = {item["name"]: item.get("value") for item in container(make(resources={"requests": {"cpu": cpu}}))["env"]}
    assert env["OMP_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == threads


def test_memory_is_the_limit_in_bytes():
    assert "--memory=3221225472" in container(make(resources={"limits": {"memory": "3Gi"}}))["args"]


def test_settings_reach_the_container():
    found = container(make())
    assert (found["image"], found["imagePullPolicy"]) == ("example.org/busload-runtime:1.0", "Never")


def test_endpoint():
    assert endpoint(make()) == "http://chat.team-a.svc:8000/v1"


def test_a_source_that_admission_would_have_refused():
    service = make()
    unserved = service.spec.model.source.model_copy(update={"bundled": None})
    model = service.spec.model.model_copy(update={"source": unserved})
    broken = service.model_copy(update={"spec": service.spec.model_copy(update={"model": model})})
    with pytest.raises(ValueError, match=r"spec\.model\.source"):
        deployment_module.deployment(broken, SETTINGS, 1)


def ordered(low: int, high: int) -> st.SearchStrategy[dict[str, int]]:
    pairs = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    return pairs.map(lambda pair: {"min": pair[0], "max": pair[1]})


@given(ordered(16, 8192), ordered(1, 100), ordered(1, 4096), st.sampled_from([BUNDLED, CLAIM]), st.data())
def test_initial_limits_are_inside_the_bounds_and_valid(lengths, percents, batches, source, data):
    if data.draw(st.booleans()):
        batches = {**batches, "initial": data.draw(st.integers(batches["min"], batches["max"]))}
    bounds = {"maxSequenceLength": lengths, "kvCachePercent": percents, "batchSize": batches}
    limits = initial_limits(make(model={"source": source}, bounds=bounds).spec)
    assert parse_limits(LimitsDocument(1, limits).to_json()).default == limits
    assert limits.batch_size == batches.get("initial", limits.batch_size)
    assert batches["min"] <= limits.batch_size <= batches["max"]
    assert limits.kv_cache_percent == percents["max"]
    assert limits.max_queued_tokens >= limits.max_sequence_length
    assert lengths["min"] <= limits.max_sequence_length <= lengths["max"]
    if source is CLAIM:
        assert limits.max_sequence_length == lengths["max"]


@pytest.mark.parametrize(
    ("memory", "bounds", "longest"),
    [
        ("2Gi", {}, 8192),  # the model's context
        ("2Gi", {"maxSequenceLength": {"max": 2048}}, 2048),  # the upper bound
        ("250Mi", {}, 1024),  # nothing fits; the lower bound, and the condition Feasible says what is missing
    ],
)
def test_the_initial_sequence_length_is_bounded(memory: str, bounds: dict[str, Any], longest: int):
    assert initial_limits(sized(memory, bounds)).max_sequence_length == longest


@pytest.mark.parametrize("batch", [8, 64, 512])
def test_the_initial_sequence_length_fits_the_pod_at_any_batch_of_the_bounds(batch: int):
    facts = FACTS["smollm2-135m-instruct"]
    step = facts.step_memory.of(256 + batch, batch, threads=2)
    left = 400 * 2**20 - facts.weight_bytes - facts.overhead_bytes - step
    blocks = left * 90 // 100 // (facts.block_tokens * facts.kv_bytes_per_token)
    fitting = blocks * facts.block_tokens
    found = initial_limits(sized("400Mi", {"batchSize": {"max": batch}})).max_sequence_length
    assert found == max(1024, fitting) < 8192


def test_a_service_starts_with_what_its_bounds_name():
    bounds = {
        "maxSequenceLength": {"initial": 4096},
        "kvCachePercent": {"initial": 30},
        "batchSize": {"initial": 4},
    }
    limits = initial_limits(sized("2Gi", bounds))
    assert (limits.max_sequence_length, limits.kv_cache_percent, limits.batch_size) == (4096, 30, 4)
    assert initial_limits(sized("2Gi", {})).kv_cache_percent == 90


def test_a_first_sequence_length_is_one_that_the_first_kv_cache_holds():
    little = initial_limits(sized("400Mi", {"kvCachePercent": {"initial": 50}}))
    assert 1024 < little.max_sequence_length < initial_limits(sized("400Mi", {})).max_sequence_length
    asked = initial_limits(sized("400Mi", {"kvCachePercent": {"initial": 50}, "maxSequenceLength": {"initial": 8192}}))
    assert asked.max_sequence_length == little.max_sequence_length


def sized(memory: str, bounds: dict[str, Any]) -> Spec:
    return make(bounds=bounds, resources={"requests": {"memory": memory}, "limits": {"memory": memory}}).spec


def test_initial_limits_of_the_smallest_manifest():
    assert initial_limits(make().spec).to_json() == {
        "maxSequenceLength": 8192,
        "batchSize": 8,
        "kvCachePercent": 90,
        "tokenBudget": 264,
        "maxQueuedRequests": 256,
        "maxQueuedTokens": 262144,
    }


GPU = {"limits": {"memory": "8Gi", "nvidia.com/gpu": 1}}


def test_a_gpu_needs_the_operators_image_for_it():
    with pytest.raises(NoGpuImageError, match="set BUSLOAD_GPU_RUNTIME_IMAGE of the operator"):
        build(make(resources=GPU))


def test_only_pods_with_a_gpu_know_of_it():
    settings = replace(SETTINGS, gpu_image="gpu:1")
    cpu, gpu = (
        deployment_module.deployment(make(**spec), settings, 1)["spec"]["template"]["spec"]
        for spec in ({}, {"resources": GPU})
    )
    assert "gpu" not in str(cpu)
    assert "--executor=cuda" in gpu["containers"][0]["args"]
    assert gpu["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"
    # Host memory is no business of an executor whose memory is the GPU's.
    assert not any(argument.startswith("--memory") for argument in gpu["containers"][0]["args"])


@pytest.mark.parametrize(
    ("precision", "argument"),
    [("Auto", []), ("FP16", ["bf16"]), ("INT8", ["int8"]), ("FP8", ["fp8"])],
)
def test_the_weights_precision_reaches_the_executor(precision: str, argument: list[str]):
    settings = replace(SETTINGS, gpu_image="gpu:1")
    service = make(model={"source": BUNDLED, "weightPrecision": precision}, resources=GPU)
    pod = deployment_module.deployment(service, settings, 1)["spec"]["template"]["spec"]
    found = [one for one in pod["containers"][0]["args"] if one.startswith("--weight-precision")]
    assert found == [f"--weight-precision={name}" for name in argument]


def test_whatever_a_gpu_pod_writes_is_on_a_volume():
    settings = replace(SETTINGS, gpu_image="gpu:1")
    pod = deployment_module.deployment(make(resources=GPU), settings, 1)["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    mounted = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    caches = [item["value"] for item in container["env"] if item["name"].endswith(("CACHE_DIR", "CACHE_PATH"))]
    assert len(caches) == 4
    assert all(any(cache.startswith(f"{folder}/") for folder in mounted) for cache in caches)
    assert "/dev/shm" in mounted
    assert all("sizeLimit" in volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume)
