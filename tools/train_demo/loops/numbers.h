// Elements, the exponential, and the number formats of the released caches.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

namespace {

struct bf16 {
    uint16_t bits;
};

inline float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float load(const float& x) { return x; }
inline float load(const bf16& x) { return bits_to_float(uint32_t(x.bits) << 16); }
inline void store(float& to, float x) { to = x; }
inline void store(bf16& to, float x) {
    uint32_t bits = float_to_bits(x);
    to.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <typename T> inline float rounded(float x);
template <> inline float rounded<float>(float x) { return x; }
template <> inline float rounded<bf16>(float x) {
    uint32_t bits = float_to_bits(x);
    return bits_to_float((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

// Exponential that the compiler can run on many lanes: 2^n times a polynomial on [-ln2/2, ln2/2].
inline float fast_exp(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * bits_to_float(uint32_t(int32_t(n) + 127) << 23);
}

// Number formats.

inline float power_of_two_at_least(float x) {
    return bits_to_float((float_to_bits(x) + 0x7fffffu) & 0x7f800000u);
}

inline float to_e4m3(float x) {
    uint32_t bits = float_to_bits(x);
    float normal = bits_to_float((bits + 0x7ffffu + ((bits >> 20) & 1)) & 0xfff00000u);
    const float magic = 24576.0f;  // 1.5 * 2^14: the sum has steps of 2^-9
    float small = (x + magic) - magic;
    float value = std::fabs(x) < 0.015625f ? small : normal;
    return std::min(std::max(value, -448.0f), 448.0f);
}

inline float to_e2m1(float x) {
    float size = std::fabs(x);
    const float half = 6291456.0f, one = 12582912.0f, two = 25165824.0f;
    float a = (x + half) - half, b = (x + one) - one, c = (x + two) - two;
    float value = size < 2.0f ? a : (size < 4.0f ? b : c);
    return std::min(std::max(value, -6.0f), 6.0f);
}

enum Format { ACTIVATION = 0, COMPRESSED_KEY = 1, INDEX_OPERAND = 2 };

inline int group_of(int format) { return format == COMPRESSED_KEY ? 16 : 32; }

inline void quantize_group(const float* in, float* out, int width, int format) {
    float amax = 0.0f;
    for (int i = 0; i < width; i++) amax = std::max(amax, std::fabs(in[i]));
    if (format == ACTIVATION) {
        float scale = power_of_two_at_least(std::max(amax, 1e-4f) * (1.0f / 448.0f));
        float inverse = 1.0f / scale;
        for (int i = 0; i < width; i++) out[i] = to_e4m3(in[i] * inverse) * scale;
    } else if (format == COMPRESSED_KEY) {
        float scale = to_e4m3(std::min(std::max(amax, 6.0f / 512.0f) * (1.0f / 6.0f), 448.0f));
        float inverse = 1.0f / scale;
        for (int i = 0; i < width; i++) out[i] = to_e2m1(in[i] * inverse) * scale;
    } else {
        float scale = power_of_two_at_least(std::max(amax, 7.0e-38f) * (1.0f / 6.0f));
        float inverse = 1.0f / scale;
        for (int i = 0; i < width; i++) out[i] = to_e2m1(in[i] * inverse) * scale;
    }
}

template <typename T> void quantize_rows(const T* in, T* out, int64_t groups, int format) {
    int width = group_of(format);
#pragma omp parallel for schedule(static)
    for (int64_t g = 0; g < groups; g++) {
        float x[32], y[32];
        for (int i = 0; i < width; i++) x[i] = load(in[g * width + i]);
        quantize_group(x, y, width, format);
        for (int i = 0; i < width; i++) store(out[g * width + i], y[i]);
    }
}

}  // namespace
