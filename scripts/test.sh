#!/usr/bin/env bash
# Lint, types and tests, as CI runs them. Sets itself up in .venv.
#
#   scripts/test.sh            everything that this machine can run
#   scripts/test.sh --fast     without the tests marked slow
#   scripts/test.sh --slurm    fail, rather than skip, where the cluster tests can't run: they need root and Slurm,
#                              which tests/slurm/slurm_local.sh install gets from Debian's packages
#   scripts/test.sh --no-slurm without the cluster tests, which take some minutes
#   scripts/test.sh -- ARGS    ARGS go to pytest, such as: -- tests/attention -k eq7
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

skip=() need_slurm='' no_slurm=''
while [ $# -gt 0 ]; do
    case $1 in
        --fast) skip+=(slow) ;;
        --slurm) need_slurm=1 ;;
        --no-slurm) no_slurm=1 ;;
        --) shift; break ;;
        -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "$0: unknown option $1 (see --help)" >&2; exit 2 ;;
    esac
    shift
done

use_venv dev
command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1 || skip+=(gpu)
# Tests of the cluster run by themselves: they need both cores of a small machine.
skip+=(slurm)
has_slurm=
if [ -z "$no_slurm" ]; then
    if why_not=$(tests/slurm/slurm_local.sh able 2>&1); then has_slurm=1; else echo "no cluster tests: $why_not"; fi
    [ -z "$need_slurm" ] || [ -n "$has_slurm" ] || exit 1
fi
markers=$(printf ' and not %s' "${skip[@]}")

echo "== ruff"
ruff format --check src tests benchmarks docs/images
ruff check src tests benchmarks docs/images
echo "== mypy"
mypy
if command -v shellcheck >/dev/null; then
    echo "== shellcheck"
    git ls-files -z '*.sh' '*.sbatch' .ci/run | xargs -0 --no-run-if-empty shellcheck
fi
echo "== pytest (${markers# and })"
# One thread a process: small tensors gain nothing from more, and every core has a test of its own.
export OMP_NUM_THREADS=1
pytest --numprocesses "${PYTEST_PROCESSES:-auto}" -m "${markers# and }" "$@"
if [ -n "$has_slurm" ] && [ $# -eq 0 ]; then
    echo "== pytest (slurm)"
    # Two clusters at a time, as much of a job is waiting; a file's tests share one. In the order of the files' names.
    pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder -m slurm tests/slurm
fi
echo "all passed"
