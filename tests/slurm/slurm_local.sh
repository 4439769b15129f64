#!/usr/bin/env bash
# A real Slurm cluster of several virtual nodes on one Debian machine, for tests. Run as root.
#
#   slurm_local.sh install      install Debian's packages of Slurm, those that are missing
#   slurm_local.sh able         exit status 0 if this machine can run a cluster, else 1 and why not
#   slurm_local.sh start        start munged, slurmctld and the nodes, with no jobs from before
#   slurm_local.sh stop         end all of it (state and logs stay in $SLURM_LOCAL_DIR)
#   slurm_local.sh guard FILE   wait until nobody holds a lock on FILE any more (a process that dies lets go of
#                               it), then stop and remove $SLURM_LOCAL_DIR
#   slurm_local.sh status       processes and sinfo; exit status 0 only if every node is usable
#   slurm_local.sh env          print the `export` lines a client needs (eval it)
#   slurm_local.sh crash NODE   a node dies: slurmd, its steps and all their processes, at once
#   slurm_local.sh boot NODE    bring a crashed node back; not before Slurm has it DOWN (wait, or say
#                               `scontrol update NodeName=NODE State=DOWN Reason=crash`), else its
#                               jobs go on waiting for the tasks that died
#
# Each node is `slurmd -N nodeK` on its own port (Debian builds Slurm with MULTIPLE_SLURMD) in its
# own host-name, mount, IPC and PID namespaces, with the address 127.0.1.K. The network namespace
# is the machine's, so two nodes can't both listen on one port of 0.0.0.0.
set -euo pipefail

DIR=${SLURM_LOCAL_DIR:-/tmp/slurm_local}      # all state; nothing is written elsewhere
NODES=${SLURM_LOCAL_NODES:-2}
CPUS=${SLURM_LOCAL_CPUS:-64}                  # per node, need not be there
MEMORY_MB=${SLURM_LOCAL_MEMORY_MB:-512000}    # per node, need not be there
GPUS=${SLURM_LOCAL_GPUS:-8}                   # per node, copies of /dev/null
PORT=${SLURM_LOCAL_PORT:-16817}               # slurmctld's; node K has PORT + K
FIRST_JOB=${SLURM_LOCAL_FIRST_JOB:-1}         # its id: jobs of two clusters that take ports by it stay apart
KILL_WAIT=${SLURM_LOCAL_KILL_WAIT:-10}        # seconds from SIGTERM to SIGKILL
REQUEUE_WAIT=${SLURM_LOCAL_REQUEUE_WAIT:-5}   # seconds a requeued job waits (Slurm's default: 120)
GRACE_TIME=${SLURM_LOCAL_GRACE_TIME:-20}      # seconds that a preempted job gets after SIGTERM
MESSAGE_TIMEOUT=${SLURM_LOCAL_MESSAGE_TIMEOUT:-5} # seconds; a dead node is DOWN after 2 of them + 6 s

export SLURM_CONF=$DIR/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin

die() { echo "slurm_local: $*" >&2; exit 1; }

# Whether a process id is one of this script's daemons, running: not a zombie that nobody reaps, nor
# another program that has got the id of a pid file left over.
running() { [[ $(ps -o stat=,comm= -p "$1" 2>/dev/null) =~ ^[^Z].*\ (munged|slurmctld|unshare)$ ]]; }

gone() { ! running "$1"; }

alive() { [[ -s $1 ]] && running "$(<"$1")"; }

# Waits until a command succeeds, trying ten times a second: until_true SECONDS COMMAND...
until_true() {
  local end=$((SECONDS + $1)); shift
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < end)) || return 1
    sleep 0.1
  done
}

# Ends the process of a pid file and waits for it, by SIGKILL if it stays: end_process FILE SIGNAL
end_process() {
  alive "$1" || { rm -f "$1"; return 0; }
  local pid; pid=$(<"$1")
  kill "-$2" "$pid" 2>/dev/null || true
  until_true 10 gone "$pid" || kill -KILL "$pid" 2>/dev/null || true
  rm -f "$1"
}

check_node() { node_names | grep -qx "${1:-}" || die "no such node: '${1:-}'"; }

node_names() { seq -f 'node%.0f' "$NODES"; }

# The packages of the commands that aren't there.
missing_packages() {
  local command
  for command in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge pgrep:procps \
                 unshare:util-linux; do
    command -v "${command%%:*}" >/dev/null || echo "${command##*:}"
  done
}

install() {
  local missing; mapfile -t missing < <(missing_packages)
  ((${#missing[@]})) || return 0
  ((EUID == 0)) || die "must be root to install ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

write_config() {
  local k
  cat >"$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$PORT
FirstJobId=$FIRST_JOB
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$DIR/munge/socket,cred_expire=$REQUEUE_WAIT
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
MailProg=/bin/true
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/spool/%n/slurmd.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=$MESSAGE_TIMEOUT
InactiveLimit=0
KillWait=$KILL_WAIT
MinJobAge=86400
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=$GRACE_TIME
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
  : >"$DIR/hosts"
  grep -v '^127\.0\.1\.' /etc/hosts >>"$DIR/hosts" || true
  for ((k = 1; k <= NODES; k++)); do
    echo "NodeName=node$k NodeAddr=127.0.1.$k Port=$((PORT + k)) CPUs=$CPUS" \
         "RealMemory=$MEMORY_MB Gres=gpu:$GPUS" >>"$SLURM_CONF"
    echo "127.0.1.$k node$k" >>"$DIR/hosts"
  done
  echo "AutoDetect=off" >"$DIR/gres.conf"
  ((GPUS == 0)) || echo "Name=gpu File=$DIR/gpu/gpu[0-$((GPUS - 1))]" >>"$DIR/gres.conf"
  for ((k = 0; k < GPUS; k++)); do
    [[ -e $DIR/gpu/gpu$k ]] || mknod "$DIR/gpu/gpu$k" c 1 3
  done
}

start_munged() {
  [[ -s $DIR/munge/key ]] ||
    (umask 077; head -c 128 /dev/urandom >"$DIR/munge/key")
  munged --key-file="$DIR/munge/key" --socket="$DIR/munge/socket" --seed-file="$DIR/munge/seed" \
         --pid-file="$DIR/munge/pid" --log-file="$DIR/munge/log" --num-threads=2 ||
    die "munged did not start: see $DIR/munge/log"
}

# The first process of a node: what it leaves running dies with it, as on a machine that loses power.
# shellcheck disable=SC2016
NODE_INIT='
  hostname "$1"
  mount --bind "$2/hosts" /etc/hosts
  mount -t tmpfs tmpfs /dev/shm
  slurmd -D -N "$1" &
  while :; do wait; sleep 1; done
'

boot_node() {
  local name=$1
  mkdir -p "$DIR/spool/$name"
  setsid unshare --uts --mount --ipc --pid --fork --kill-child --mount-proc \
    bash -c "$NODE_INIT" "$name" "$name" "$DIR" >"$DIR/log/$name.out" 2>&1 </dev/null &
  echo $! >"$DIR/run/$name.pid"
}

# A node's slurmd, by its process id on this machine (its own pid file has the one inside the node).
slurmd_pid() {
  local init; init=$(pgrep -P "$(<"$DIR/run/$1.pid")") || return 1
  pgrep -P "$init" -x slurmd
}

nodes_usable() {
  local states; states=$(sinfo -h -N -p main -o %T) || return 1
  (($(grep -cxE 'idle|mixed|allocated|completing' <<<"$states") == NODES))
}

able() {
  ((EUID == 0)) || die "must be root"
  [[ -z $(missing_packages) ]] || die "not installed: $(missing_packages | xargs); see '$0 install'"
  unshare --uts --mount --ipc --pid --fork --mount-proc mount -t tmpfs tmpfs /dev/shm 2>/dev/null ||
    die "this machine forbids namespaces (a container without CAP_SYS_ADMIN?)"
}

start() {
  able
  ! alive "$DIR/run/slurmctld.pid" || die "is running already in $DIR"
  stop    # what an earlier start that failed has left
  rm -rf "$DIR/state" "$DIR/spool" "$DIR/log"
  mkdir -p "$DIR"/{state,spool,run,log,munge,gpu}
  chmod 755 "$DIR" "$DIR/munge"
  write_config
  start_munged
  setsid slurmctld </dev/null >"$DIR/log/slurmctld.out" 2>&1 || die "slurmctld did not start: see $DIR/log"
  local name
  for name in $(node_names); do boot_node "$name"; done
  until_true 30 nodes_usable || { status || true; die "not every node came up: see $DIR/log"; }
}

stop() {
  local file
  end_process "$DIR/run/slurmctld.pid" TERM
  for file in "$DIR"/run/node*.pid; do end_process "$file" KILL; done
  end_process "$DIR/munge/pid" TERM
}

guard() {
  flock "$1" true
  stop
  rm -rf "$DIR"
}

status() {
  local name file
  for file in "$DIR/munge/pid" "$DIR/run/slurmctld.pid"; do
    alive "$file" && echo "$file $(<"$file")" || echo "$file down"
  done
  for name in $(node_names); do
    if alive "$DIR/run/$name.pid"; then echo "$name up, slurmd $(slurmd_pid "$name" || echo down)"
    else echo "$name down"; fi
  done
  alive "$DIR/run/slurmctld.pid" || return 1
  sinfo -N -p main -o '%N %T %c %m %G %E'
  nodes_usable
}

case ${1:-} in
  install|able|start|stop|status) "$1" ;;
  guard) guard "${2:?}" ;;
  env) echo "export SLURM_CONF='$SLURM_CONF'" ;;
  crash) check_node "${2:-}"; end_process "$DIR/run/$2.pid" KILL ;;
  boot) check_node "${2:-}"; end_process "$DIR/run/$2.pid" KILL; boot_node "$2" ;;
  *) die "usage: $0 install|able|start|stop|status|env|guard FILE|crash NODE|boot NODE" ;;
esac
