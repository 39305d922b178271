#include "trainer/policy.h"

size_t policy_encode(const char *text, size_t len, int32_t *to)
{
    for (size_t i = 0; i < len; i++)
        to[i] = TOKEN_SPECIALS + (unsigned char)text[i];
    return len;
}

size_t policy_decode(const int32_t *tokens, size_t n, char *to)
{
    size_t len = 0;

    for (size_t i = 0; i < n; i++)
        if (tokens[i] >= TOKEN_SPECIALS && tokens[i] < POLICY_BYTE_VOCAB)
            to[len++] = (char)(tokens[i] - TOKEN_SPECIALS);
    return len;
}
