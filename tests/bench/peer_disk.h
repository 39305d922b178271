/* fio and RocksDB's db_bench on the same file system, for bench_kv_disk.c. */
#ifndef TESTS_BENCH_PEER_DISK_H
#define TESTS_BENCH_PEER_DISK_H

#include <stdbool.h>

/* GB/s of fio, "write" or "read", on dir/peer of `mib` MiB, which is made when it is not there; 0
 * when fio is missing.  Requests of 1 MiB by io_uring, O_DIRECT, 32 under way. */
double peer_fio(const char *dir, const char *mode, unsigned mib);

struct peer_rocksdb {
    double put, get;        /* GB/s; 0 when db_bench is missing */
    double written_per_put; /* bytes to the device for every byte of a value */
};
/* `n` values of `bytes` in dir/rocks: put in order of their keys, read in random order. */
struct peer_rocksdb peer_rocksdb(const char *dir, unsigned n, unsigned bytes);

#endif
