#!/bin/sh
# Renders charts/install.yaml, and the definition in charts/busload-crds, from their sources.
# Needs Helm 3: $HELM, or helm on PATH. With an argument it writes install.yaml there instead and changes nothing else.
set -eu
cd "$(dirname "$0")"
helm=${HELM:-helm}
command -v "$helm" >/dev/null || { echo "charts/render.sh: $helm not found; set HELM to a Helm 3 binary" >&2; exit 2; }
[ $# -gt 0 ] || cp ../crds/*.yaml busload-crds/files/
out=${1:-install.yaml}

# Without Helm nothing reads Helm's own labels, and its managed-by would be a lie.
template() {
    "$helm" template busload "$@" --namespace busload-system --kube-version 1.34.0 |
        grep -v -e 'app.kubernetes.io/managed-by: Helm' -e 'helm.sh/' -e '^# Source:'
}

{
    cat <<'EOF'
# Rendered by charts/render.sh from the charts busload-crds and busload. Do not edit.
#   kubectl apply --server-side -f install.yaml
---
apiVersion: v1
kind: Namespace
metadata:
  name: busload-system
  labels:
    pod-security.kubernetes.io/enforce: restricted
    pod-security.kubernetes.io/warn: restricted
EOF
    template busload-crds --set keep=false
    template busload
} > "$out.part"
mv "$out.part" "$out"
