#!/usr/bin/env bash
# Install, make a small image-text set, train four nano CLIPs that differ in their attention, evaluate them on
# colour-shape combinations that training never showed, and compare. Minutes on two cores; run again, it goes on
# where it stopped and is quick where it is done. Everything lies in quickstart/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

out=quickstart
kinds=(softmax la-eq4 la la-gain)

use_venv dev

echo "== data: scenes of coloured shapes with captions -> $out/data"
clip-la demo-data "$out/data"

runs=()
for kind in "${kinds[@]}"; do
    echo "== training: $kind (configs/demo/$kind.yaml) -> $out/runs/$kind"
    clip-la train --config "configs/demo/$kind.yaml" --train-data "$out/data/train/{00000..00007}.tar" \
        --logs "$out/runs"
    runs+=("$out/runs/$kind")
done

for kind in "${kinds[@]}"; do
    echo "== zero-shot on held-out combinations: $kind"
    clip-la eval --checkpoint "$out/runs/$kind" --zeroshot "$out/data/zeroshot" \
        --classnames "$out/data/zeroshot/classnames.txt" --templates photo --json "$out/runs/$kind/zeroshot.json"
done

echo "== comparison"
clip-la report "${runs[@]}" --out "$out/report"
echo
echo "Done. Look at $out/report/report.html (curves.png, comparison.md and comparison.json lie beside it)."
