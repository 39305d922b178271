#!/bin/bash
[ -d made ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
