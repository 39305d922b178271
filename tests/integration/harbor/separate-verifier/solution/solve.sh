touch marker; stat -c %s /bin/busybox > result; echo stat > log
