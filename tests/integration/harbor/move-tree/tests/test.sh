#!/bin/bash
[ ! -e old ] && [ -L new/link ] && [ "$(cat new/link)" = 1 ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
