// Driver of hw/rtl/matmul_axi.sv with FETCH, in C99 (and C++): activations in, a queue of products, results
// out. It takes no memory from the heap and no header but those below. docs/rtl.md has registers and streams;
// hw/tests/system_test.cpp is a host program that uses all of it.
//
//     matmul_device d;
//     matmul_open(&d, &bus);                                    // bus: how your system reaches the core,
//     below matmul_pack(&d, &matrix, codes, NULL, scales, packed);    // once, when the model is loaded
//     matmul_load(&d, x, n_tokens, matrix.n_cols, matrix.group_size);
//     matmul_push(&d, &matrix, packed, results);                // up to matmul_room(&d) of them: q, k and v
//     matmul_wait(&d);
//     matmul_unpack(&d, &matrix, results, out, matrix.n_rows);
//
// Buffers that the core or a DMA engine reads or writes have to be coherent, or flushed by the functions of
// `bus`.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum {  // byte addresses of registers
    MATMUL_ID = 0x00,
    MATMUL_SHAPE = 0x04,
    MATMUL_LIMITS = 0x08,
    MATMUL_CONTROL = 0x0c,
    MATMUL_STATUS = 0x10,
    MATMUL_TOKENS = 0x14,
    MATMUL_PASSES = 0x18,
    MATMUL_GROUPS = 0x1c,
    MATMUL_MODE = 0x24,
    MATMUL_INTERRUPT = 0x2c,
    MATMUL_FETCH_ADDRESS = 0x48,
    MATMUL_FETCH_ADDRESS_HIGH = 0x4c,
    MATMUL_QUEUE = 0x50
};
enum { MATMUL_BUSY = 1, MATMUL_DONE = 2, MATMUL_REFUSED = 4, MATMUL_ERROR = 8 };  // bits of STATUS

enum {  // what functions return
    MATMUL_OK = 0,
    MATMUL_NO_CORE = -1,     // there is none at these registers, or it has no queue
    MATMUL_BAD_SIZES = -2,   // the core cannot take them; matmul_why says which
    MATMUL_QUEUE_FULL = -3,  // wait, and push again
    MATMUL_BUS_ERROR = -4,   // memory had an error: results since the latest load may be wrong
    MATMUL_TIMED_OUT = -5    // the core was stopped; reset the DMA engines before the next product
};

// How a system reaches the core. `context` is handed to each function.
typedef struct {
    void* context;
    uint32_t (*read)(void* context, uint32_t address);
    void (*write)(void* context, uint32_t address, uint32_t value);
    // Start a transfer to s_axis_x, and one from m_axis, and return at once. Transfers of a direction go one
    // behind the other; four of them may wait.
    void (*send)(void* context, const void* from, size_t bytes);
    void (*receive)(void* context, void* to, size_t bytes);
    uint64_t (*address)(void* context, const void* packed);  // as m_axi sees it
    // Returns when irq is 1, or after a while of the system's choice: 0 is too late. NULL: STATUS is polled.
    int (*wait)(void* context);
    unsigned long polls;  // reads of STATUS at most, and behind a stop
} matmul_bus;

typedef struct {
    const matmul_bus* bus;
    uint32_t rows, cols, max_tokens, max_inputs, min_group;
    uint32_t n_tokens, n_cols, group_size;  // of the activations that are loaded
} matmul_device;

// Formats of weights: codes of 8, 4 or 2 bits; or of 2 that count five times.
enum { MATMUL_INT8 = 0, MATMUL_FOUR_BITS = 1, MATMUL_TWO_BITS = 2, MATMUL_TWO_LEVEL = 3 };
typedef struct {
    uint32_t n_rows, n_cols,
        group_size;  // outputs, inputs, inputs that share a scale; W8A8: group_size = n_cols
    uint32_t format;
} matmul_matrix;

static inline uint32_t matmul_rows_of_tiles(const matmul_device* d, const matmul_matrix* m) {
    return (m->n_rows + d->cols - 1) / d->cols;
}

// Bytes of the matrix in memory, a multiple of d->cols, which its address has to be, too; and of its results.
static inline size_t matmul_packed_bytes(const matmul_device* d, const matmul_matrix* m) {
    const size_t groups = m->n_cols / m->group_size;
    const unsigned shift = m->format == MATMUL_INT8 ? 0 : m->format == MATMUL_FOUR_BITS ? 1 : 2;
    return (size_t)matmul_rows_of_tiles(d, m) * d->cols *
           (groups * (m->format == MATMUL_INT8 ? 4u : 5u) + (m->n_cols >> shift));
}
static inline size_t matmul_result_bytes(const matmul_device* d, const matmul_matrix* m) {
    return (size_t)matmul_rows_of_tiles(d, m) * d->cols * d->n_tokens * sizeof(float);
}

// What is wrong with sizes, as a sentence; NULL: nothing.
static inline const char* matmul_why(const matmul_device* d, uint32_t n_tokens, uint32_t n_cols,
                                     uint32_t group_size) {
    if (n_tokens == 0 || n_tokens > d->max_tokens) return "tokens: 1 to max_tokens";
    if (group_size == 0 || group_size % d->rows != 0) return "group_size: a multiple of the array's rows";
    if (group_size < d->min_group) return "group_size: min_group or more";
    if (n_cols == 0 || n_cols % group_size != 0) return "n_cols: a multiple of group_size";
    if (n_cols > d->max_inputs) return "n_cols: up to max_inputs";
    return NULL;
}

// Finds the core, and stops what it may be doing.
static inline int matmul_open(matmul_device* d, const matmul_bus* bus) {
    memset(d, 0, sizeof *d);
    d->bus = bus;
    if (bus->read(bus->context, MATMUL_ID) != 0x716e7572u) return MATMUL_NO_CORE;
    bus->write(bus->context, MATMUL_CONTROL, 8);
    const uint32_t shape = bus->read(bus->context, MATMUL_SHAPE),
                   limits = bus->read(bus->context, MATMUL_LIMITS);
    d->rows = shape & 0xfff, d->cols = shape >> 12 & 0xfff, d->max_tokens = shape >> 24;
    d->max_inputs = limits & 0xffff, d->min_group = limits >> 16;
    bus->write(bus->context, MATMUL_INTERRUPT, bus->wait != NULL);
    return bus->read(bus->context, MATMUL_QUEUE) != 0 ? MATMUL_OK : MATMUL_NO_CORE;
}

// Writes a matrix as m_axi reads it: codes (n_rows, n_cols), scales (n_rows, n_cols / group_size) fp32. With
// codes of fewer than 8 bits they are 0..15 or 0..3, and zeros (n_rows, n_cols / group_size) is what is taken
// off them. The rows that fill the last row of tiles up are 0.
static inline void matmul_pack(const matmul_device* d, const matmul_matrix* m, const int8_t* codes,
                               const uint8_t* zeros, const float* scales, void* packed) {
    const uint32_t groups = m->n_cols / m->group_size, cols = d->cols;
    const uint32_t bits = m->format == MATMUL_INT8 ? 8 : m->format == MATMUL_FOUR_BITS ? 4 : 2;
    uint8_t* out = (uint8_t*)packed;
    for (uint32_t first = 0; first < m->n_rows; first += cols) {
        const uint32_t n = m->n_rows - first < cols ? m->n_rows - first : cols;  // rows that there are
        for (uint32_t g = 0; g < groups; g++) {
            memset(out, 0, 4 * (size_t)cols);
            for (uint32_t c = 0; c < n; c++)
                memcpy(out + 4 * c, &scales[(size_t)(first + c) * groups + g], 4);
            out += 4 * (size_t)cols;
            if (m->format != MATMUL_INT8) {
                memset(out, 0, cols);
                for (uint32_t c = 0; c < n; c++) out[c] = zeros[(size_t)(first + c) * groups + g];
                out += cols;
            }
            for (uint32_t k = g * m->group_size; k < (g + 1) * m->group_size; k += 8 / bits, out += cols) {
                memset(out, 0, cols);
                for (uint32_t c = 0; c < n; c++)
                    for (uint32_t i = 0; i < 8 / bits; i++)
                        out[c] |= (uint8_t)(((uint32_t)codes[(size_t)(first + c) * m->n_cols + k + i] &
                                             ((1u << bits) - 1))
                                            << i * bits);
            }
        }
    }
}

// Waits until the core is done with all that it was told.
static inline int matmul_wait(matmul_device* d) {
    const matmul_bus* b = d->bus;
    uint32_t status = 0;
    if (b->wait != NULL) {
        if (b->wait(b->context)) status = b->read(b->context, MATMUL_STATUS);
    } else {
        for (unsigned long i = 0; i < b->polls && (status & MATMUL_DONE) == 0; i++)
            status = b->read(b->context, MATMUL_STATUS);
    }
    if ((status & MATMUL_DONE) == 0) {
        b->write(b->context, MATMUL_CONTROL, 8);
        for (unsigned long i = 0; i < b->polls && (b->read(b->context, MATMUL_STATUS) & MATMUL_BUSY); i++) {
        }  // what memory still owes
        return MATMUL_TIMED_OUT;
    }
    return status & MATMUL_ERROR ? MATMUL_BUS_ERROR : MATMUL_OK;
}

// Loads x (n_tokens, n_cols) fp32, which the core quantizes in groups, and waits for its end.
static inline int matmul_load(matmul_device* d, const float* x, uint32_t n_tokens, uint32_t n_cols,
                              uint32_t group_size) {
    const matmul_bus* b = d->bus;
    if (matmul_why(d, n_tokens, n_cols, group_size) != NULL) return MATMUL_BAD_SIZES;
    d->n_tokens = n_tokens, d->n_cols = n_cols, d->group_size = group_size;
    b->write(b->context, MATMUL_TOKENS, n_tokens);
    b->write(b->context, MATMUL_PASSES, group_size / d->rows);
    b->write(b->context, MATMUL_GROUPS, n_cols / group_size);
    b->write(b->context, MATMUL_MODE, 0);
    b->write(b->context, MATMUL_CONTROL, 1);
    if (b->read(b->context, MATMUL_STATUS) & MATMUL_REFUSED) return MATMUL_BAD_SIZES;
    b->send(b->context, x, (size_t)n_tokens * n_cols * sizeof(float));
    return matmul_wait(d);
}

// Products that can be pushed now.
static inline uint32_t matmul_room(const matmul_device* d) {
    return d->bus->read(d->bus->context, MATMUL_QUEUE);
}

// Queues the product of the activations with a matrix. results has matmul_result_bytes; it is whole after
// matmul_wait.
static inline int matmul_push(matmul_device* d, const matmul_matrix* m, const void* packed, void* results) {
    const matmul_bus* b = d->bus;
    const uint64_t address = b->address(b->context, packed);
    if (m->n_cols != d->n_cols || m->group_size != d->group_size || m->n_rows == 0 ||
        matmul_rows_of_tiles(d, m) > 0xffff || m->format > MATMUL_TWO_LEVEL || address % d->cols != 0)
        return MATMUL_BAD_SIZES;
    if (matmul_room(d) == 0) return MATMUL_QUEUE_FULL;
    b->write(b->context, MATMUL_FETCH_ADDRESS, (uint32_t)address);
    b->write(b->context, MATMUL_FETCH_ADDRESS_HIGH, (uint32_t)(address >> 32));
    b->write(b->context, MATMUL_QUEUE, matmul_rows_of_tiles(d, m) | m->format << 16);
    if (b->read(b->context, MATMUL_STATUS) & MATMUL_REFUSED) return MATMUL_BAD_SIZES;
    b->receive(b->context, results, matmul_result_bytes(d, m));
    return MATMUL_OK;
}

// out (n_tokens, n_rows) fp32 from results; a row of out is `stride` numbers long.
static inline void matmul_unpack(const matmul_device* d, const matmul_matrix* m, const float* results,
                                 float* out, size_t stride) {
    for (uint32_t first = 0; first < m->n_rows; first += d->cols) {
        const uint32_t n = m->n_rows - first < d->cols ? m->n_rows - first : d->cols;
        for (uint32_t t = 0; t < d->n_tokens; t++, results += d->cols)
            memcpy(out + t * stride + first, results, n * sizeof(float));
    }
}
