#!/bin/bash
[ "$(cat sum.txt)" = "$(cat /tests/expected)" ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
