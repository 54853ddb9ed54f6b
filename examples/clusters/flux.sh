#!/bin/bash
# Flux: flux batch -N 2 --exclusive flux.sh, in a folder that all nodes share.

nodes=$(flux resource list -n -o '{nnodes}' -s all)
export PLAIT_LEADER=$(flux exec -r 0 hostname)
export PLAIT_SECRET_FILE=$PWD/.plait/$(flux getattr jobid).secret
# One task a node; flux numbers them.
exec flux run -N "$nodes" -n "$nodes" --exclusive \
  sh -c 'PLAIT_NODE_RANK=$FLUX_TASK_RANK exec plait node --nodes "$0" -- play.toml' "$nodes"
