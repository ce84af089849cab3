#!/bin/sh
# Starts the pod of state.yaml with the coordinator's own image, whose name and version stand in the overlay alone:
#   sh k8s/tools/state.sh
set -eu
image="$(kubectl get statefulset/fl-server --namespace impetus \
    --output 'jsonpath={.spec.template.spec.containers[0].image}')"
if [ -z "$image" ]; then
    echo "expected a StatefulSet fl-server in the namespace impetus, got none: apply your overlay first" >&2
    exit 2
fi
sed "s|image: .*|image: $image|" "$(dirname "$0")/state.yaml" | kubectl apply -f -
