// Fused loops of the training network, forward and backward, over bf16 or fp32 tensors.
//
// Plain C functions on raw pointers: every array is contiguous, every result is written into
// memory that the caller made. Sums run in a fixed order for a fixed number of threads.

#include "attention.h"
#include "blocks.h"
#include "numbers.h"
#include "streams.h"

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
