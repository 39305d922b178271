#!/bin/sh
# exit_status.sh PROGRAM...: a wrong command line is answered with 2 (docs/JOBDIR.md), which the supervisor takes
# for "no use to try again".
bad=0
for program; do
    "$program" --no-such-option > /dev/null 2>&1
    status=$?
    [ "$status" = 2 ] && continue
    echo "$program exits with $status"
    bad=1
done
exit $bad
