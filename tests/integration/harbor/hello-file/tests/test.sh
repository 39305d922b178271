#!/bin/bash
[ "$(cat hello.txt)" = hello ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
