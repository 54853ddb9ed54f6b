#!/bin/sh
# Two machines with eight H100s each, on a Kubernetes cluster that SkyPilot knows. Start it in a folder with
# play.toml, its text, and plait's wheel in dist/ (make wheel).
set -eu
sky volumes apply --yes "$(dirname "$0")/volume.yaml"
exec plait submit play.toml --on skypilot --cluster "2x(8xH100)" --nodes 2 \
  --with infra=k8s --with volume=play-work
