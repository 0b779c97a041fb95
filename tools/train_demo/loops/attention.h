// Softmax with a sink, selection of entries, cross-entropy.
#pragma once

#include "numbers.h"

namespace {

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
