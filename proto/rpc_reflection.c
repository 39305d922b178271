/* grpc.reflection.v1alpha.ServerReflection: lists the services of a server and hands out the
 * descriptors that the build has embedded.
 *
 * The set is walked as bytes: what is answered are the bytes of a file's descriptor, so that
 * unpacking it would only mean packing it again.  It is our own; still every length is checked. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "grpc/reflection/v1alpha/reflection.pb-c.h"
#include "proto/rpc_core.h"

#define R(name) Grpc__Reflection__V1alpha__##name

enum { MAX_FILES = 32, LENGTH_DELIMITED = 2 };

/* Field numbers of google.protobuf.FileDescriptorSet, FileDescriptorProto and what is in it. */
enum { SET_FILE = 1, NAME = 1, PACKAGE = 2, DEPENDENCY = 3, MESSAGE = 4, ENUM = 5, SERVICE = 6 };

struct bytes {
    const unsigned char *at;
    size_t len;
};

static bool varint(struct bytes *b, uint64_t *v)
{
    *v = 0;
    for (unsigned shift = 0; b->len > 0 && shift < 64; shift += 7) {
        unsigned char c = *b->at++;
        b->len--;
        *v |= (uint64_t)(c & 127) << shift;
        if (c < 128)
            return true;
    }
    return false;
}

/* The next field that has a length, others passed over; false at the end. */
static bool next_field(struct bytes *b, unsigned *number, struct bytes *value)
{
    uint64_t tag, v;

    while (b->len > 0 && varint(b, &tag) && varint(b, &v)) { /* no fixed-size fields in these */
        if ((tag & 7) != LENGTH_DELIMITED)
            continue;
        if (v > b->len)
            return false;
        *number = (unsigned)(tag >> 3);
        *value = (struct bytes){b->at, (size_t)v};
        b->at += v;
        b->len -= (size_t)v;
        return true;
    }
    return false;
}

static bool first(struct bytes in, unsigned wanted, struct bytes *value)
{
    unsigned number;

    while (next_field(&in, &number, value))
        if (number == wanted)
            return true;
    return false;
}

static bool equal(struct bytes a, const char *text, size_t len)
{
    return a.len == len && !memcmp(a.at, text, len);
}

static bool next_file(struct bytes *set, struct bytes *file)
{
    unsigned number;

    while (next_field(set, &number, file))
        if (number == SET_FILE)
            return true;
    return false;
}

static struct bytes all(void)
{
    return (struct bytes){rpc_descriptors, rpc_descriptors_size};
}

static bool file_named(const char *name, size_t len, struct bytes *file)
{
    struct bytes set = all(), n;

    while (next_file(&set, file))
        if (first(*file, NAME, &n) && equal(n, name, len))
            return true;
    return false;
}

/* "package.Name" at the file's top level. */
static bool defines(struct bytes file, const char *symbol, size_t len)
{
    struct bytes package = {0}, entry, name;
    unsigned number;

    first(file, PACKAGE, &package);
    if (len <= package.len + 1 || memcmp(symbol, package.at, package.len) ||
        symbol[package.len] != '.')
        return false;
    while (next_field(&file, &number, &entry))
        if (number >= MESSAGE && number <= SERVICE && first(entry, NAME, &name) &&
            equal(name, symbol + package.len + 1, len - package.len - 1))
            return true;
    return false;
}

/* What is nested in something is where that is. */
static bool file_of_symbol(const char *symbol, struct bytes *file)
{
    for (size_t len = strlen(symbol); len > 0;) {
        for (struct bytes set = all(); next_file(&set, file);)
            if (defines(*file, symbol, len))
                return true;
        while (len > 0 && symbol[--len] != '.')
            ;
    }
    return false;
}

/* ---- answers ---- */

struct files {
    ProtobufCBinaryData list[MAX_FILES];
    size_t n;
};

/* With what it imports: a client needs no second question. */
static void add_file(struct files *f, struct bytes file)
{
    struct bytes in = file, name, imported;
    unsigned number;

    for (size_t i = 0; i < f->n; i++)
        if (f->list[i].data == file.at)
            return;
    if (f->n == MAX_FILES)
        return;
    f->list[f->n++] = (ProtobufCBinaryData){file.len, (uint8_t *)file.at};
    while (next_field(&in, &number, &name))
        if (number == DEPENDENCY && file_named((const char *)name.at, name.len, &imported))
            add_file(f, imported);
}

static int answer_file(struct rpc_call *c, R(ServerReflectionResponse) * out, bool found,
                       struct bytes file, const char *what, struct lh_error *err)
{
    R(FileDescriptorResponse) files = GRPC__REFLECTION__V1ALPHA__FILE_DESCRIPTOR_RESPONSE__INIT;
    R(ErrorResponse) error = GRPC__REFLECTION__V1ALPHA__ERROR_RESPONSE__INIT;
    struct files f = {.n = 0};

    if (found) {
        add_file(&f, file);
        files.file_descriptor_proto = f.list;
        files.n_file_descriptor_proto = f.n;
        out->message_response_case =
            GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_FILE_DESCRIPTOR_RESPONSE;
        out->file_descriptor_response = &files;
    } else {
        error.error_code = -LH_NOT_FOUND;
        error.error_message = (char *)what;
        out->message_response_case =
            GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_ERROR_RESPONSE;
        out->error_response = &error;
    }
    return rpc_send(c, &out->base, err);
}

static int answer_services(struct rpc_call *c, R(ServerReflectionResponse) * out,
                           struct lh_error *err)
{
    R(ListServiceResponse) list = GRPC__REFLECTION__V1ALPHA__LIST_SERVICE_RESPONSE__INIT;
    size_t n = c->server->n_services;
    lh_autofree R(ServiceResponse) *names = calloc(n, sizeof *names);
    lh_autofree R(ServiceResponse) **pointers = calloc(n, sizeof *pointers);

    if (!names || !pointers)
        return lh_fail_errno(err, ENOMEM, "reflection");
    for (size_t i = 0; i < n; i++) {
        grpc__reflection__v1alpha__service_response__init(&names[i]);
        names[i].name = (char *)c->server->services[i].descriptor->name;
        pointers[i] = &names[i];
    }
    list.service = pointers;
    list.n_service = n;
    out->message_response_case =
        GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_LIST_SERVICES_RESPONSE;
    out->list_services_response = &list;
    return rpc_send(c, &out->base, err);
}

static int answer(struct rpc_call *c, const R(ServerReflectionRequest) * q, struct lh_error *err)
{
    R(ServerReflectionResponse) out = GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__INIT;
    struct bytes file = {0};

    out.valid_host = q->host;
    out.original_request = (R(ServerReflectionRequest) *)q;
    switch (q->message_request_case) {
    case GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_LIST_SERVICES:
        return answer_services(c, &out, err);
    case GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_BY_FILENAME:
        return answer_file(c, &out,
                           file_named(q->file_by_filename, strlen(q->file_by_filename), &file),
                           file, "no such file", err);
    case GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_FILE_CONTAINING_SYMBOL:
        return answer_file(c, &out, file_of_symbol(q->file_containing_symbol, &file), file,
                           "no such symbol", err);
    default:
        return answer_file(c, &out, false, file, "there are no extensions", err);
    }
}

static int reflect(void *ctx, struct rpc_call *call, const ProtobufCMessage *request,
                   struct lh_error *err)
{
    int r = answer(call, (const void *)request, err);

    while (r == 0) {
        lh_automsg(ProtobufCMessage) next = NULL;
        int got = rpc_receive(call, &next, err);
        if (got <= 0)
            return got;
        r = answer(call, (const void *)next, err);
    }
    return r;
}

const struct rpc_service rpc_reflection = {
    &grpc__reflection__v1alpha__server_reflection__descriptor,
    (const struct rpc_method[]){{"ServerReflectionInfo", NULL, reflect}, {0}},
    NULL,
};
