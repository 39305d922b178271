#include "trainer/arbiter/holders.h"

#include <stdio.h>
#include <string.h>

#include "proto/cleanup.h"

uint64_t holders_mapped_bytes(pid_t pid, holders_counts_fn *counts, const void *ctx)
{
    char path[64], line[512];
    uint64_t sum = 0;

    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    lh_autofclose FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) {
        unsigned long from, to, inode;
        if (!strstr(line, "/memfd:longhaul-"))
            continue;
        if (sscanf(line, "%lx-%lx %*s %*s %*s %lu", &from, &to, &inode) == 3 &&
            counts(ctx, (ino_t)inode))
            sum += to - from;
    }
    return sum;
}

uint64_t holders_outside_bytes(pid_t pid)
{
    char path[64], line[256];
    unsigned long long kib = 0;

    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    lh_autofclose FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "RssAnon: %llu kB", &kib) == 1)
            break;
    return kib * 1024;
}
