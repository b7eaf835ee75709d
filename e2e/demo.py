"""The demo behind `make demo`: cluster, images, operator, one service, a question, a burst, and what the operator did.

    python -m e2e.demo up      (after `python3 -m e2e.setup demo`)
    python -m e2e.demo down    (removes it from the current context's cluster)

CLUSTER=embedded (default) makes a cluster of its own; CLUSTER=current uses the current kubeconfig. Leaves
e2e/out/demo.json with `answer`, `decisions` and `seconds`.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

from busload_runtime.bench.outcome import Level
from e2e import access, services
from e2e.access import ROOT, Cluster, wait_for
from e2e.ask import QUESTION
from e2e.steps import OUT, Steps, say

NAMESPACE = "default"
NAME = "chat"
BURST = 32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["up", "down"])
    what = parser.parse_args().what
    kind = os.environ.get("CLUSTER", "embedded")
    if kind not in ("embedded", "current"):
        sys.exit(f"error: CLUSTER is {kind!r}; allowed: embedded (default), current")
    return up(kind) if what == "up" else down(kind)


def up(kind: str) -> int:
    steps = Steps("demo", fresh=False)
    cluster = prepare_embedded(steps) if kind == "embedded" else prepare_current(steps)
    with steps.step("operator", "Installing CRD, RBAC and operator"):
        install(cluster)
    with steps.step("service", f"Applying docs/examples/chat.yaml and waiting for InferenceService {NAME} to be Ready"):
        example = str(ROOT / "docs/examples/chat.yaml")
        # What an earlier demo tuned would stay in force, and there would be nothing to see.
        cluster.kubectl("delete", "-n", NAMESPACE, "-f", example, "--ignore-not-found", "--cascade=foreground")
        cluster.kubectl("apply", "-n", NAMESPACE, "-f", example)
        wait_ready(cluster)
    with steps.step("answer", f"Asking the model: {QUESTION}"):
        answer = ask(cluster)
    with steps.step("burst", f"{BURST} clients at once, while watching the operator"):
        report, decisions = burst(cluster)
    explain(report, decisions)
    OUT.mkdir(exist_ok=True)
    result = {"answer": answer, "decisions": decisions, "seconds": {**steps.seconds, "total": steps.total}}
    (OUT / "demo.json").write_text(json.dumps(result, indent=2) + "\n")
    say(f"Done in {steps.total:.0f} s; e2e/out/demo.json holds answer, decisions and seconds.")
    hints(kind)
    return 0


def prepare_embedded(steps: Steps) -> Cluster:
    run = [sys.executable, "-m", "e2e.cluster"]
    with steps.step("programs", "Cluster programs (built from source the first time: 7 to 8 minutes, then cached)"):
        # Its progress is on stderr; the paths of the programs on stdout tell nobody here anything.
        subprocess.run([*run, "build", "kubeone", "coredns"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    with steps.step("cluster", "Embedded cluster, in its own network namespace"):
        subprocess.run([*run, "up"], cwd=ROOT, check=True)
    with steps.step("images", "Runtime and operator images"):
        subprocess.run([sys.executable, "-m", "e2e.images", "build", "--load", "embedded"], cwd=ROOT, check=True)
    return access.embedded()


def prepare_current(steps: Steps) -> Cluster:
    cluster = current_cluster()
    with steps.step("images", "Runtime and operator images"):
        subprocess.run([sys.executable, "-m", "e2e.images", "build", "--load", "current"], cwd=ROOT, check=True)
    return cluster


def current_cluster() -> Cluster:
    """The cluster of the current context, named before anything is done to it."""
    cluster = access.current()
    try:
        context = cluster.kubectl("config", "current-context").strip()
    except subprocess.CalledProcessError:
        where = os.environ.get("KUBECONFIG") or "~/.kube/config"
        sys.exit(
            f"error: CLUSTER is current, but {where} has no current context: set KUBECONFIG, or run `kubectl config "
            "use-context NAME`, or leave CLUSTER out for a cluster of the demo's own"
        )
    say(f"Using the cluster of your current context, {context!r}")
    return cluster


def manifests() -> str:
    """charts/install.yaml, with the images where REGISTRY= says they were pushed."""
    text = (ROOT / "charts/install.yaml").read_text()
    registry = os.environ.get("REGISTRY", "").rstrip("/")
    return text.replace("localhost/", f"{registry}/") if registry else text


def install(cluster: Cluster) -> None:
    namespace = ("-n", "busload-system")
    ran = cluster.kubectl("get", "deployment/busload-operator", *namespace, "--ignore-not-found", check=False)
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=manifests())
    cluster.kubectl("wait", "--for=condition=Established", "crd/inferenceservices.busload.dev", "--timeout=60s")
    if "busload-operator" in ran and "NotFound" not in ran:
        # The images are rebuilt under one tag: an operator that runs already has to be told.
        cluster.kubectl("rollout", "restart", "deployment/busload-operator", *namespace)
    cluster.kubectl("rollout", "status", "deployment/busload-operator", "--timeout=180s", *namespace, timeout=200)


def wait_ready(cluster: Cluster) -> None:
    services.wait_ready(cluster, NAMESPACE, NAME, 240)
    print(cluster.kubectl("get", "inferenceservices", "-n", NAMESPACE), flush=True)


def ask(cluster: Cluster) -> str:
    with cluster.reach(NAMESPACE, NAME) as (url, prefix):
        program = cluster.program(prefix, "e2e.ask", "--url", f"{url}/v1", "--model", NAME, QUESTION)
        assert program.stdout is not None
        assert program.stderr is not None
        answer = ""
        print("    ", end="")
        while piece := program.stdout.read(8):
            print(piece, end="", flush=True)
            answer += piece
        if program.wait(timeout=120) != 0:
            raise SystemExit(f"error: the question failed: {program.stderr.read()}")
        return answer.strip()


def burst(cluster: Cluster) -> tuple[Level, list[dict[str, Any]]]:
    """Sends the burst while printing `kubectl get -w`, until a decision has an outcome and the burst has ended."""
    first = max((d["id"] for d in decisions_of(cluster)), default=-1)
    watch = cluster.popen("get", "inferenceservices", NAME, "-n", NAMESPACE, "-w")
    printer = threading.Thread(target=lambda: [print(f"    {line}", end="", flush=True) for line in watch.stdout or ()])
    printer.start()
    try:
        # As many clients, each sending its next request at once, until the operator has acted: on a fast machine 32
        # requests alone would be over before anybody could look.
        options = {"requests": 100000, "seconds": 240, "concurrency": BURST, "output_tokens": 64}
        load = services.Load(cluster, NAMESPACE, NAME, **options)

        def acted() -> list[dict[str, Any]]:
            new = [d for d in decisions_of(cluster) if d["id"] > first]
            settled = [d for d in new if d["outcome"]["verdict"] != "Pending"]
            return new if settled else []

        try:
            decisions: list[dict[str, Any]] = wait_for(acted, 240, "a tuning decision with its outcome", every=2)
        finally:
            load.process.terminate()
            report = load.report()
    finally:
        time.sleep(3)
        watch.terminate()
        printer.join(timeout=10)
    decisions = [d for d in decisions_of(cluster) if d["id"] > first] or decisions
    return report, decisions


def decisions_of(cluster: Cluster) -> list[dict[str, Any]]:
    status = cluster.get("inferenceservice", NAME, "-n", NAMESPACE).get("status", {})
    decisions: list[dict[str, Any]] = status.get("decisions", [])
    return decisions


def explain(report: Level, decisions: list[dict[str, Any]]) -> None:
    total, rate = report.output_tokens, report.output_tokens / report.seconds
    say(f"The burst: {len(report.outcomes)} requests, {len(report.errors)} failed, {total} tokens, {rate:.0f} tokens/s")
    for decision in reversed(decisions):
        print(f"    {decision['time']}  {decision['reason']}")
        print(f"      {decision['message']}")
        print("      inputs:     " + ", ".join(f"{i['name']}={i['value']}" for i in decision["inputs"]))
        print("      prediction: " + ", ".join(f"{k}={v}" for k, v in decision.get("prediction", {}).items()))
        outcome = decision["outcome"]
        message = outcome.get("message") or "not judged yet; `kubectl describe` tells it a minute or two from now"
        print(f"      outcome:    {outcome['verdict']}: {message}")


def hints(kind: str) -> None:
    lines = {
        f"kubectl get inferenceservices -n {NAMESPACE}": "READY, BATCH, KV, WAIT, BOTTLENECK",
        f"kubectl describe inferenceservice {NAME} -n {NAMESPACE}": "observed, tuned, decisions: docs/decisions.md",
        "make demo-down" + (" CLUSTER=current" if kind == "current" else ""): "removes all of it",
    }
    if kind == "embedded":
        lines = {'eval "$(python3 -m e2e.cluster env)"': "KUBECONFIG and kubectl for this shell"} | lines
    for command, text in lines.items():
        print(f"    {command:54} # {text}")


def down(kind: str) -> int:
    if kind != "current":
        sys.exit("error: the embedded cluster is removed by `make demo-down`")
    cluster = current_cluster()
    example = str(ROOT / "docs/examples/chat.yaml")
    cluster.kubectl("delete", "-n", NAMESPACE, "-f", example, "--ignore-not-found", check=False)
    cluster.kubectl("delete", "-f", "-", "--ignore-not-found", stdin=manifests())
    say("removed service, operator, RBAC and CRD from the current cluster")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except access.NotReached as error:
        sys.exit(f"error: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: `{' '.join(map(str, error.cmd))}` ended with {error.returncode}\n{error.stderr or ''}")
