"""`busload operator`: the control plane's process."""

import typer

from busload_operator.cli._signals import end_quietly_until_handled


def command() -> None:
    """Run the operator: watch InferenceServices, keep their children as specified, and tune them.

    In a pod it uses the pod's service account; elsewhere the kubeconfig of KUBECONFIG. Two may run at once: one leads,
    the other waits for its Lease.

    Settings are environment variables: BUSLOAD_RUNTIME_IMAGE (required: the image of the runtime pods),
    BUSLOAD_IMAGE_PULL_POLICY (IfNotPresent), BUSLOAD_NAMESPACE (the pod's own, else busload-system: where the Lease
    is), BUSLOAD_WATCH_NAMESPACES (comma-separated; empty: all), BUSLOAD_SCRAPE_SECONDS (2), BUSLOAD_RESYNC_SECONDS
    (300), BUSLOAD_WORKERS (8), BUSLOAD_HTTP_PORT (8080: /healthz, /readyz, /metrics), BUSLOAD_LOG_LEVEL (INFO),
    BUSLOAD_MEMORY_BANDWIDTH (GB/s that a pod gets on the nodes, as `busload plan` measures it: with it, objectives
    below the floor are told before pods start), BUSLOAD_RECORD_DIRECTORY (where to record what tuning sees,
    for `busload replay`; nowhere if not set), BUSLOAD_RECORD_MAX_MIB (32: of each service).

    Ends with 0 after SIGTERM, 1 when the lease was lost or the watches failed, 2 for a wrong setting.
    """
    end_quietly_until_handled()
    from busload_operator.control.main import run

    raise typer.Exit(run())
