#include "agentenv/cli/image.h"

#include <errno.h>
#include <stdio.h>

#include "longhaul/sandbox/v1/sandbox.pb-c.h"
#include "proto/parse.h"

enum { IMPORT_MS = 3600000, CALL_MS = 60000 };

struct words {
    char *word[2];
    int n, needed;
};

static error_t parse_words(int key, char *arg, struct argp_state *state)
{
    struct words *w = state->input;

    if (key == ARGP_KEY_ARG && w->n < w->needed) {
        w->word[w->n++] = arg;
        return 0;
    }
    if (key == ARGP_KEY_ARG || (key == ARGP_KEY_END && w->n < w->needed))
        argp_usage(state);
    return key == ARGP_KEY_END ? 0 : ARGP_ERR_UNKNOWN;
}

int image_import(struct cli *cli, int argc, char **argv, struct lh_error *err)
{
    static const struct argp argp = {
        .parser = parse_words,
        .args_doc = "NAME PATH",
        .doc = "Imports a root file system, a directory or a tar, as image NAME.",
    };
    struct words w = {.needed = 2};
    Longhaul__Sandbox__V1__ImportImageRequest req =
        LONGHAUL__SANDBOX__V1__IMPORT_IMAGE_REQUEST__INIT;

    int r = cli_parse(&argp, argc, argv, &w);
    if (r)
        return r;
    lh_autofree char *path = realpath(w.word[1], NULL);
    if (!path)
        return lh_fail_errno(err, errno, "cannot read %s", w.word[1]);
    req.name = w.word[0];
    req.path = path;
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
    static const char *const columns[] = {"name", "bytes", "digest", "created_ms", NULL};
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

        json_array_append_new(rows, json_pack("{s:s, s:I, s:s, s:I}", "name", image->name, "bytes",
                                              (json_int_t)image->bytes, "digest", image->digest,
                                              "created_ms", (json_int_t)image->created_ms));
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
