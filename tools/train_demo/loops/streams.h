// Hyper-connections and norms, forward and backward.
#pragma once

#include "numbers.h"

namespace {

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

}  // namespace
