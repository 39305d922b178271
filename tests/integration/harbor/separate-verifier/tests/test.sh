#!/bin/bash
[ ! -e marker ] && [ -s log ] && [ "$(cat result)" = "$(stat -c %s /bin/busybox)" ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
