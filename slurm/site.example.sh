# shellcheck shell=bash
# How this site gets a Python with clip_la in it. Copy to site.sh (git ignores it) and keep what applies;
# CLIP_LA_SITE=/path/to/file names another one. Sourced on the first node of each job; srun passes what is
# exported to all tasks.

# A virtual environment on a file system that all nodes see:
#   module load python/3.11
#   . /path/to/venv/bin/activate

# Or a container that holds clip_la. The working directory is mounted; CONTAINER_MOUNTS adds others, comma between.
#   CONTAINER=pyxis                                 # srun --container-image; or: apptainer
#   CONTAINER_IMAGE=/path/to/clip_la.sqsh           # apptainer: clip_la.sif
#   CONTAINER_MOUNTS=/data:/data

# The network between nodes, where NCCL doesn't find it by itself:
#   export NCCL_SOCKET_IFNAME=ib0
#   export NCCL_IB_HCA=mlx5
