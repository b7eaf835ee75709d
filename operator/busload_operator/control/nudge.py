"""Makes the kubelet refresh the mounted limits at once, by touching an annotation of the pod.

Left alone, a kubelet looks at a mounted ConfigMap at its next periodic sync of the pod, up to a minute or more later.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from busload_operator.control import pods as pod_words
from busload_operator.control.apply import MANAGER
from busload_operator.control.client import ApiError, Client
from busload_operator.control.kinds import PODS, Object
from busload_operator.control.logs import about
from busload_runtime.contract import LIMITS_GENERATION_ANNOTATION

log = logging.getLogger(__name__)
FIRST_WAIT_SECONDS = 5.0
LAST_WAIT_SECONDS = 60.0


@dataclass(slots=True)
class _Told:
    generation: int
    times: int
    at: float


class Nudger:
    """Remembers which pods were told of which generation."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic):
        self._client, self._clock = client, clock
        self._told: dict[str, _Told] = {}

    async def nudge(self, pods: Sequence[Object], generation: int, runs: Mapping[str, int], changed: bool) -> None:
        """Touches running pods that do not run this generation yet.

        `runs` is what each pod reported in its last scrape; `changed`: the ConfigMap was written just now, so a pod
        that has reported nothing is told as well. A pod is told again after 5 s, then after twice that, up to 60 s.
        """
        for pod in pods:
            if (pod.get("status") or {}).get("phase") != "Running" or pod_words.is_leaving(pod):
                continue
            reported = runs.get(pod["metadata"]["name"])
            if reported == generation or (reported is None and not changed):
                continue
            if self._is_due(pod["metadata"]["uid"], generation):
                await self._touch(pod, generation)

    def lagging(self, pods: Sequence[Object], generation: int, runs: Mapping[str, int]) -> tuple[str, ...]:
        """A sentence for each pod that was told twice and still runs other limits."""
        found = []
        for pod in pods:
            told = self._told.get(pod["metadata"]["uid"])
            reported = runs.get(pod["metadata"]["name"], generation)
            if told and told.generation == generation and told.times >= 2 and reported != generation:
                name = pod["metadata"]["name"]
                found.append(f"pod {name} runs limits of generation {reported}, {generation} is in force")
        return tuple(found)

    def forget(self, living: set[str]) -> None:
        """Drops what is remembered of pods that are gone; `living` are the uids of all that are not."""
        for uid in self._told.keys() - living:
            del self._told[uid]

    def _is_due(self, uid: str, generation: int) -> bool:
        told = self._told.get(uid)
        if told is None or told.generation != generation:
            return True
        wait = min(LAST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(told.times - 1, 10))
        return self._clock() - told.at > wait

    async def _touch(self, pod: Object, generation: int) -> None:
        metadata = pod["metadata"]
        known = self._told.get(metadata["uid"])
        times = known.times + 1 if known and known.generation == generation else 1
        self._told[metadata["uid"]] = _Told(generation, times, self._clock())
        value = str(generation) if times == 1 else f"{generation}.{times}"  # only a change wakes the kubelet
        body = {"metadata": {"uid": metadata["uid"], "annotations": {LIMITS_GENERATION_ANNOTATION: value}}}
        try:
            await self._client.merge(PODS, metadata["namespace"], metadata["name"], body, MANAGER)
        except ApiError as error:
            if error.status != 404:
                log.warning(
                    "pod not told of new limits: %s", error, extra=about(metadata["namespace"], metadata["name"])
                )
