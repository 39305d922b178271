#!/bin/bash
[ "$(stat -c %a key)" = 600 ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
