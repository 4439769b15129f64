#!/usr/bin/env bash
# Install, make a small image-text set, train four nano CLIPs that differ in their attention, evaluate them on
# colour-shape combinations that training never showed, and compare. Minutes on two cores. Run again, it goes on
# where it stopped, and is quick where it is done. Everything lies in quickstart/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

out=quickstart
kinds=(softmax la-eq4 la la-gain)

# In the background, its lines marked with its name; $! is the run itself, so that a signal reaches it.
start_training() {
    clip-la train --config "configs/demo/$1.yaml" --train-data "$out/data/train/{00000..00007}.tar" \
        --val-data "$out/data/val/00000.tar" --zeroshot "$out/data/zeroshot" \
        --classnames "$out/data/zeroshot/classnames.txt" --templates photo --logs "$out/runs" \
        > >(trap '' INT TERM && sed -u "s/^/$1: /") 2>&1 &
}

# One run a core: a nano model is too small to gain from more.
train_all() {
    local running=0 kind num_cores
    num_cores=$(env -u OMP_NUM_THREADS nproc) # nproc would answer OMP_NUM_THREADS
    for kind in "${kinds[@]}"; do
        if [ "$running" -ge "$num_cores" ]; then
            wait -n
            running=$((running - 1))
        fi
        start_training "$kind"
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
train_all

for kind in "${kinds[@]}"; do
    echo "== zero-shot on colour-shape combinations that training never showed: $kind"
    clip-la eval --checkpoint "$out/runs/$kind" --zeroshot "$out/data/zeroshot" \
        --classnames "$out/data/zeroshot/classnames.txt" --templates photo --json "$out/runs/$kind/zeroshot.json"
done

echo "== comparison"
runs=()
for kind in "${kinds[@]}"; do runs+=("$out/runs/$kind"); done
clip-la report "${runs[@]}" --out "$out/report"
echo
echo "Done. Look at $out/report/report.html (curves.png, comparison.md and comparison.json lie beside it)."
