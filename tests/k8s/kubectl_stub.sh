#!/bin/sh
# In place of kubectl: `exec` runs its command here, with $STATE in place of the volume; `get` is asked for an image's name;
# everything else does nothing.
[ "$1" != get ] || echo registry.example.org/impetus/fl-server:1.2.3
[ "$1" = exec ] || exit 0
while [ "$1" != -- ]; do shift; done
shift
for word; do
    shift
    set -- "$@" "$(printf '%s' "$word" | sed "s|/var/lib/impetus|$STATE|g")"
done
exec "$@"
