sed -i 's/eco/echo/' run.sh
