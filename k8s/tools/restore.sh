#!/bin/sh
# Restores a backup of the coordinator's volume, with the revocations and bans of after the backup:
#   sh k8s/tools/restore.sh state.tar denials.json
# The lists on the volume itself are used too, if there are any. Without any list nothing is changed: a revoked device
# would be accepted again. --without-denials in place of the file says that this is meant.
set -eu
if [ $# -ne 2 ] || [ ! -f "$1" ]; then
    echo "expected: restore.sh state.tar denials.json (or --without-denials)" >&2
    exit 2
fi
if [ "$2" != --without-denials ] && [ ! -f "$2" ]; then
    echo "expected the list of revocations and bans, denials.json, got no such file: $2. Without it the restore undoes" \
        "those of after the backup; --without-denials in its place says that this is meant. Nothing was changed." >&2
    exit 2
fi
kubectl scale statefulset/fl-server --replicas 0 --namespace impetus
kubectl wait --for delete pod/fl-server-0 --timeout 180s --namespace impetus
sh "$(dirname "$0")/state.sh"
kubectl wait --for condition=Ready pod/fl-state --timeout 120s --namespace impetus
volume="$(mktemp)"
kubectl exec fl-state --namespace impetus -- sh -c 'cat /var/lib/impetus/denials.json 2>/dev/null || true' > "$volume"
kubectl exec fl-state --namespace impetus -- find /var/lib/impetus -mindepth 1 -delete
kubectl exec --stdin fl-state --namespace impetus -- tar -C /var/lib/impetus -xf - < "$1"
if [ "$2" != --without-denials ]; then
    kubectl exec --stdin fl-state --namespace impetus -- sh -c 'cat > /var/lib/impetus/denials-given.json' < "$2"
    if [ -s "$volume" ]; then
        kubectl exec --stdin fl-state --namespace impetus -- sh -c 'cat > /var/lib/impetus/denials-volume.json' < "$volume"
    fi
fi
rm "$volume"
kubectl delete pod fl-state --namespace impetus
kubectl scale statefulset/fl-server --replicas 1 --namespace impetus
