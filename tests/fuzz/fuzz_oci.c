/* Any bytes as each of the JSON texts of a container image: refused, or read into names that stay
 * below the image. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "agentenv/task/oci_json.h"
#include "proto/cleanup.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_name(const struct oci_blob *b)
{
    if (!*b->name || *b->name == '/' || strstr(b->name, "..") || strlen(b->name) >= OCI_NAME)
        abort();
}

static void check_layers(struct oci_layers *l)
{
    check_name(&l->config);
    for (size_t i = 0; i < l->n; i++)
        check_name(&l->items[i]);
    oci_layers_finish(l);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    struct oci_layers layers = {0};
    struct oci_config config = {0};
    struct oci_blob blob;
    bool index;

    if (oci_parse_index(text, size, "amd64", &blob, &index, NULL) == 0)
        check_name(&blob);
    if (oci_parse_manifest(text, size, &layers, NULL) == 0)
        check_layers(&layers);
    if (oci_parse_docker(text, size, &layers, NULL) == 0)
        check_layers(&layers);
    if (oci_parse_config(text, size, &config, NULL) == 0)
        oci_config_finish(&config);
    return 0;
}
