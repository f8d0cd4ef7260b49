// A back end in plain loops, for matrices of 8 bits with a scale per row: see docs/backends.md.
#include <math.h>
#include <stdlib.h>

#include "engine/backend/quant_gemm.h"

static const char* latest_error = "no error";
static const char* error_text(void) { return latest_error; }
static int32_t fail(QuantGemmStatus status, const char* why) { return latest_error = why, status; }

static int32_t rank(void) { return 1; }  // runs anywhere, but only by name
// Matrices that were loaded, each behind the one before it; the context is the first, which is none.
typedef struct Loaded {
    QuantGemmMatrix w;
    struct Loaded* next;
} Loaded;
static int32_t open_it(void** context, QuantGemmRunLoop run_loop) {
    (void)run_loop;  // one thread will do
    *context = calloc(1, sizeof(Loaded));
    return *context != NULL ? QUANT_GEMM_OK : fail(QUANT_GEMM_NO_MEMORY, "out of memory");
}
static void close_it(void* context) {
    for (Loaded *m = context, *next; m != NULL; m = next) next = m->next, free(m);
}
static int32_t accepts(void* context, const QuantGemmMatrix* w) {
    (void)context;
    if (w->bits == 8 && w->scale_type == QUANT_GEMM_ROW_FP32) return QUANT_GEMM_OK;
    return fail(QUANT_GEMM_UNSUPPORTED, "a matrix is not of 8 bits with a scale per row");
}
// A matrix is read where it lies: what is kept of it is its description.
static int32_t load(void* context, const QuantGemmMatrix* w, int32_t in_place, void** matrix) {
    Loaded *first = context, *m = malloc(sizeof *m);
    if (m == NULL) return fail(QUANT_GEMM_NO_MEMORY, "out of memory");
    m->w = *w, m->next = first->next, first->next = m, *matrix = &m->w;
    return (void)in_place, QUANT_GEMM_OK;
}

static int32_t multiply(void* context, const QuantGemmRows* x, const QuantGemmProduct* list,
                        int32_t n_products) {
    const int n_cols = x->n_cols, size = x->group_size, n_groups = n_cols / size;
    for (const QuantGemmProduct* p = list; p < list + n_products; p++) {
        const QuantGemmMatrix* w = p->matrix;
        for (int t = 0; t < x->n_rows; t++) {
            for (int i = 0; i < w->n_rows; i++) {
                const int8_t* xc = x->codes + (size_t)t * n_cols;
                const int8_t* wc = (const int8_t*)w->codes + (size_t)i * n_cols;
                float sum = 0;
                for (int g = 0; g < n_groups; g++) {
                    int32_t acc = 0;
                    for (int k = g * size; k < (g + 1) * size; k++) acc += xc[k] * wc[k];
                    const float scale = ((const float*)w->scales)[i] * x->scales[(size_t)t * n_groups + g];
                    sum = fmaf((float)acc, scale, sum);
                }
                p->out[(size_t)t * w->n_rows + i] = sum;
            }
        }
    }
    return (void)context, QUANT_GEMM_OK;
}

// Without `quantize`: the program does it.
static const QuantGemmBackend backend = {.version = QUANT_GEMM_VERSION,
                                         .name = "example",
                                         .rank = rank,
                                         .open = open_it,
                                         .close = close_it,
                                         .accepts = accepts,
                                         .load = load,
                                         .multiply = multiply,
                                         .error_text = error_text};
const QuantGemmBackend* quant_gemm_backend(void) { return &backend; }
