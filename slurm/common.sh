# shellcheck shell=bash
# What the sbatch files share. Sourced on the first node of a job; needs bash, Slurm's commands and flock.
#
#   site.sh    how this site gets a Python with clip_la in it: see site.example.sh

log() { echo "$(date '+%F %T') slurm: $*" >&2; }

die() {
    local code=$1
    shift
    log "$*"
    exit "$code"
}

# One task of an array: the plain number may stand for the whole array.
job=$SLURM_JOB_ID
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

# What Slurm says of this job; waits while the controller is away, for a few minutes.
job_state() {
    local state='' tries
    for tries in {1..30}; do
        state=$(scontrol show job "$job" 2>/dev/null | sed -n 's/^ *JobState=\([A-Z_]*\).*/\1/p' | head -1) || true
        [ -z "$state" ] || break
        ((tries < 30)) && sleep 10
    done
    echo "$state"
}

# --- Environment ------------------------------------------------------------------------------------

# Reads the site file and works out the layout: one task a GPU, else as many as were asked for.
# Sets num_nodes, tasks_per_node, num_tasks, cpus_per_task, launch (srun's part of the container), prefix, clip_la.
set_up_job() {
    local site=${CLIP_LA_SITE:-$here/site.sh} gpus=${SLURM_GPUS_ON_NODE:-0}
    launch=() prefix=() clip_la=(python -m clip_la.cli)
    if [ -e "$site" ]; then
        set +eu # module and conda read unset variables
        # shellcheck disable=SC1090
        . "$site"
        set -eu
    elif [ -n "${CLIP_LA_SITE:-}" ]; then
        die 2 "CLIP_LA_SITE names $site, which is not there"
    fi
    case ${CONTAINER:-} in
        "") ;;
        pyxis)
            launch+=("--container-image=${CONTAINER_IMAGE:?}" "--container-workdir=$PWD")
            launch+=("--container-mounts=$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}") ;;
        apptainer)
            prefix=(apptainer exec --nv --bind "$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}" --pwd "$PWD")
            prefix+=("${CONTAINER_IMAGE:?}") ;;
        *) die 2 "CONTAINER is '$CONTAINER' in $site; expected pyxis, apptainer or nothing" ;;
    esac

    num_nodes=$SLURM_JOB_NUM_NODES
    tasks_per_node=$((gpus > 0 ? gpus : ${SLURM_NTASKS_PER_NODE:-1}))
    num_tasks=$((num_nodes * tasks_per_node))
    cpus_per_task=$((SLURM_CPUS_ON_NODE / tasks_per_node))
    ((cpus_per_task > 0)) || die 2 "$SLURM_CPUS_ON_NODE CPUs a node for $tasks_per_node tasks; ask for more with --cpus-per-task"
    restart=${SLURM_RESTART_COUNT:-0}
    # What the job was asked for must not override what each srun says: the layout comes from the allocation.
    # SLURM_EXPORT_ENV stands for `sbatch --export=NONE`, which would keep the site's environment from the tasks.
    unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_CPUS_PER_TASK SLURM_CPUS_PER_GPU \
        SLURM_GPUS SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU SLURM_TRES_PER_TASK SLURM_EXPORT_ENV
    export SRUN_CPUS_PER_TASK=$cpus_per_task
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -1)
    # Jobs may share a node, and ranks of an earlier start may still hold its port: both are in the number, which
    # stays below what systems hand out by themselves.
    MASTER_PORT=$((20000 + (SLURM_JOB_ID * 16 + restart % 16) % 12000))
    export MASTER_ADDR MASTER_PORT
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1 NCCL_DEBUG=${NCCL_DEBUG:-WARN}
    log "job $job start $restart: $num_nodes nodes x $tasks_per_node tasks x $cpus_per_task CPUs," \
        "$gpus GPUs a node, on $SLURM_JOB_NODELIST"
}

# One process in the job's environment, on the first node.
on_first_node() {
    srun --nodes=1 --ntasks=1 --overlap --gpu-bind=none --nodelist="$MASTER_ADDR" "${launch[@]}" "${prefix[@]}" "$@"
}

# One process a task on all nodes. Every process sees all of its node's GPUs and takes the one of its local rank.
on_all_nodes() {
    srun --nodes="$num_nodes" --ntasks="$num_tasks" --ntasks-per-node="$tasks_per_node" --gpu-bind=none \
        --kill-on-bad-exit=1 --label "${launch[@]}" "$@" </dev/null
}

# --- Training ---------------------------------------------------------------------------------------

# Each task's exit code goes to a file: srun's own is that of whichever task it killed last, and 0 after a
# lost node. The trap keeps the shell alive when Slurm signals the task, until clip-la has saved. A task that was
# stopped (75) ends with 0, or srun would end the others, and with them the one that is still writing the checkpoint.
# shellcheck disable=SC2016  # the task expands it
record_exit='trap : TERM USR1 INT; code=0; "$@" || code=$?; echo "$code" >"$EXITS/$SLURM_PROCID"
    [ "$code" = 75 ] || exit "$code"'

# train_run CONFIG [flags]: the whole life of one start of a training job; ends the shell.
train_run() {
    stop_signal=
    trap on_usr1 USR1
    trap on_term TERM
    set_up_job
    if ! preflight "$@"; then
        [ -z "$stop_signal" ] || requeue "interrupted by $stop_signal before training began"
        die 2 "the preflight failed: nothing was trained; mend what it names and submit again"
    fi
    claim_run
    if [ -z "$stop_signal" ]; then
        export EXITS=$run_folder/slurm/$job.$restart
        rm -rf "$EXITS" && mkdir -p "$EXITS"
        on_all_nodes bash -c "$record_exit" task "${prefix[@]}" "${clip_la[@]}" train --config "$@" &
        wait_for $!
    fi
    conclude
}

preflight() {
    run_folder=$(on_first_node python -m clip_la.cluster.preflight --job "$job" --restart "$restart" \
        --world-size "$num_tasks" -- "$@")
}

# One job at a time trains in a run's folder. The trainer's own lock says so too, but doesn't know of jobs.
claim_run() {
    local holder state
    holder=$(cat "$run_folder/slurm/job" 2>/dev/null) || true
    if [ -n "$holder" ] && [ "$holder" != "$job" ]; then
        state=$(squeue --noheader --jobs="$holder" --format=%T 2>/dev/null) || true
        case $state in
            RUNNING | COMPLETING | SUSPENDED | STOPPED)
                die 2 "$run_folder is being trained by job $holder ($state); wait for it, scancel it," \
                    "or give another --name" ;;
        esac
    fi
    echo "$job" >"$run_folder/slurm/job"
    # Ranks that outlive a lost node hold the lock until they notice.
    if ((restart > 0)) && ! flock --timeout 300 "$run_folder/lock" true; then
        die 2 "processes of an earlier start still hold $run_folder/lock: $(cat "$run_folder/lock")"
    fi
}

# Slurm's warning before the time limit, which only this shell gets; also `scancel --batch --signal=USR1 JOB`.
on_usr1() {
    [ -z "$stop_signal" ] || return 0
    stop_signal=USR1
    log "SIGUSR1: asking the tasks to save and stop"
    scancel --signal=USR1 "$job" || true
}

# Slurm sends this to the tasks as well, so it isn't passed on: a second signal would end them unsaved.
on_term() { stop_signal=${stop_signal:-TERM}; }

# A trap interrupts `wait`, so wait until the process is really gone.
wait_for() {
    while kill -0 "$1" 2>/dev/null; do wait "$1" || true; done
}

# Runs clip_la.cluster.restarts without clip_la/__init__.py, which imports torch.
ask_restarts='import importlib.util, runpy, sys
sys.modules["clip_la"] = importlib.util.module_from_spec(importlib.util.find_spec("clip_la"))
runpy.run_module("clip_la.cluster.restarts", run_name="__main__", alter_sys=True)'

# Finished, stopped for good, or once more: see clip_la.cluster.restarts.
conclude() {
    local state code
    trap '' USR1 # it would only hit the question below
    state=$(job_state)
    [ "$state" = RUNNING ] || die 75 "Slurm has this job as ${state:-gone}; what was saved is in $run_folder"
    code=$(on_first_node python -c "$ask_restarts" "$run_folder" --job "$job" \
        --exits "${EXITS:-}" --num-tasks "$num_tasks" --signal "$stop_signal") ||
        die 1 "can't tell what became of the tasks; what was saved is in $run_folder"
    [ "$code" = 75 ] || exit "$code"
    requeue
}

requeue() {
    local state
    state=$(job_state)
    [ "$state" = RUNNING ] || die 75 "Slurm has this job as ${state:-gone}: ${1:-}"
    log "requeueing ${1:-}"
    trap '' TERM # Slurm ends this shell and its children as part of it
    until scontrol requeue "$job"; do
        scontrol ping | grep -q 'is UP' && die 75 "can't requeue this job; submit the same command again to continue"
        sleep 10 # the controller is away
    done
    exit 75
}

# --- Evaluation and reports -------------------------------------------------------------------------

# A clip-la command on all GPUs of the job, its exit code the job's.
evaluate_run() {
    set_up_job
    on_all_nodes "${prefix[@]}" "${clip_la[@]}" "$@"
}
