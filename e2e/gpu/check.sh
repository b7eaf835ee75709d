#!/bin/bash
# Everything that can be known about a GPU in ten minutes: results are right, tiles are tuned, times against byte floors,
# tokens per second. Needs Python with torch 2.11 or later (its Triton and numpy) and a GPU, and downloads nothing.
#   e2e/gpu/check.sh                    all of it; results in e2e/out/gpu, tables in kernels/busload_kernels/gpu/tiles
#   e2e/gpu/check.sh --dry-run          everything but launches, on a machine without a GPU
#   e2e/gpu/check.sh --only floors      one section (--help lists the options)
# PYTHON names another interpreter than the first of .venv/bin/python, python3 that has torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD:$PWD/operator:$PWD/runtime:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}"
unset TRITON_INTERPRET
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in .venv/bin/python python3 python; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || { echo "error: no python3 with torch found; name one: PYTHON=/path/to/python e2e/gpu/check.sh" >&2; exit 2; }
exec "$python" -m e2e.gpu "$@"
