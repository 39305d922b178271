#include "proto/id.h"

#include <string.h>
#include <sys/random.h>
#include <time.h>

static const char alphabet[] = "0123456789ABCDEFGHJKMNPQRSTVWXYZ";

struct lh_id lh_id_new(void)
{
    struct lh_id id;
    struct timespec t;

    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t ms = (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
    for (int i = 0; i < 6; i++)
        id.bytes[i] = (uint8_t)(ms >> (40 - 8 * i));
    /* Ten bytes come at once or not at all; before the pool is ready the call blocks. */
    while (getrandom(id.bytes + 6, 10, 0) != 10)
        ;
    return id;
}

/* 130 bits in 26 digits: the first digit carries only three. */
void lh_id_print(const struct lh_id *id, char text[LH_ID_SIZE])
{
    for (int i = 0; i < LH_ID_TEXT; i++) {
        int bit = i * 5 - 2, v = 0;
        for (int k = 0; k < 5; k++) {
            int b = bit + k;
            int on = b < 0 ? 0 : id->bytes[b / 8] >> (7 - b % 8) & 1;
            v = v << 1 | on;
        }
        text[i] = alphabet[v];
    }
    text[LH_ID_TEXT] = 0;
}

bool lh_id_parse(const char *text, struct lh_id *id)
{
    memset(id, 0, sizeof *id);
    for (int i = 0; i < LH_ID_TEXT; i++) {
        const char *at = text[i] ? strchr(alphabet, text[i]) : NULL;
        if (!at)
            return false;
        int v = (int)(at - alphabet);
        for (int k = 0; k < 5; k++) {
            int b = i * 5 - 2 + k;
            if (!(v >> (4 - k) & 1))
                continue;
            if (b < 0)
                return false;
            id->bytes[b / 8] |= (uint8_t)(1u << (7 - b % 8));
        }
    }
    return text[LH_ID_TEXT] == 0;
}

void lh_id_new_text(char text[LH_ID_SIZE])
{
    struct lh_id id = lh_id_new();

    lh_id_print(&id, text);
}

bool lh_id_text_valid(const char *text)
{
    struct lh_id id;

    return text && lh_id_parse(text, &id);
}
