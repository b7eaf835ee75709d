"""Reads what a pod's and a Deployment's status says, in words a person can act on. Pure."""

from busload_operator.api.v1alpha1 import GPU
from busload_operator.control.kinds import Object, controller_of

# A container that waits for one of these will not start by waiting longer.
_NO_IMAGE = frozenset({"ErrImagePull", "ImagePullBackOff"})
_STUCK = frozenset(
    {
        "ErrImageNeverPull",
        "InvalidImageName",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)


def condition(obj: Object, kind: str) -> Object:
    """The condition of a type, or an empty one."""
    conditions = (obj.get("status") or {}).get("conditions") or []
    return next((item for item in conditions if item.get("type") == kind), {})


def is_made_for(pod: Object, service: str) -> bool:
    """Whether the Deployment of a service made this pod, by way of a ReplicaSet. Labels alone prove nothing: anybody
    may copy them to a pod of his own."""
    owner = controller_of(pod) or {}
    template = (pod["metadata"].get("labels") or {}).get("pod-template-hash")
    return (owner.get("kind"), owner.get("name")) == ("ReplicaSet", f"{service}-{template}")


def is_ready(pod: Object) -> bool:
    return not is_leaving(pod) and condition(pod, "Ready").get("status") == "True"


def is_leaving(pod: Object) -> bool:
    """Being deleted, or ended for good (evicted)."""
    phase = (pod.get("status") or {}).get("phase")
    return bool(pod["metadata"].get("deletionTimestamp")) or phase in ("Failed", "Succeeded")


def address(pod: Object) -> str:
    """Its IP address; empty until it has one."""
    return str((pod.get("status") or {}).get("podIP") or "")


def memory_kills(pod: Object) -> int:
    """How often its containers had been restarted when one of them was last killed for its memory; 0: the last one
    that ended, ended otherwise. Also 0 for a pod on a GPU: what the GPU holds is no matter of the container's memory,
    and less of it would not help."""
    containers = (pod.get("spec") or {}).get("containers") or []
    if any(GPU in ((container.get("resources") or {}).get("limits") or {}) for container in containers):
        return 0
    kills = 0
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        restarts = int(container.get("restartCount") or 0)
        now = (container.get("state") or {}).get("terminated")
        ended = now or (container.get("lastState") or {}).get("terminated") or {}
        if ended.get("reason") == "OOMKilled":
            kills += restarts + (now is not None)  # the restart of the one that just ended is not counted yet
    return kills


def trouble(pod: Object) -> tuple[str, str] | None:
    """(reason, message) of a pod that is not ready because something failed; None: it is ready or only starting."""
    if is_ready(pod) or is_leaving(pod):
        return None
    name = pod["metadata"]["name"]
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable":
        return "Unschedulable", f"pod {name} fits no node: {scheduled.get('message', '')}"
    for container in (pod.get("status") or {}).get("containerStatuses") or []:
        if found := _container_trouble(container):
            return found[0], f"pod {name}: {found[1]}"
    return None


def _container_trouble(container: Object) -> tuple[str, str] | None:
    state = container.get("state") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or (container.get("lastState") or {}).get("terminated") or {}
    reason = waiting.get("reason", "")
    # One word and one text for states that take turns: each turn would be a write and an event.
    if reason in _NO_IMAGE:
        cause = str(waiting.get("message") or "").rpartition("ErrImagePull: ")[2]
        return "ImagePullBackOff", f"image {container.get('image')} cannot be pulled: {cause}"
    if reason in _STUCK:
        return reason, f"{reason}: {waiting.get('message') or 'the container does not start'}"
    if reason == "CrashLoopBackOff" or (ended and container.get("restartCount", 0) > 1):
        return "CrashLoopBackOff", f"the container ends again and again, last with {_ending(ended) or 'no exit code'}"
    if ended:
        return "ContainerExited", f"the container ended with {_ending(ended)}; it is being restarted"
    return None


def _ending(ended: Object) -> str:
    """How a container ended: exit code, the kubelet's word for it, and the last line of its termination message."""
    if not ended:
        return ""
    lines = [line.strip() for line in str(ended.get("message") or "").splitlines() if line.strip()]
    word = ended.get("reason", "")
    code = f"exit code {ended.get('exitCode')}" + (f" ({word})" if word not in ("", "Error", "Completed") else "")
    return f"{code}: {lines[-1][:300]}" if lines else code


def rollout_trouble(deployment: Object) -> tuple[str, str] | None:
    """(reason, message) when the Deployment itself cannot go on: pods refused by quota or policy, no progress."""
    failure = condition(deployment, "ReplicaFailure")
    if failure.get("status") == "True":
        return "ReplicaFailure", f"pods cannot be created: {failure.get('message', '')}"
    progressing = condition(deployment, "Progressing")
    if progressing.get("status") == "False":
        return str(progressing.get("reason") or "ProgressDeadlineExceeded"), str(progressing.get("message") or "")
    return None
