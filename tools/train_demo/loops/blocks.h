// Rotary embedding, SwiGLU and the Engram gate, forward and backward.
#pragma once

#include "streams.h"

namespace {

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

}  // namespace
