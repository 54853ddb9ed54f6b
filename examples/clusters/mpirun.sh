#!/bin/bash
# Open MPI's mpirun starts the nodes, and no MPI is used after that. Start this on the first machine of the list, in a
# folder that all machines share: ./mpirun.sh ann,bob,cy

hosts=$1
nodes=$(tr , '\n' <<<"$hosts" | wc -l)
export PLAIT_LEADER=${hosts%%,*}
export PLAIT_SECRET_FILE=$PWD/.plait/mpirun-$$.secret
# --bind-to none: Open MPI would bind each agent, and the workers that it starts, to one core.
exec mpirun --host "$hosts" --map-by ppr:1:node --bind-to none -x PATH -x PLAIT_LEADER -x PLAIT_SECRET_FILE \
  sh -c 'PLAIT_NODE_RANK=$OMPI_COMM_WORLD_RANK exec plait node --nodes "$0" -- play.toml' "$nodes"
