#!/usr/bin/env bash
# Install, make a small image-text set, train five nano CLIPs that differ in their attention, evaluate them on
# colour-shape combinations that training never showed, and compare. Minutes on two cores. Run again, it goes on
# where it stopped, and is quick where it is done. Everything lies in quickstart/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

out=quickstart
kinds=(softmax la-eq4 la la-gain la-centred)
num_cores=$(nproc)

tree=(--zeroshot "$out/data/zeroshot" --classnames "$out/data/zeroshot/classnames.txt" --templates photo)

set_train_command() {
    command=(clip-la train --config "configs/demo/$1.yaml" --train-data "$out/data/train/{00000..00007}.tar"
        --val-data "$out/data/val/00000.tar" "${tree[@]}" --logs "$out/runs")
}

set_eval_command() {
    command=(clip-la eval --checkpoint "$out/runs/$1" "${tree[@]}" --json "$out/runs/$1/zeroshot.json")
}

# Runs the command that $1 sets for each kind, one a core (a nano model is too small to gain from more), with its
# lines marked. The background process is the command itself, so that a signal reaches it.
for_each_kind() {
    local running=0 kind
    for kind in "${kinds[@]}"; do
        if [ "$running" -ge "$num_cores" ]; then
            wait -n
            running=$((running - 1))
        fi
        "$1" "$kind"
        "${command[@]}" > >(trap '' INT TERM && sed -u "s/^/$kind: /") 2>&1 &
        running=$((running + 1))
    done
    while [ "$running" -gt 0 ]; do
        wait -n
        running=$((running - 1))
    done
}
# However this ends, the runs are told to save and stop.
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT

use_venv ""
export OMP_NUM_THREADS=1

echo "== data: scenes of coloured shapes with captions -> $out/data"
clip-la demo-data "$out/data"

echo "== training ${kinds[*]} (configs/demo) -> $out/runs"
for_each_kind set_train_command

echo "== zero-shot on colour-shape combinations that training never showed"
for_each_kind set_eval_command

echo "== comparison"
clip-la report "${kinds[@]/#/$out/runs/}" --out "$out/report"
echo
echo "Done. Look at $out/report/report.html (curves.png, comparison.md and comparison.json lie beside it)."
