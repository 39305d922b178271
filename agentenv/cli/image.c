#include "agentenv/cli/image.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "agentenv/task/dockerfile.h"
#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "proto/file.h"
#include "proto/parse.h"

enum { IMPORT_MS = 3600000, CALL_MS = 60000 };

struct words {
    char *word[2];
    int n, needed;
    char *warm_up;
};

static error_t parse_words(int key, char *arg, struct argp_state *state)
{
    struct words *w = state->input;

    if (key == 'w') {
        w->warm_up = arg;
        return 0;
    }
    if (key == ARGP_KEY_ARG && w->n < w->needed) {
        w->word[w->n++] = arg;
        return 0;
    }
    if (key == ARGP_KEY_ARG || (key == ARGP_KEY_END && w->n < w->needed))
        argp_usage(state);
    return key == ARGP_KEY_END ? 0 : ARGP_ERR_UNKNOWN;
}

#define WARM_UP                                                                                    \
    {                                                                                              \
        "warm-up", 'w', "COMMAND", 0,                                                              \
            "Run by /bin/sh once; sandboxes start with what it leaves running", 0                  \
    }

int image_import(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {WARM_UP, {0}};
    static const struct argp argp = {
        .options = options,
        .parser = parse_words,
        .args_doc = "NAME PATH",
        .doc = "Imports as image NAME: a root file system (directory or tar), an OCI image layout "
               "(directory or tar) or a docker-archive.",
    };
    struct words w = {.needed = 2};
    Longhaul__Sandbox__V1__ImportImageRequest req =
        LONGHAUL__SANDBOX__V1__IMPORT_IMAGE_REQUEST__INIT;

    int r = cli_parse(&argp, argc, argv, &w);
    if (r)
        return r;
    lh_autofree char *path = cli->address ? strdup(w.word[1]) : realpath(w.word[1], NULL);
    if (!path)
        return lh_fail_errno(err, errno, "cannot read %s", w.word[1]);
    req.name = w.word[0];
    req.path = path;
    if (w.warm_up)
        req.warm_up = w.warm_up;
    lh_automsg(Longhaul__Sandbox__V1__ImageInfo) info = NULL;
    r = cli_call(cli, "ImportImage", &req.base, &longhaul__sandbox__v1__image_info__descriptor,
                 IMPORT_MS, (ProtobufCMessage **)&info, err);
    if (r == 0)
        printf("%s %s\n", info->name, info->digest);
    return r;
}

int image_ls(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp argp = {.parser = parse_words, .doc = "Lists the images."};
    static const char *const columns[] = {"name", "bytes", "digest", "created_ms", "warm_up", NULL};
    struct words w = {0};
    Longhaul__Sandbox__V1__Empty req = LONGHAUL__SANDBOX__V1__EMPTY__INIT;
    lh_automsg(Longhaul__Sandbox__V1__ListImagesReply) list = NULL;

    int r = cli_parse(&argp, argc, argv, &w);
    if (r)
        return r;
    r = cli_call(cli, "ListImages", &req.base,
                 &longhaul__sandbox__v1__list_images_reply__descriptor, CALL_MS,
                 (ProtobufCMessage **)&list, err);
    if (r < 0)
        return r;
    json_t *rows = json_array();
    for (size_t i = 0; i < list->n_images; i++) {
        const Longhaul__Sandbox__V1__ImageInfo *image = list->images[i];

        json_array_append_new(
            rows, json_pack("{s:s, s:I, s:s, s:I, s:s}", "name", image->name, "bytes",
                            (json_int_t)image->bytes, "digest", image->digest, "created_ms",
                            (json_int_t)image->created_ms, "warm_up", image->warm_up));
    }
    return cli_print(cli, rows, columns, err);
}

int image_rm(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp argp = {
        .parser = parse_words,
        .args_doc = "NAME",
        .doc = "Removes an image that no task, sandbox or snapshot uses.",
    };
    struct words w = {.needed = 1};
    Longhaul__Sandbox__V1__ImageName req = LONGHAUL__SANDBOX__V1__IMAGE_NAME__INIT;
    lh_automsg(Longhaul__Sandbox__V1__Empty) done = NULL;

    int r = cli_parse(&argp, argc, argv, &w);
    if (r)
        return r;
    req.name = w.word[0];
    return cli_call(cli, "RemoveImage", &req.base, &longhaul__sandbox__v1__empty__descriptor,
                    CALL_MS, (ProtobufCMessage **)&done, err);
}

/* ---- build ---- */

struct building {
    Longhaul__Sandbox__V1__BuildImageRequest req;
    char *name, *directory, *from, *warm_up;
    char **commands;
    int n_commands;
    bool no_cache;
};

static error_t parse_build(int key, char *arg, struct argp_state *state)
{
    struct building *b = state->input;

    switch (key) {
    case 'f':
        b->from = arg;
        return 0;
    case 'n':
        b->no_cache = true;
        return 0;
    case 'w':
        b->warm_up = arg;
        return 0;
    case ARGP_KEY_ARG:
        if (!b->name) {
            b->name = arg;
            return 0;
        }
        if (b->from) {
            b->commands = &state->argv[state->next - 1];
            b->n_commands = state->argc - state->next + 1;
            state->next = state->argc;
            return 0;
        }
        if (b->directory)
            argp_usage(state);
        b->directory = arg;
        return 0;
    case ARGP_KEY_END:
        if (!b->name || !b->directory == !b->from)
            argp_usage(state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static Longhaul__Sandbox__V1__BuildImageRequest *read_dockerfile(const struct building *b,
                                                                 struct lh_error *err)
{
    lh_autofree char *path = lh_format("%s/Dockerfile", b->directory);
    struct dockerfile f;
    size_t len;
    lh_autofree char *text = path ? lh_read_file(path, 1 << 20, &len, err) : NULL;

    if (!text || dockerfile_parse(path, text, len, &f, err) < 0)
        return NULL;
    Longhaul__Sandbox__V1__BuildImageRequest *req =
        dockerfile_request(&f, b->name, b->directory, err);
    dockerfile_finish(&f);
    return req;
}

/* The same from commands given one by one. */
static Longhaul__Sandbox__V1__BuildImageRequest *read_commands(const struct building *b,
                                                               struct lh_error *err)
{
    lh_autofree struct docker_step *steps = calloc((size_t)b->n_commands + 1, sizeof *steps);
    struct dockerfile f = {"command", b->from, steps, (size_t)b->n_commands};

    if (!steps)
        return lh_fail_errno(err, ENOMEM, "a build"), NULL;
    for (int i = 0; i < b->n_commands; i++)
        steps[i] = (struct docker_step){DOCKER_RUN, (unsigned)i + 1, &b->commands[i], 1};
    return dockerfile_request(&f, b->name, "/nonexistent", err);
}

int image_build(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp_option options[] = {
        {"from", 'f', "IMAGE", 0, "Run commands on this image instead of a Dockerfile", 0},
        {"no-cache", 'n', NULL, 0, "Run the steps even if the same were run before", 0},
        WARM_UP,
        {0},
    };
    static const struct argp argp = {
        .options = options,
        .parser = parse_build,
        .args_doc = "NAME DIRECTORY\nNAME --from IMAGE COMMAND...",
        .doc = "Builds image NAME in a sandbox, from DIRECTORY/Dockerfile (FROM an imported image, "
               "COPY, RUN, ENV, WORKDIR, USER) or from shell commands.",
    };
    struct building b = {0};

    int r = cli_parse(&argp, argc, argv, &b);
    if (r)
        return r;
    lh_automsg(Longhaul__Sandbox__V1__BuildImageRequest) req =
        b.from ? read_commands(&b, err) : read_dockerfile(&b, err);
    if (!req)
        return err->code;
    req->no_cache = b.no_cache;
    if (b.warm_up && !(req->warm_up = strdup(b.warm_up)))
        return lh_fail_errno(err, ENOMEM, "a build");
    lh_automsg(Longhaul__Sandbox__V1__ImageInfo) info = NULL;
    r = cli_call(cli, "BuildImage", &req->base, &longhaul__sandbox__v1__image_info__descriptor,
                 IMPORT_MS, (ProtobufCMessage **)&info, err);
    if (r == 0)
        printf("%s %s\n", info->name, info->digest);
    return r;
}
