// Fused loops of the training network, forward and backward, over bf16 or fp32 tensors.
//
// Plain C functions on raw pointers: every array is contiguous, every result is written into
// memory that the caller made. Sums run in a fixed order for a fixed number of threads.

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

// Hyper-connection coefficients, 16 tokens side by side.

constexpr int M = 4, MIX = 24, LANES = 16, MAX_STEPS = 64;
using Matrix = float[16][LANES];

struct Steps {
    Matrix state[2 * MAX_STEPS];
    float inverse[2 * MAX_STEPS][M][LANES];
    Matrix softmax;
};

void normalize(const Matrix& x, Matrix& y, float inverse[M][LANES], bool columns, float eps) {
    for (int group = 0; group < M; group++) {
        for (int l = 0; l < LANES; l++) {
            float total = 0.0f;
            for (int k = 0; k < M; k++) total += x[columns ? k * M + group : group * M + k][l];
            inverse[group][l] = 1.0f / (total + eps);
        }
    }
    for (int e = 0; e < 16; e++) {
        const float* by = inverse[columns ? e % M : e / M];
        for (int l = 0; l < LANES; l++) y[e][l] = x[e][l] * by[l];
    }
}

void normalize_backward(const Matrix& y, const float inverse[M][LANES], Matrix& g, bool columns) {
    float dot[M][LANES] = {};
    for (int e = 0; e < 16; e++) {
        float* d = dot[columns ? e % M : e / M];
        for (int l = 0; l < LANES; l++) d[l] += g[e][l] * y[e][l];
    }
    for (int e = 0; e < 16; e++) {
        int group = columns ? e % M : e / M;
        for (int l = 0; l < LANES; l++) g[e][l] = (g[e][l] - dot[group][l]) * inverse[group][l];
    }
}

void sinkhorn(const Matrix& z, Steps& s, int iterations, float eps) {
    Matrix x;
    for (int r = 0; r < M; r++) {
        for (int l = 0; l < LANES; l++) {
            float top = z[r * M][l];
            for (int k = 1; k < M; k++) top = std::max(top, z[r * M + k][l]);
            float total = 0.0f;
            for (int k = 0; k < M; k++) {
                float value = fast_exp(z[r * M + k][l] - top);
                s.softmax[r * M + k][l] = value;
                total += value;
            }
            for (int k = 0; k < M; k++) s.softmax[r * M + k][l] /= total;
        }
    }
    for (int e = 0; e < 16; e++)
        for (int l = 0; l < LANES; l++) x[e][l] = s.softmax[e][l] + eps;
    normalize(x, s.state[0], s.inverse[0], true, eps);
    int at = 0;
    for (int i = 1; i < iterations; i++, at += 2) {
        normalize(s.state[at], s.state[at + 1], s.inverse[at + 1], false, eps);
        normalize(s.state[at + 1], s.state[at + 2], s.inverse[at + 2], true, eps);
    }
}

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

struct MixInput {
    float z[MIX][LANES];
};

template <typename T>
void mix_input(const T* projected, const float* inverse, const float* scale, const float* base,
               int64_t start, int count, MixInput& in) {
    for (int e = 0; e < MIX; e++)
        for (int l = 0; l < LANES; l++) in.z[e][l] = 0.0f;
    for (int l = 0; l < count; l++)
        for (int e = 0; e < MIX; e++) {
            float factor = scale[e < M ? 0 : (e < 2 * M ? 1 : 2)];
            float p = load(projected[(start + l) * MIX + e]) * inverse[start + l];
            in.z[e][l] = p * factor + base[e];
        }
}

template <typename T>
void mix_forward(const T* projected, const float* inverse, const float* scale, const float* base,
                 float* out, int64_t tokens, int iterations, float eps) {
#pragma omp parallel
    {
        std::vector<Steps> room(1);
        Steps& steps = room[0];
#pragma omp for schedule(static)
        for (int64_t start = 0; start < tokens; start += LANES) {
            int count = int(std::min<int64_t>(LANES, tokens - start));
            MixInput in;
            mix_input(projected, inverse, scale, base, start, count, in);
            Matrix z;
            std::memcpy(z, in.z[2 * M], sizeof(Matrix));
            sinkhorn(z, steps, iterations, eps);
            const Matrix& comb = steps.state[2 * (iterations - 1)];
            for (int l = 0; l < count; l++) {
                float* row = out + (start + l) * MIX;
                for (int e = 0; e < M; e++) row[e] = sigmoid(in.z[e][l]) + eps;
                for (int e = M; e < 2 * M; e++) row[e] = 2.0f * sigmoid(in.z[e][l]);
                for (int e = 0; e < 16; e++) row[2 * M + e] = comb[e][l];
            }
        }
    }
}

template <typename T>
void mix_backward(const T* projected, const float* inverse, const float* scale, const float* base,
                  const float* grad, T* grad_projected, float* grad_inverse, float* grad_scale,
                  float* grad_base, int64_t tokens, int iterations, float eps) {
    int threads = omp_get_max_threads();
    std::vector<double> sums(size_t(threads) * (MIX + 3), 0.0);
#pragma omp parallel num_threads(threads)
    {
        std::vector<Steps> room(1);
        Steps& steps = room[0];
        double* mine = sums.data() + size_t(omp_get_thread_num()) * (MIX + 3);
#pragma omp for schedule(static)
        for (int64_t start = 0; start < tokens; start += LANES) {
            int count = int(std::min<int64_t>(LANES, tokens - start));
            MixInput in;
            mix_input(projected, inverse, scale, base, start, count, in);
            Matrix z, g;
            std::memcpy(z, in.z[2 * M], sizeof(Matrix));
            sinkhorn(z, steps, iterations, eps);
            float gz[MIX][LANES] = {};
            for (int e = 0; e < 16; e++)
                for (int l = 0; l < LANES; l++)
                    g[e][l] = l < count ? grad[(start + l) * MIX + 2 * M + e] : 0.0f;
            for (int at = 2 * (iterations - 1); at >= 0; at--)
                normalize_backward(steps.state[at], steps.inverse[at], g, at % 2 == 0);
            for (int r = 0; r < M; r++)
                for (int l = 0; l < LANES; l++) {
                    float dot = 0.0f;
                    for (int k = 0; k < M; k++) dot += g[r * M + k][l] * steps.softmax[r * M + k][l];
                    for (int k = 0; k < M; k++)
                        gz[2 * M + r * M + k][l] =
                            steps.softmax[r * M + k][l] * (g[r * M + k][l] - dot);
                }
            for (int l = 0; l < count; l++) {
                int64_t t = start + l;
                for (int e = 0; e < 2 * M; e++) {
                    float s = sigmoid(in.z[e][l]);
                    gz[e][l] = grad[t * MIX + e] * s * (1.0f - s) * (e < M ? 1.0f : 2.0f);
                }
                float total = 0.0f;
                for (int e = 0; e < MIX; e++) {
                    int part = e < M ? 0 : (e < 2 * M ? 1 : 2);
                    float p = load(projected[t * MIX + e]);
                    float scaled = gz[e][l] * scale[part];
                    store(grad_projected[t * MIX + e], scaled * inverse[t]);
                    total += scaled * p;
                    mine[e] += gz[e][l];
                    mine[MIX + part] += gz[e][l] * p * inverse[t];
                }
                grad_inverse[t] = total;
            }
        }
    }
    for (int e = 0; e < MIX + 3; e++) {
        double total = 0.0;
        for (int thread = 0; thread < threads; thread++) total += sums[size_t(thread) * (MIX + 3) + e];
        (e < MIX ? grad_base[e] : grad_scale[e - MIX]) = float(total);
    }
}

// Collapse of the streams and the norm behind it.

template <typename T>
void collapse_forward(const T* trunk, const float* mix, const float* weight, T* normed,
                      float* inverse_flat, float* inverse_norm, int64_t tokens, int width,
                      float eps) {
#pragma omp parallel
    {
        std::vector<float> x(width);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            const T* row = trunk + t * M * width;
            const float* pre = mix + t * MIX;
            float flat = 0.0f, square = 0.0f;
#pragma omp simd reduction(+ : flat, square)
            for (int d = 0; d < width; d++) {
                float total = 0.0f;
                for (int m = 0; m < M; m++) {
                    float value = load(row[m * width + d]);
                    total += pre[m] * value;
                    flat += value * value;
                }
                total = rounded<T>(total);
                x[d] = total;
                square += total * total;
            }
            float inverse = 1.0f / std::sqrt(square / width + eps);
            inverse_flat[t] = 1.0f / std::sqrt(flat / (M * width) + eps);
            inverse_norm[t] = inverse;
#pragma omp simd
            for (int d = 0; d < width; d++) store(normed[t * width + d], x[d] * inverse * weight[d]);
        }
    }
}

template <typename T>
void collapse_backward(const T* trunk, const float* mix, const float* weight,
                       const float* inverse_flat, const float* inverse_norm, const T* grad,
                       const float* grad_flat, T* grad_trunk, float* grad_mix, float* grad_weight,
                       int64_t tokens, int width) {
    int threads = omp_get_max_threads();
    std::vector<float> sums(size_t(threads) * width, 0.0f);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> xhat(width), gx(width);
        float* mine = sums.data() + size_t(omp_get_thread_num()) * width;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            const T* row = trunk + t * M * width;
            const float* pre = mix + t * MIX;
            float inverse = inverse_norm[t], dot = 0.0f;
#pragma omp simd reduction(+ : dot)
            for (int d = 0; d < width; d++) {
                float total = 0.0f;
                for (int m = 0; m < M; m++) total += pre[m] * load(row[m * width + d]);
                float hat = rounded<T>(total) * inverse;
                float g = load(grad[t * width + d]);
                xhat[d] = hat;
                mine[d] += g * hat;
                gx[d] = g * weight[d];
                dot += gx[d] * hat;
            }
            float mean = dot / width;
            float flat = inverse_flat[t];
            float by_flat = -grad_flat[t] * flat * flat * flat / (M * width);
#pragma omp simd
            for (int d = 0; d < width; d++) gx[d] = (gx[d] - xhat[d] * mean) * inverse;
            for (int m = 0; m < M; m++) {
                float total = 0.0f;
                const T* stream = row + m * width;
                T* out = grad_trunk + (t * M + m) * width;
#pragma omp simd reduction(+ : total)
                for (int d = 0; d < width; d++) {
                    float value = load(stream[d]);
                    total += gx[d] * value;
                    store(out[d], pre[m] * gx[d] + by_flat * value);
                }
                grad_mix[t * MIX + m] = total;
            }
            for (int e = M; e < MIX; e++) grad_mix[t * MIX + e] = 0.0f;
        }
    }
    for (int d = 0; d < width; d++) {
        float total = 0.0f;
        for (int thread = 0; thread < threads; thread++) total += sums[size_t(thread) * width + d];
        grad_weight[d] = total;
    }
}

// Expansion: new[j] = post[j] * out + sum_i comb[i, j] * trunk[i].

template <typename T>
void expand_forward(const T* out, const T* trunk, const float* mix, T* result, int64_t tokens,
                    int width) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        const float* post = mix + t * MIX + M;
        const float* comb = mix + t * MIX + 2 * M;
        const T* o = out + t * width;
        const T* row = trunk + t * M * width;
        T* to = result + t * M * width;
#pragma omp simd
        for (int d = 0; d < width; d++) {
            float x0 = load(row[d]), x1 = load(row[width + d]);
            float x2 = load(row[2 * width + d]), x3 = load(row[3 * width + d]), y = load(o[d]);
            for (int j = 0; j < M; j++)
                store(to[j * width + d], post[j] * y + comb[j] * x0 + comb[4 + j] * x1 +
                                             comb[8 + j] * x2 + comb[12 + j] * x3);
        }
    }
}

template <typename T>
void expand_backward(const T* out, const T* trunk, const float* mix, const T* grad, T* grad_out,
                     T* grad_trunk, float* grad_mix, int64_t tokens, int width) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        const float* post = mix + t * MIX + M;
        const float* comb = mix + t * MIX + 2 * M;
        const T* o = out + t * width;
        const T* row = trunk + t * M * width;
        const T* g = grad + t * M * width;
        float* gm = grad_mix + t * MIX;
        for (int m = 0; m < M; m++) gm[m] = 0.0f;
#pragma omp simd
        for (int d = 0; d < width; d++) {
            float g0 = load(g[d]), g1 = load(g[width + d]);
            float g2 = load(g[2 * width + d]), g3 = load(g[3 * width + d]);
            store(grad_out[t * width + d],
                  post[0] * g0 + post[1] * g1 + post[2] * g2 + post[3] * g3);
            for (int i = 0; i < M; i++)
                store(grad_trunk[(t * M + i) * width + d],
                      comb[4 * i] * g0 + comb[4 * i + 1] * g1 + comb[4 * i + 2] * g2 +
                          comb[4 * i + 3] * g3);
        }
        for (int j = 0; j < M; j++) {
            float p = 0, c0 = 0, c1 = 0, c2 = 0, c3 = 0;
            const T* gj = g + j * width;
#pragma omp simd reduction(+ : p, c0, c1, c2, c3)
            for (int d = 0; d < width; d++) {
                float value = load(gj[d]);
                p += value * load(o[d]);
                c0 += value * load(row[d]);
                c1 += value * load(row[width + d]);
                c2 += value * load(row[2 * width + d]);
                c3 += value * load(row[3 * width + d]);
            }
            gm[M + j] = p;
            gm[2 * M + j] = c0;
            gm[2 * M + 4 + j] = c1;
            gm[2 * M + 8 + j] = c2;
            gm[2 * M + 12 + j] = c3;
        }
    }
}

// Norm of plain rows.

template <typename T>
void norm_forward(const T* x, const float* weight, T* y, float* inverse, int64_t rows, int width,
                  float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        float square = 0.0f;
        const T* row = x + r * width;
#pragma omp simd reduction(+ : square)
        for (int d = 0; d < width; d++) square += load(row[d]) * load(row[d]);
        float scale = 1.0f / std::sqrt(square / width + eps);
        inverse[r] = scale;
#pragma omp simd
        for (int d = 0; d < width; d++) store(y[r * width + d], load(row[d]) * scale * weight[d]);
    }
}

template <typename T>
void norm_backward(const T* x, const float* weight, const float* inverse, const T* grad, T* gx,
                   float* grad_weight, int64_t rows, int width) {
    int threads = omp_get_max_threads();
    std::vector<float> sums(size_t(threads) * width, 0.0f);
#pragma omp parallel num_threads(threads)
    {
        float* mine = sums.data() + size_t(omp_get_thread_num()) * width;
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const T* row = x + r * width;
            const T* g = grad + r * width;
            float scale = inverse[r], dot = 0.0f;
#pragma omp simd reduction(+ : dot)
            for (int d = 0; d < width; d++) {
                float hat = load(row[d]) * scale, value = load(g[d]);
                mine[d] += value * hat;
                dot += value * weight[d] * hat;
            }
            float mean = dot / width;
#pragma omp simd
            for (int d = 0; d < width; d++) {
                float hat = load(row[d]) * scale;
                store(gx[r * width + d], (load(g[d]) * weight[d] - hat * mean) * scale);
            }
        }
    }
    for (int d = 0; d < width; d++) {
        float total = 0.0f;
        for (int thread = 0; thread < threads; thread++) total += sums[size_t(thread) * width + d];
        grad_weight[d] = total;
    }
}

// Rotary embedding of the last `rotary` channels; row r has angle row (r / heads) % positions.

template <typename T>
void rope(const T* x, const float* cosine, const float* sine, T* y, int64_t rows, int heads,
          int positions, int width, int rotary, float direction) {
    int still = width - rotary, half = rotary / 2;
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        int64_t p = (r / heads) % positions;
        const T* in = x + r * width;
        T* out = y + r * width;
        std::memcpy(out, in, size_t(still) * sizeof(T));
        for (int k = 0; k < half; k++) {
            float a = load(in[still + 2 * k]), b = load(in[still + 2 * k + 1]);
            float c = cosine[p * half + k], s = direction * sine[p * half + k];
            store(out[still + 2 * k], a * c - b * s);
            store(out[still + 2 * k + 1], a * s + b * c);
        }
    }
}

// SwiGLU with clamps and a factor per row; the input holds gate and up side by side.

template <typename T>
void swiglu_forward(const T* h, const float* share, T* y, int64_t rows, int width, float limit,
                    int quantize) {
#pragma omp parallel
    {
        std::vector<float> product(width);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            const T* row = h + r * 2 * width;
            float factor = share[r];
#pragma omp simd
            for (int d = 0; d < width; d++) {
                float gate = std::min(load(row[d]), limit);
                float up = std::min(std::max(load(row[width + d]), -limit), limit);
                product[d] = gate / (1.0f + fast_exp(-gate)) * up * factor;
            }
            if (quantize)
                for (int g = 0; g < width; g += 32)
                    quantize_group(&product[g], &product[g], 32, ACTIVATION);
            for (int d = 0; d < width; d++) store(y[r * width + d], product[d]);
        }
    }
}

template <typename T>
void swiglu_backward(const T* h, const float* share, const T* grad, T* grad_h, float* grad_share,
                     int64_t rows, int width, float limit) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const T* row = h + r * 2 * width;
        const T* g = grad + r * width;
        float factor = share[r], total = 0.0f;
#pragma omp simd reduction(+ : total)
        for (int d = 0; d < width; d++) {
            float raw_gate = load(row[d]), raw_up = load(row[width + d]), value = load(g[d]);
            float gate = std::min(raw_gate, limit);
            float up = std::min(std::max(raw_up, -limit), limit);
            float s = 1.0f / (1.0f + fast_exp(-gate));
            float act = gate * s;
            total += value * act * up;
            float by_gate = value * factor * up * s * (1.0f + gate * (1.0f - s));
            store(grad_h[r * 2 * width + d], raw_gate > limit ? 0.0f : by_gate);
            store(grad_h[r * 2 * width + width + d],
                  std::fabs(raw_up) > limit ? 0.0f : value * factor * act);
        }
        grad_share[r] = total;
    }
}

constexpr float HIDDEN = -1e30f;

// Softmax with a sink. Rows are (batch, query, head); the first columns are window keys.

struct Block {
    int64_t batch;
    int queries, heads, near, far;
    int first_query, first_near, window;
    int far_stride_row;
    int64_t far_stride_batch;
};

template <typename T>
void softmax_forward(T* logits, const uint8_t* far_mask, const float* sink, float scale,
                     float* rest, const Block& b) {
    int keys = b.near + b.far;
    int64_t rows = b.batch * b.queries;
#pragma omp parallel
    {
        std::vector<float> x(keys);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            int query = int(row % b.queries), position = b.first_query + query;
            int low = std::max(position - b.window + 1 - b.first_near, 0);
            int high = std::min(position - b.first_near + 1, b.near);
            const uint8_t* mask =
                b.far ? far_mask + (row / b.queries) * b.far_stride_batch +
                            int64_t(query) * b.far_stride_row
                      : nullptr;
            for (int h = 0; h < b.heads; h++) {
                T* p = logits + (row * b.heads + h) * keys;
                float top = sink[h];
                for (int k = 0; k < b.near; k++)
                    x[k] = k >= low && k < high ? load(p[k]) * scale : HIDDEN;
                for (int k = 0; k < b.far; k++)
                    x[b.near + k] = mask[k] ? load(p[b.near + k]) * scale : HIDDEN;
#pragma omp simd reduction(max : top)
                for (int k = 0; k < keys; k++) top = std::max(top, x[k]);
                float total = 0.0f;
#pragma omp simd reduction(+ : total)
                for (int k = 0; k < keys; k++) {
                    x[k] = x[k] == HIDDEN ? 0.0f : fast_exp(x[k] - top);
                    total += x[k];
                }
                float sunk = fast_exp(sink[h] - top);
                float inverse = 1.0f / (total + sunk);
#pragma omp simd
                for (int k = 0; k < keys; k++) store(p[k], x[k] * inverse);
                rest[row * b.heads + h] = sunk * inverse;
            }
        }
    }
}

template <typename T>
void softmax_backward(const T* probability, T* grad, const float* rest, float scale,
                      float* grad_sink, const Block& b) {
    int keys = b.near + b.far;
    int64_t rows = b.batch * b.queries;
    int threads = omp_get_max_threads();
    std::vector<double> sums(size_t(threads) * b.heads, 0.0);
#pragma omp parallel num_threads(threads)
    {
        double* mine = sums.data() + size_t(omp_get_thread_num()) * b.heads;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            for (int h = 0; h < b.heads; h++) {
                const T* p = probability + (row * b.heads + h) * keys;
                T* g = grad + (row * b.heads + h) * keys;
                float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
                for (int k = 0; k < keys; k++) dot += load(p[k]) * load(g[k]);
                mine[h] -= rest[row * b.heads + h] * dot;
#pragma omp simd
                for (int k = 0; k < keys; k++) store(g[k], load(p[k]) * (load(g[k]) - dot) * scale);
            }
    }
    for (int h = 0; h < b.heads; h++)
        for (int thread = 0; thread < threads; thread++)
            grad_sink[h] += float(sums[size_t(thread) * b.heads + h]);
}

// Engram: out[m] = trunk[m] + gate[m] * value; the keys and the value lie side by side in kv.

constexpr float GATE_FLOOR = 1e-6f;

struct Gate {
    float inverse_trunk, inverse_key, product, dot, gate;
};

template <typename T>
Gate gate_of(const T* x, const T* key, const float* weight, int width, float eps) {
    float xx = 0.0f, kk = 0.0f, s = 0.0f;
#pragma omp simd reduction(+ : xx, kk, s)
    for (int d = 0; d < width; d++) {
        float a = load(x[d]), b = load(key[d]);
        xx += a * a;
        kk += b * b;
        s += a * weight[d] * b;
    }
    Gate g;
    g.inverse_trunk = 1.0f / std::sqrt(xx / width + eps);
    g.inverse_key = 1.0f / std::sqrt(kk / width + eps);
    g.product = s;
    g.dot = s * g.inverse_trunk * g.inverse_key / std::sqrt(float(width));
    g.gate = sigmoid(std::copysign(std::sqrt(std::max(std::fabs(g.dot), GATE_FLOOR)), g.dot));
    return g;
}

template <typename T>
void engram_forward(const T* trunk, const T* kv, const float* weight, T* out, int64_t tokens,
                    int width, float eps) {
#pragma omp parallel for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
        const T* value = kv + (t * (M + 1) + M) * width;
        for (int m = 0; m < M; m++) {
            const T* x = trunk + (t * M + m) * width;
            T* to = out + (t * M + m) * width;
            Gate g = gate_of(x, kv + (t * (M + 1) + m) * width, weight + m * width, width, eps);
#pragma omp simd
            for (int d = 0; d < width; d++) store(to[d], load(x[d]) + g.gate * load(value[d]));
        }
    }
}

template <typename T>
void engram_backward(const T* trunk, const T* kv, const float* weight, const T* grad,
                     T* grad_trunk, T* grad_kv, float* grad_weight, int64_t tokens, int width,
                     float eps) {
    int threads = omp_get_max_threads();
    std::vector<float> sums(size_t(threads) * M * width, 0.0f);
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> total(width);
        float* mine = sums.data() + size_t(omp_get_thread_num()) * M * width;
        float root_width = std::sqrt(float(width));
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; t++) {
            const T* value = kv + (t * (M + 1) + M) * width;
            std::fill(total.begin(), total.end(), 0.0f);
            for (int m = 0; m < M; m++) {
                int64_t at = (t * M + m) * width, place = (t * (M + 1) + m) * width;
                const T *x = trunk + at, *key = kv + place, *g = grad + at;
                const float* w = weight + m * width;
                Gate s = gate_of(x, key, w, width, eps);
                float by_gate = 0.0f;
#pragma omp simd reduction(+ : by_gate)
                for (int d = 0; d < width; d++) {
                    by_gate += load(g[d]) * load(value[d]);
                    total[d] += s.gate * load(g[d]);
                }
                float size = std::fabs(s.dot);
                float by_dot = by_gate * s.gate * (1.0f - s.gate);
                by_dot = size > GATE_FLOOR ? by_dot * 0.5f / std::sqrt(size) / root_width : 0.0f;
                float by_product = by_dot * s.inverse_trunk * s.inverse_key;
                float by_x = -by_product * s.product * s.inverse_trunk * s.inverse_trunk / width;
                float by_key = -by_product * s.product * s.inverse_key * s.inverse_key / width;
                float* gw = mine + m * width;
#pragma omp simd
                for (int d = 0; d < width; d++) {
                    float a = load(x[d]), b = load(key[d]);
                    store(grad_trunk[at + d], load(g[d]) + by_product * w[d] * b + by_x * a);
                    store(grad_kv[place + d], by_product * w[d] * a + by_key * b);
                    gw[d] += by_product * a * b;
                }
            }
            for (int d = 0; d < width; d++) store(grad_kv[(t * (M + 1) + M) * width + d], total[d]);
        }
    }
    for (int d = 0; d < M * width; d++) {
        float total = 0.0f;
        for (int thread = 0; thread < threads; thread++)
            total += sums[size_t(thread) * M * width + d];
        grad_weight[d] = total;
    }
}

// The `limit` best of the visible (and allowed) entries of every row; lower index wins ties.

void select_rows(const float* score, const uint8_t* allowed, uint8_t* mask, int64_t rows,
                 int entries, int queries, int ratio, int limit) {
#pragma omp parallel
    {
        std::vector<float> room(entries);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            int visible = std::min(int((r % queries + 1) / ratio), entries);
            const float* s = score + r * entries;
            uint8_t* m = mask + r * entries;
            std::memset(m, 0, size_t(entries));
            int count = 0;
            for (int k = 0; k < visible; k++)
                if (!allowed || allowed[r * entries + k]) room[count++] = s[k];
            float threshold = -INFINITY;
            int ties = entries;
            if (count > limit) {
                std::nth_element(room.begin(), room.begin() + limit - 1, room.begin() + count,
                                 [](float a, float b) { return a > b; });
                threshold = room[limit - 1];
                ties = limit;
                for (int k = 0; k < count; k++) ties -= room[k] > threshold;
            }
            for (int k = 0; k < visible; k++) {
                if (allowed && !allowed[r * entries + k]) continue;
                if (s[k] > threshold) m[k] = 1;
                else if (s[k] == threshold && ties > 0) { m[k] = 1; ties--; }
            }
        }
    }
}

// Cross-entropy: the logits become their gradient (times `factor`), loss and argmax per row.

template <typename T>
void cross_entropy(T* logits, const int64_t* target, float* loss, int64_t* best, int64_t rows,
                   int width, float factor) {
#pragma omp parallel
    {
        std::vector<float> x(width);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) {
            T* row = logits + r * width;
            float top = -INFINITY;
#pragma omp simd reduction(max : top)
            for (int d = 0; d < width; d++) {
                x[d] = load(row[d]);
                top = std::max(top, x[d]);
            }
            float total = 0.0f;
            int64_t at = target[r], first = 0;
            while (x[first] != top) first++;
            best[r] = first;
            float wanted = at >= 0 ? x[at] : 0.0f;
#pragma omp simd reduction(+ : total)
            for (int d = 0; d < width; d++) {
                x[d] = fast_exp(x[d] - top);
                total += x[d];
            }
            bool used = at >= 0;
            loss[r] = used ? top + std::log(total) - wanted : 0.0f;
            float scale = used ? factor / total : 0.0f;
#pragma omp simd
            for (int d = 0; d < width; d++) store(row[d], x[d] * scale);
            if (used) store(row[at], x[at] * scale - factor);
        }
    }
}

}  // namespace

#define BOTH(NAME, PARAMETERS, ARGUMENTS_F, ARGUMENTS_B)                                           \
    void NAME##_f32 PARAMETERS { NAME<float> ARGUMENTS_F; }                                        \
    void NAME##_bf16 PARAMETERS { NAME<bf16> ARGUMENTS_B; }
#define F(x) static_cast<float*>(x)
#define B(x) static_cast<bf16*>(x)

extern "C" {

BOTH(quantize_rows, (void* in, void* out, int64_t groups, int format),
     (F(in), F(out), groups, format), (B(in), B(out), groups, format))

BOTH(mix_forward,
     (void* projected, float* inverse, float* scale, float* base, float* out, int64_t tokens,
      int iterations, float eps),
     (F(projected), inverse, scale, base, out, tokens, iterations, eps),
     (B(projected), inverse, scale, base, out, tokens, iterations, eps))

BOTH(mix_backward,
     (void* projected, float* inverse, float* scale, float* base, float* grad, void* gp, float* gi,
      float* gs, float* gb, int64_t tokens, int iterations, float eps),
     (F(projected), inverse, scale, base, grad, F(gp), gi, gs, gb, tokens, iterations, eps),
     (B(projected), inverse, scale, base, grad, B(gp), gi, gs, gb, tokens, iterations, eps))

BOTH(collapse_forward,
     (void* trunk, float* mix, float* weight, void* normed, float* flat, float* norm,
      int64_t tokens, int width, float eps),
     (F(trunk), mix, weight, F(normed), flat, norm, tokens, width, eps),
     (B(trunk), mix, weight, B(normed), flat, norm, tokens, width, eps))

BOTH(collapse_backward,
     (void* trunk, float* mix, float* weight, float* flat, float* norm, void* grad,
      float* grad_flat, void* grad_trunk, float* grad_mix, float* grad_weight, int64_t tokens,
      int width),
     (F(trunk), mix, weight, flat, norm, F(grad), grad_flat, F(grad_trunk), grad_mix, grad_weight,
      tokens, width),
     (B(trunk), mix, weight, flat, norm, B(grad), grad_flat, B(grad_trunk), grad_mix, grad_weight,
      tokens, width))

BOTH(expand_forward,
     (void* out, void* trunk, float* mix, void* result, int64_t tokens, int width),
     (F(out), F(trunk), mix, F(result), tokens, width),
     (B(out), B(trunk), mix, B(result), tokens, width))

BOTH(expand_backward,
     (void* out, void* trunk, float* mix, void* grad, void* grad_out, void* grad_trunk,
      float* grad_mix, int64_t tokens, int width),
     (F(out), F(trunk), mix, F(grad), F(grad_out), F(grad_trunk), grad_mix, tokens, width),
     (B(out), B(trunk), mix, B(grad), B(grad_out), B(grad_trunk), grad_mix, tokens, width))

BOTH(norm_forward,
     (void* x, float* weight, void* y, float* inverse, int64_t rows, int width, float eps),
     (F(x), weight, F(y), inverse, rows, width, eps),
     (B(x), weight, B(y), inverse, rows, width, eps))

BOTH(norm_backward,
     (void* x, float* weight, float* inverse, void* grad, void* gx, float* gw, int64_t rows,
      int width),
     (F(x), weight, inverse, F(grad), F(gx), gw, rows, width),
     (B(x), weight, inverse, B(grad), B(gx), gw, rows, width))

BOTH(rope,
     (void* x, float* cosine, float* sine, void* y, int64_t rows, int heads, int positions,
      int width, int rotary, float direction),
     (F(x), cosine, sine, F(y), rows, heads, positions, width, rotary, direction),
     (B(x), cosine, sine, B(y), rows, heads, positions, width, rotary, direction))

BOTH(swiglu_forward,
     (void* h, float* share, void* y, int64_t rows, int width, float limit, int quantize),
     (F(h), share, F(y), rows, width, limit, quantize),
     (B(h), share, B(y), rows, width, limit, quantize))

BOTH(swiglu_backward,
     (void* h, float* share, void* grad, void* grad_h, float* grad_share, int64_t rows, int width,
      float limit),
     (F(h), share, F(grad), F(grad_h), grad_share, rows, width, limit),
     (B(h), share, B(grad), B(grad_h), grad_share, rows, width, limit))

BOTH(engram_forward,
     (void* trunk, void* kv, float* weight, void* out, int64_t tokens, int width, float eps),
     (F(trunk), F(kv), weight, F(out), tokens, width, eps),
     (B(trunk), B(kv), weight, B(out), tokens, width, eps))

BOTH(engram_backward,
     (void* trunk, void* kv, float* weight, void* grad, void* gt, void* gkv, float* gw,
      int64_t tokens, int width, float eps),
     (F(trunk), F(kv), weight, F(grad), F(gt), F(gkv), gw, tokens, width, eps),
     (B(trunk), B(kv), weight, B(grad), B(gt), B(gkv), gw, tokens, width, eps))

BOTH(softmax_forward,
     (void* logits, uint8_t* mask, float* sink, float scale, float* rest, Block* block),
     (F(logits), mask, sink, scale, rest, *block), (B(logits), mask, sink, scale, rest, *block))

BOTH(softmax_backward,
     (void* probability, void* grad, float* rest, float scale, float* grad_sink, Block* block),
     (F(probability), F(grad), rest, scale, grad_sink, *block),
     (B(probability), B(grad), rest, scale, grad_sink, *block))

BOTH(cross_entropy,
     (void* logits, int64_t* target, float* loss, int64_t* best, int64_t rows, int width,
      float factor),
     (F(logits), target, loss, best, rows, width, factor),
     (B(logits), target, loss, best, rows, width, factor))

void select_entries(float* score, uint8_t* allowed, uint8_t* mask, int64_t rows, int entries,
                    int queries, int ratio, int limit) {
    select_rows(score, allowed, mask, rows, entries, queries, ratio, limit);
}
}
