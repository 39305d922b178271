#include "tests/bench/peer_disk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "proto/cleanup.h"
#include "proto/file.h"

enum { WRITE_KIB_S = 48, READ_KIB_S = 7, RU_BLOCK = 512 };

static double field_of(const char *line, int field)
{
    for (; line && field > 1; field--) {
        line = strchr(line, ';');
        line += line != NULL;
    }
    return line ? strtod(line, NULL) : 0;
}

double peer_fio(const char *dir, const char *mode, unsigned mib)
{
    lh_autofree char *command =
        lh_format("fio --name=peer --filename=%s/peer --size=%um --bs=1m --rw=%s --direct=1 "
                  "--ioengine=io_uring --iodepth=32 --minimal 2>/dev/null",
                  dir, mib, mode);
    FILE *f = popen(command, "r");
    char line[8192] = "";

    while (f && fgets(line, sizeof line, f))
        ;
    if (!f || pclose(f))
        return 0;
    return field_of(line, *mode == 'w' ? WRITE_KIB_S : READ_KIB_S) * 1024 / 1e9;
}

/* GB/s of one of db_bench's benchmarks. */
static double db_bench(const char *dir, const char *benchmark, unsigned n, unsigned bytes)
{
    lh_autofree char *command =
        lh_format("db_bench --benchmarks=%s --db=%s/rocks --use_existing_db=%d --num=%u "
                  "--value_size=%u --compression_type=none --enable_blob_files=true "
                  "--use_direct_reads=true --use_direct_io_for_flush_and_compaction=true "
                  "--disable_wal=true 2>/dev/null",
                  benchmark, dir, *benchmark == 'r', n, bytes);
    FILE *f = popen(command, "r");
    double rate = 0;
    char line[1024];

    while (f && fgets(line, sizeof line, f)) {
        const char *at = strncmp(line, benchmark, strlen(benchmark)) ? NULL : strstr(line, " MB/s");
        while (at && at > line && at[-1] != ' ')
            at--;
        if (at)
            rate = strtod(at, NULL) * (1 << 20) / 1e9;
    }
    return f && pclose(f) == 0 ? rate : 0;
}

static double written_by_children(void)
{
    struct rusage u;

    getrusage(RUSAGE_CHILDREN, &u);
    return (double)u.ru_oublock * RU_BLOCK;
}

struct peer_rocksdb peer_rocksdb(const char *dir, unsigned n, unsigned bytes)
{
    struct peer_rocksdb p = {0};
    double before = written_by_children();

    p.put = db_bench(dir, "fillseq", n, bytes);
    p.written_per_put = (written_by_children() - before) / n / bytes;
    p.get = p.put > 0 ? db_bench(dir, "readrandom", n, bytes) : 0;
    return p;
}
