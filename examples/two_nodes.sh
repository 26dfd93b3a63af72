#!/usr/bin/env bash
# Two nodes, on one machine with two shells, or on two machines:
#
#     examples/two_nodes.sh 0         # in the first shell: this node hosts the job
#     examples/two_nodes.sh 1         # in the second: it joins
#
# Arguments after the number are passed to train_gpt.py and must be the same in both: --steps 200.
# On two machines, set these variables in both shells first:
#
#     export ENDPOINT=node-a:29400    # as the second machine reaches the first
#     export ECHELON_SECRET=...       # the same on both: openssl rand -hex 32
#
# While it trains, try this from a third shell: pkill -9 -f 'node-rank 1'. The first node reports
# which ranks are lost, and waits; start the second again, and training continues.
set -euo pipefail
place=${1:?the number of this node: 0 or 1}
shift
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
runs=${RUNS:-runs}
command -v echelon > /dev/null || { echo "no echelon here: make setup" >&2; exit 1; }

if [[ -z ${ECHELON_SECRET:-} ]]; then # one machine: both use a file that only you can read
    mkdir -p "$runs"
    secret=$runs/two-nodes.secret
    if [[ ! -s $secret ]]; then # made whole under another name: the other shell may read it now
        (umask 077; openssl rand -hex 32 > "$secret.$place" && ln "$secret.$place" "$secret") \
            2> /dev/null || true
        rm -f "$secret.$place"
    fi
    ECHELON_SECRET=$(cat "$secret")
    export ECHELON_SECRET
fi

exec echelon run \
    --nnodes 2 --node-rank "$place" --rdzv-endpoint "${ENDPOINT:-127.0.0.1:29400}" \
    --nproc-per-node 2 --max-restarts 3 --run-dir "$runs/two-nodes-$place" \
    examples/train_gpt.py "$@"
