#include "tests/unit/agentenv/lab.h"

#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/file.h"
#include "tests/must_work.h"
#include "tests/unit/agentenv/missing.h"

const char *lab_missing(void)
{
    return missing_for_sandboxes();
}

/* `script` with the image as its working directory. */
static void in_image(const struct lab *l, const char *script)
{
    lh_autofree char *cmd = lh_format("mkdir -p %s/bin && cd %s && %s", l->root, l->root, script);

    cr_assert(cmd && system(cmd) == 0, "%s", cmd);
}

void lab_open(struct lab *l)
{
    struct lh_error err = {0};

    snprintf(l->dir, sizeof l->dir, "/var/tmp/sandbox-lab-XXXXXX");
    cr_assert(mkdtemp(l->dir) != NULL);
    snprintf(l->root, sizeof l->root, "%s/root", l->dir);
    snprintf(l->parent, sizeof l->parent, "lab-%s", l->dir + strlen("/var/tmp/sandbox-lab-"));
    in_image(l, "cp /bin/busybox bin && for a in $(bin/busybox --list); do "
                "[ $a = busybox ] || ln -s busybox bin/$a; done");
    in_image(l, "mkdir -p etc root work usr/share/keep && echo base > etc/base && "
                "printf 'root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000:u:/home:/bin/sh\n' "
                "> etc/passwd && printf 'root:x:0:\nuser:x:1000:\nextra:x:77:user\n' > etc/group "
                "&& for i in 1 2 3; do echo $i > usr/share/keep/$i; done");
    l->host = box_host_create(&(struct box_host_options){.cgroup_parent = l->parent}, &err);
    cr_assert(l->host != NULL, "%s", err.message);
}

void lab_close(struct lab *l)
{
    char path[128];

    cr_assert(box_host_sweep(l->host, NULL, 0, NULL) == 0, "a sandbox was left");
    box_host_destroy(l->host);
    cr_assert(lh_remove_tree(l->dir, NULL) == 0);
    snprintf(path, sizeof path, "/sys/fs/cgroup/unified/%s", l->parent);
    cr_assert(access(path, F_OK) < 0, "cgroup %s was left", path);
    snprintf(path, sizeof path, "/sys/fs/cgroup/memory/%s", l->parent);
    cr_assert(access(path, F_OK) < 0, "cgroup %s was left", path);
    snprintf(path, sizeof path, "/sys/fs/cgroup/%s", l->parent);
    cr_assert(access(path, F_OK) < 0, "cgroup %s was left", path);
}

struct lab lab;

void lab_init(void)
{
    const char *missing = lab_missing();

    NEEDS("sandbox", !missing, missing);
    lab_open(&lab);
}

void lab_fini(void)
{
    if (lab.host)
        lab_close(&lab);
}

struct box_spec lab_spec(struct lab *l, const char *id, struct box_layer *layer)
{
    static __thread char dir[128];

    *layer = (struct box_layer){l->root, true};
    snprintf(dir, sizeof dir, "%s/%s", l->dir, id);
    cr_assert(mkdir(dir, 0755) == 0 || errno == EEXIST);
    return (struct box_spec){.id = id,
                             .dir = dir,
                             .layers = layer,
                             .n_layers = 1,
                             .limits = {.cpu_millis = 1000,
                                        .memory_bytes = 64 << 20,
                                        .pids = 64,
                                        .open_files = 128,
                                        .disk_bytes = 64 << 20,
                                        .output_bytes = 32 << 10},
                             .network = BOX_NET_NONE};
}

struct box *lab_start(struct lab *l, const char *id)
{
    struct box_layer layer;
    struct box_spec spec = lab_spec(l, id, &layer);
    struct lh_error err = {0};
    struct box *b = box_start(l->host, &spec, &err);

    cr_assert(b != NULL, "%s", err.message);
    return b;
}

static int collect(void *ctx, enum box_stream stream, uint64_t offset, const void *data, size_t len)
{
    struct lab_result *r = ctx;
    char *to = stream == BOX_OUT ? r->out : r->err;
    size_t *n = stream == BOX_OUT ? &r->out_len : &r->err_len;
    size_t room = (stream == BOX_OUT ? sizeof r->out : sizeof r->err) - 1 - *n;

    len = len < room ? len : room;
    memcpy(to + *n, data, len);
    to[ *n += len] = 0;
    return 0;
}

struct lab_result *lab_exec(struct box *b, const struct box_exec_spec *spec)
{
    static __thread struct lab_result r;
    struct box_exec_spec s = *spec;

    memset(&r, 0, sizeof r);
    s.output = collect;
    s.ctx = &r;
    r.rc = box_exec(b, &s, &r.exec, &r.error);
    return &r;
}

struct lab_result *lab_sh(struct box *b, const char *script, uint32_t timeout_ms)
{
    static _Atomic unsigned n;
    const char *argv[] = {"sh", "-c", script, NULL};
    char id[32];

    snprintf(id, sizeof id, "sh-%u", ++n);
    return lab_exec(b,
                    &(struct box_exec_spec){.exec_id = id, .argv = argv, .timeout_ms = timeout_ms});
}

const char *lab_out(struct box *b, const char *script)
{
    struct lab_result *r = lab_sh(b, script, LAB_PATIENCE_MS);

    cr_assert(r->rc == 0, "%s", r->error.message);
    cr_assert(r->exec.status == 0, "%s: status %d, %s", script, r->exec.status, r->err);
    if (r->out_len && r->out[r->out_len - 1] == '\n')
        r->out[--r->out_len] = 0;
    return r->out;
}

void lab_install(struct lab *l, const char *host_path, const char *name)
{
    lh_autofree char *script = lh_format("install -m 755 %s bin/%s", host_path, name);

    cr_assert(script != NULL);
    in_image(l, script);
}
