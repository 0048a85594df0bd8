#include "dropout.h"

/* Mixes all bits of a word with each other (the end of MurmurHash3). */
static uint32_t mix(uint32_t h)
{
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    h ^= h >> 16;
    return h;
}

void dropout_mask(uint8_t *restrict mask, int n, float keep, uint32_t seed, uint32_t step, uint32_t number)
{
    const uint32_t stream = mix(mix(mix(seed + 0x9e3779b9u) ^ step) ^ (number * 0x9e3779b9u));
    /* 24 bits: as many as a float holds exactly. */
    const uint32_t limit = (uint32_t)(keep * 16777216.0f);
    for (int i = 0; i < n; i++) {
        mask[i] = (mix(stream + (uint32_t)i * 0x9e3779b9u) >> 8) < limit ? 1 : 0;
    }
}

void dropout_apply(float *y, const float *x, const uint8_t *mask, int n, float keep)
{
    const float scale = 1.0f / keep;
    for (int i = 0; i < n; i++) {
        y[i] = mask[i] != 0 ? x[i] * scale : 0.0f;
    }
}
