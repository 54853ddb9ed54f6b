#!/bin/bash
# PBS: qsub pbs.sh, in a folder that all nodes share. Change the numbers here and the recipe below.
#PBS -N play
#PBS -l select=2:ncpus=64:ngpus=8
#PBS -l place=scatter:excl
#PBS -l walltime=08:00:00
#PBS -r y

cd "$PBS_O_WORKDIR" || exit 2
hosts=$(awk '!seen[$0]++' "$PBS_NODEFILE")
leader=$(head -n 1 <<<"$hosts")
secret=$PWD/.plait/$PBS_JOBID.secret
rm -f "$secret" # of an earlier start of this job

rank=0
for host in $hosts; do
  # pbs_tmrsh starts a program on a node of the job, without this script's variables.
  pbs_tmrsh "$host" env PATH="$PATH" PLAIT_NODE_RANK=$rank PLAIT_LEADER="$leader" PLAIT_SECRET_FILE="$secret" \
    sh -c 'cd "$0" && exec "$@"' "$PWD" plait node --nodes "$(wc -l <<<"$hosts")" -- play.toml &
  [ $rank = 0 ] && first=$!
  rank=$((rank + 1))
done
trap 'kill -TERM "$first"' TERM USR1
wait "$first" || wait "$first" # a signal ends the first wait, and the run saves meanwhile
code=$?
wait # the other nodes end soon after node 0
exit $code
