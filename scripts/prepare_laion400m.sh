#!/usr/bin/env bash
# Downloads LAION-400M as the shards that clip-la trains on. Run it again to go on where it stopped.
#
#   scripts/prepare_laion400m.sh METADATA OUT
#
# METADATA holds the parquet files of links and captions, from https://huggingface.co/datasets/laion/laion400m or a
# mirror of the original release. OUT gets 00000.tar, 00000_stats.json, ..., sizes.json and check.json: about
# 10 TB if every link still led somewhere (img2dataset's figure; many no longer do).
#
#   PROCESSES, THREADS   downloading processes, and threads in each (default: the CPUs, 64)
#   SAMPLE               shards that are read through at the end (default: 50)
#
# Needs img2dataset (pip install img2dataset) and a DNS resolver that stands thousands of queries a second: its
# README says how to set one up. Sites that opt out by their headers are left out (img2dataset's default).
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2; }
metadata=$1 out=$2

for command in img2dataset clip-la; do
    command -v "$command" >/dev/null || { echo "$0: no '$command' on PATH: pip install img2dataset, and this package" >&2; exit 1; }
done
compgen -G "$metadata/*.parquet" >/dev/null || { echo "$0: no .parquet file in $metadata" >&2; exit 1; }

# The releases name their columns differently.
columns=$(python - "$metadata" <<'PYTHON'
import sys
from pathlib import Path

import pyarrow.parquet

names = pyarrow.parquet.read_schema(min(Path(sys.argv[1]).glob("*.parquet"))).names
for url, caption in (("URL", "TEXT"), ("url", "caption"), ("url", "text")):
    if url in names and caption in names:
        print(url, caption)
        break
else:
    sys.exit(f"no columns of links and captions among {', '.join(names)}")
PYTHON
)
read -r url_column caption_column <<<"$columns"

# Shorter side 256 with the proportions kept, and nothing enlarged: training crops 224 from it. The default would
# pad to a square with white. 10,000 links a shard give the 41,400 shards that the configs name.
img2dataset --url_list "$metadata" --input_format parquet --url_col "$url_column" --caption_col "$caption_column" \
    --output_folder "$out" --output_format webdataset --number_sample_per_shard 10000 \
    --image_size 256 --resize_mode keep_ratio --resize_only_if_bigger True \
    --processes_count "${PROCESSES:-$(nproc)}" --thread_count "${THREADS:-64}" --retries 1 \
    --incremental_mode incremental --enable_wandb False

# What training counts an epoch by: samples that were downloaded, shard by shard. A shard without statistics was
# cut off; the next run of this script replaces it.
python - "$out" <<'PYTHON'
import json
import sys
from pathlib import Path

out = Path(sys.argv[1])
shards = sorted(out.glob("*.tar"))
stats = {shard.name: shard.with_name(f"{shard.stem}_stats.json") for shard in shards}
unfinished = [name for name, file in stats.items() if not file.exists()]
if unfinished:
    sys.exit(f"{len(unfinished)} unfinished shard(s), first {unfinished[0]}: run this script again")
sizes = {name: json.loads(file.read_text())["successes"] for name, file in stats.items()}
(out / "sizes.json").write_text(json.dumps(sizes, indent=0) + "\n")
print(f"{sum(sizes.values()):,} samples in {len(sizes):,} shards: sizes.json")
PYTHON

# `check` ends with 1 where anything was lost, which is usual here; what counts is that something is left.
clip-la check "$out/*.tar" --sample "${SAMPLE:-50}" --workers "$(nproc)" --json "$out/check.json" || true
first=$(basename "$(printf '%s\n' "$out"/*.tar | head -1)" .tar)
last=$(basename "$(printf '%s\n' "$out"/*.tar | tail -1)" .tar)
echo "train with: --train-data '$out/{$first..$last}.tar'"
python -c 'import json, sys; sys.exit(not json.load(open(sys.argv[1]))["usable"])' "$out/check.json"
