#!/bin/bash
# LSF: bsub <lsf.sh, in a folder that all nodes share. Change the numbers here and the recipe below.
#BSUB -J play
#BSUB -n 2 -R "span[ptile=1]" -x
#BSUB -gpu "num=8"
#BSUB -W 8:00
#BSUB -wa USR2 -wt 5
#BSUB -r

hosts=$(awk '!seen[$0]++' "$LSB_DJOB_HOSTFILE")
export PLAIT_LEADER=$(head -n 1 <<<"$hosts")
export PLAIT_SECRET_FILE=$PWD/.plait/$LSB_JOBID.secret
rm -f "$PLAIT_SECRET_FILE" # of an earlier start of this job

rank=0
for host in $hosts; do
  # blaunch starts a program on a node of the job, with this script's variables and folder.
  PLAIT_NODE_RANK=$rank blaunch -z "$host" plait node --nodes "$(wc -l <<<"$hosts")" -- play.toml &
  [ $rank = 0 ] && first=$!
  rank=$((rank + 1))
done
trap 'kill -TERM "$first"' TERM USR2
wait "$first" || wait "$first" # a signal ends the first wait, and the run saves meanwhile
code=$?
wait # the other nodes end soon after node 0
exit $code
