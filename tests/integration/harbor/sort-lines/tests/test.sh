#!/bin/bash
[ "$PWD" = /srv/words ] && sort -c words && [ "$(wc -l < words)" = 3 ] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
