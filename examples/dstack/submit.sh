#!/bin/sh
# Two spot machines with eight H100s each, by a dstack server that may rent at AWS. Start it in a folder with play.toml,
# its text, and plait's wheel in dist/ (make wheel).
set -eu
dstack apply --yes --file "$(dirname "$0")/fleet.yaml"
for rank in 0 1; do
  dstack apply --yes --file "$(dirname "$0")/volume.yaml" --name "play-work-$rank"
done
exec plait submit play.toml --on dstack --cluster "2x(8xH100)" --nodes 2 --with spot=yes --with "volume=play-work-{rank}"
