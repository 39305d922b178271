#!/bin/bash
[ "$SECRET" = "it's 42" ] && [ "$(cat out.txt)" = "good day, ada
set here" ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
