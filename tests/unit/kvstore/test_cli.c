/* The command line against a real kvstored: what it prints in a pipe, and its exit codes. */
#include <criterion/criterion.h>
#include <criterion/new/assert.h>
#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kit.h"
#include "kvstore/client/link.h"
#include "proto/clock.h"
#include "proto/file.h"
#include "proto/hex.h"

/* Output of `kvstore ARGS` parsed as JSON (NULL if it is none) and its exit code. */
static json_t *kvstore(const char *args, int *code)
{
    lh_autofree char *command = lh_format("%s %s 2>/dev/null", KVSTORE, args);
    FILE *f = popen(command, "r");

    json_t *out = json_loadf(f, 0, NULL);
    while (fgetc(f) != EOF)
        ;
    int status = pclose(f);
    *code = WEXITSTATUS(status);
    return out;
}

static long long number(json_t *o, const char *field)
{
    json_t *v = json_object_get(o, field);

    cr_assert(v != NULL, "no field %s", field);
    return (long long)json_number_value(v);
}

static json_t *of_job(const struct daemon *d, const char *command, int want)
{
    lh_autofree char *args = lh_format("%s %s", d->dir, command);
    int code;
    json_t *out = kvstore(args, &code);

    cr_assert(eq(int, code, want), "%s", command);
    return out;
}

static void fill(struct daemon *d, struct kv_client *c, struct kv_key *chain, size_t n)
{
    struct kv_key root = root_of(1);
    struct lh_error e = {0};

    (void)d;
    use_version(c, 1, false);
    chain_of(&root, 1, n, chain);
    cr_assert(gt(i64, put_units(c, chain, 0, n, &e), 0), "%s", e.message);
}

Test(cli, stat_and_ls)
{
    struct daemon d;
    struct kv_key chain[3000];

    daemon_start(&d, 64 << 20, 64 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 3000);
    cr_assert(eq(sz, get_units(c, chain, 3000, 2990), 3000));

    json_t *stat = of_job(&d, "stat", 0);
    cr_assert(eq(llong, number(stat, "capacity_bytes"), 64 << 20));
    cr_assert(eq(llong, number(stat, "objects"), 3001));
    cr_assert(eq(llong, number(stat, "hits"), 1));
    cr_assert(eq(llong, number(stat, "pinned"), 0));
    json_decref(stat);

    json_t *roots = of_job(&d, "ls", 0);
    cr_assert(eq(sz, json_array_size(roots), 1));
    json_t *root = json_array_get(roots, 0);
    cr_assert(eq(llong, number(root, "objects"), 3001));
    cr_assert(eq(llong, number(root, "policy_step"), 1));
    lh_autofree char *ls = lh_format("ls %s", json_string_value(json_object_get(root, "root")));
    json_decref(roots);

    json_t *objects = of_job(&d, ls, 0);
    cr_assert(eq(sz, json_array_size(objects), 3001), "all pages of the listing, each object once");
    json_decref(objects);
    daemon_stop(&d);
}

static void spoil_segment(const struct daemon *d)
{
    struct lh_error e = {0};
    struct kv_link l;

    cr_assert(eq(int, kv_link_open(&l, d->socket, "raw", lh_now_ms() + 5000, &e), 0));
    l.map->base[0] ^= 1; /* blocks grow from the bottom */
    kv_link_close(&l);
}

Test(cli, verify_finds_what_is_corrupt)
{
    struct daemon d;
    struct kv_key chain[20];

    daemon_start(&d, 1 << 20, 1 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 20);
    json_t *good = of_job(&d, "verify", 0);
    cr_assert(eq(llong, number(good, "objects"), 21));
    cr_assert(eq(llong, number(good, "corrupt"), 0));
    cr_assert(eq(llong, number(good, "bytes"), 20 * BLOCK + STATE));
    json_decref(good);
    spoil_segment(&d);
    json_t *bad = of_job(&d, "verify", 1);
    cr_assert(eq(llong, number(bad, "corrupt"), 1));
    json_t *object = json_array_get(json_object_get(bad, "corrupt_objects"), 0);
    cr_assert(eq(str, (char *)json_string_value(json_object_get(object, "part")), (char *)"block"));
    cr_assert(eq(llong, number(object, "unit"), 0));
    json_decref(bad);
    daemon_stop(&d);
}

Test(cli, wrong_use_has_its_exit_code)
{
    static const struct {
        const char *args;
        int code;
    } rows[] = {{"", 2},
                {"/tmp", 2},
                {"/tmp frobnicate", 2},
                {"/tmp stat more", 2},
                {"/tmp/no-such-job stat", 75},
                {"--socket=/tmp/no-such-socket stat", 75},
                {"--nonsense", 2},
                {"-o yaml /tmp stat", 2}};

    for (size_t i = 0; i < LH_ARRAY_SIZE(rows); i++) {
        int code;
        json_decref(kvstore(rows[i].args, &code));
        cr_assert(eq(int, code, rows[i].code), "kvstore %s", rows[i].args);
    }
}

Test(cli, a_bad_root_is_refused_and_tables_are_for_people)
{
    struct daemon d;
    struct kv_key chain[4];

    daemon_start(&d, 1 << 20, 1 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 4);
    json_decref(of_job(&d, "ls xyz", 1));
    json_decref(of_job(&d, "ls 00000000000000000000000000000000", 1));
    lh_autofree char *command = lh_format("%s -o table --socket=%s ls", KVSTORE, d.socket);
    FILE *f = popen(command, "r");
    char line[256] = "";
    cr_assert(fgets(line, sizeof line, f) && strstr(line, "policy_step"));
    cr_assert(fgets(line, sizeof line, f) && strstr(line, " 5 "), "objects: %s", line);
    cr_assert(eq(int, pclose(f), 0));
    daemon_stop(&d);
}

Test(cli, drop_makes_a_root_unmatchable)
{
    struct daemon d;
    struct kv_key chain[4], root = root_of(1);
    char hex[33];

    daemon_start(&d, 1 << 20, 1 << 20);
    lh_auto(kv_client) c = client_of(&d, "a");
    fill(&d, c, chain, 4);
    lh_hex_print(root.bytes, sizeof root.bytes, hex);
    lh_autofree char *command = lh_format("drop %s", hex);
    json_decref(of_job(&d, "drop", 1));
    json_decref(of_job(&d, "drop 00000000000000000000000000000000", 1));
    cr_assert(eq(sz, get_units(c, chain, 4, 0), 4));
    json_decref(of_job(&d, command, 0));
    cr_assert(eq(sz, get_units(c, chain, 4, 0), 0));
    json_decref(of_job(&d, command, 1));
    daemon_stop(&d);
}
