#include "agentenv/task/oci_json.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/cleanup.h"

static void lh_cleanup_json(json_t **j)
{
    json_decref(*j);
}
#define auto_json __attribute__((cleanup(lh_cleanup_json))) json_t *

static json_t *load(const char *text, size_t len, const char *what, struct lh_error *err)
{
    json_error_t why;
    json_t *top = len <= OCI_JSON_MAX ? json_loadb(text, len, JSON_REJECT_DUPLICATES, &why) : NULL;

    if (!top && len > OCI_JSON_MAX)
        lh_fail(err, LH_INVALID_ARGUMENT, "%s has more than %d bytes", what, OCI_JSON_MAX);
    else if (!top)
        lh_fail(err, LH_INVALID_ARGUMENT, "%s, line %d: %s", what, why.line, why.text);
    return top;
}

static const char *text_of(const json_t *object, const char *name)
{
    const char *text = json_string_value(json_object_get(object, name));

    return text ? text : "";
}

/* ---- names ---- */

/* {"digest": "sha256:HEX"} → blobs/sha256/HEX. */
static int read_descriptor(const json_t *d, struct oci_blob *out, struct lh_error *err)
{
    const char *digest = text_of(d, "digest"), *hex = strchr(digest, ':');

    if (!hex || strncmp(digest, "sha256:", 7) != 0 || strlen(++hex) != 64 ||
        hex[strspn(hex, "0123456789abcdef")])
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%.100s\" is no SHA-256 digest", digest);
    snprintf(out->sha256, sizeof out->sha256, "%s", hex);
    snprintf(out->name, sizeof out->name, "blobs/sha256/%s", hex);
    return 0;
}

/* A member of an archive, relative and without "..". */
static int read_member(const json_t *value, struct oci_blob *out, struct lh_error *err)
{
    const char *name = json_string_value(value);

    if (!name || !*name || *name == '/' || strstr(name, "..") || strlen(name) >= OCI_NAME)
        return lh_fail(err, LH_INVALID_ARGUMENT, "\"%.100s\" is no name of a layer",
                       name ? name : "");
    snprintf(out->name, sizeof out->name, "%s", name);
    out->sha256[0] = 0;
    return 0;
}

/* ---- index ---- */

static bool is_for(const json_t *manifest, const char *arch)
{
    const json_t *platform = json_object_get(manifest, "platform");

    return !strcmp(text_of(platform, "os"), "linux") &&
           !strcmp(text_of(platform, "architecture"), arch);
}

static bool is_index(const json_t *manifest)
{
    const char *type = text_of(manifest, "mediaType");

    return !strcmp(type, "application/vnd.oci.image.index.v1+json") ||
           !strcmp(type, "application/vnd.docker.distribution.manifest.list.v2+json");
}

int oci_parse_index(const char *text, size_t len, const char *arch, struct oci_blob *out,
                    bool *index, struct lh_error *err)
{
    auto_json top = load(text, len, "index.json", err);
    const json_t *list = json_object_get(top, "manifests"), *chosen = NULL;
    size_t n = json_array_size(list), fitting = 0;

    if (!top)
        return LH_INVALID_ARGUMENT;
    for (size_t i = 0; i < n; i++) {
        const json_t *m = json_array_get(list, i);
        if (n == 1 || is_for(m, arch)) {
            chosen = m;
            fitting++;
        }
    }
    if (fitting != 1)
        return lh_fail(err, LH_INVALID_ARGUMENT,
                       "the index has %zu images for linux/%s of %zu in all; one is needed: copy "
                       "one out, e.g. skopeo copy oci:DIR:TAG oci:OTHER",
                       fitting, arch, n);
    *index = is_index(chosen);
    return read_descriptor(chosen, out, err);
}

/* ---- manifest ---- */

void oci_layers_finish(struct oci_layers *l)
{
    free(l->items);
    *l = (struct oci_layers){0};
}

typedef int read_blob(const json_t *value, struct oci_blob *out, struct lh_error *err);

static int read_layers(const json_t *list, read_blob *read, struct oci_layers *out,
                       struct lh_error *err)
{
    size_t n = json_array_size(list);
    int r = 0;

    if (n < 1 || n > OCI_LAYERS_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "the image has %zu layers, not 1 to %d", n,
                       OCI_LAYERS_MAX);
    out->items = calloc(n, sizeof *out->items);
    if (!out->items)
        return lh_fail_errno(err, ENOMEM, "layers of an image");
    for (; r == 0 && out->n < n; out->n++)
        r = read(json_array_get(list, out->n), &out->items[out->n], err);
    return r;
}

/* Compression is told by the bytes; encrypted and foreign layers by their type. */
static int read_layer(const json_t *value, struct oci_blob *out, struct lh_error *err)
{
    const char *type = text_of(value, "mediaType");

    if (!strstr(type, ".tar") || strstr(type, "encrypted") || strstr(type, "foreign") ||
        strstr(type, "nondistributable"))
        return lh_fail(err, LH_INVALID_ARGUMENT, "a layer of type \"%.100s\" cannot be read", type);
    return read_descriptor(value, out, err);
}

int oci_parse_manifest(const char *text, size_t len, struct oci_layers *out, struct lh_error *err)
{
    auto_json top = load(text, len, "the image's manifest", err);
    int r = top ? read_descriptor(json_object_get(top, "config"), &out->config, err)
                : LH_INVALID_ARGUMENT;

    if (r == 0)
        r = read_layers(json_object_get(top, "layers"), read_layer, out, err);
    if (r < 0)
        oci_layers_finish(out);
    return r;
}

int oci_parse_docker(const char *text, size_t len, struct oci_layers *out, struct lh_error *err)
{
    auto_json top = load(text, len, "manifest.json", err);
    const json_t *image = json_array_get(top, 0);
    int r = top ? 0 : LH_INVALID_ARGUMENT;

    if (r == 0 && json_array_size(top) != 1)
        r = lh_fail(err, LH_INVALID_ARGUMENT, "the archive has %zu images, one is needed",
                    json_array_size(top));
    if (r == 0)
        r = read_member(json_object_get(image, "Config"), &out->config, err);
    if (r == 0)
        r = read_layers(json_object_get(image, "Layers"), read_member, out, err);
    if (r < 0)
        oci_layers_finish(out);
    return r;
}

/* ---- configuration ---- */

void oci_config_finish(struct oci_config *c)
{
    for (size_t i = 0; i < c->n_env; i++)
        free(c->env[i]);
    free(c->env);
    free(c->user);
    free(c->workdir);
    *c = (struct oci_config){0};
}

static int read_env(const json_t *list, struct oci_config *out, struct lh_error *err)
{
    size_t n = json_array_size(list);

    if (n > OCI_ENV_MAX)
        return lh_fail(err, LH_INVALID_ARGUMENT, "the image sets %zu variables, more than %d", n,
                       OCI_ENV_MAX);
    out->env = calloc(n + 1, sizeof *out->env);
    for (size_t i = 0; out->env && i < n; i++) {
        const char *text = json_string_value(json_array_get(list, i));
        if (!text || !strchr(text, '=') || *text == '=')
            return lh_fail(err, LH_INVALID_ARGUMENT, "\"%.100s\" is no NAME=value",
                           text ? text : "");
        if (!(out->env[out->n_env] = strdup(text)))
            return lh_fail_errno(err, ENOMEM, "configuration of an image");
        out->n_env++;
    }
    return out->env ? 0 : lh_fail_errno(err, ENOMEM, "configuration of an image");
}

int oci_parse_config(const char *text, size_t len, struct oci_config *out, struct lh_error *err)
{
    auto_json top = load(text, len, "the image's configuration", err);
    const json_t *config = json_object_get(top, "config");
    int r = top ? read_env(json_object_get(config, "Env"), out, err) : LH_INVALID_ARGUMENT;

    if (r == 0) {
        out->user = strdup(text_of(config, "User"));
        out->workdir = strdup(text_of(config, "WorkingDir"));
        if (!out->user || !out->workdir)
            r = lh_fail_errno(err, ENOMEM, "configuration of an image");
    }
    if (r < 0)
        oci_config_finish(out);
    return r;
}
