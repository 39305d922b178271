#!/bin/bash
# exit status says nothing: only the file counts
[ "$(./run.sh)" = ok ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
exit 3
