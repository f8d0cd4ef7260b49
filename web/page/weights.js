// Rows of the matrices in a model file, as the products see them: whole numbers and a scale for each group.
// Offsets, shapes and formats are those of the exporter's reader (data.json); docs/model-files.md has the bytes.

import { fround, halfToNumber } from "./numbers.js";

const READ = { "<f4": Float32Array, "<i4": Int32Array, "|i1": Int8Array, "|u1": Uint8Array, "<f2": Uint16Array };

export class Weights {
    constructor(model, bytes) {
        this.model = model;
        this.bytes = bytes;
    }
    // Values begin .. begin + n - 1 of a tensor.
    part(name, begin, n) {
        const [dtype, , offset] = this.model.tensors[name];
        const type = READ[dtype];
        const at = offset + begin * type.BYTES_PER_ELEMENT;
        const values = new type(this.bytes.slice(at, at + n * type.BYTES_PER_ELEMENT));
        return dtype === "<f2" ? Float32Array.from(values, halfToNumber) : values;
    }
    vector(name) {
        return this.part(name, 0, this.model.tensors[name][1].at(-1));
    }
    has(name) {
        return name in this.model.tensors || `${name}.codes` in this.model.tensors;
    }

    // Row i of a matrix; of experts' matrices, that of expert e. {codes, scales, group, stored}: value k of the row is
    // codes[k] * scales[k / group]. `stored` says what lies in the file where that is not the code itself.
    row(name, i, e = 0) {
        const shape = this.model.tensors[`${name}.codes`][1];
        const rows = shape.at(-2);
        const at = shape.length === 3 ? e * rows + i : i;
        const formats = this.model.layout.formats;
        if (formats) return this.#gptqRow(name, at, formats[name.split(".").at(-1)]);
        const n = shape.at(-1);
        const scales = this.model.tensors[`${name}.scales`][1];
        const perRow = scales.length === shape.length ? scales.at(-1) : 1;
        return {
            codes: this.part(`${name}.codes`, at * n, n),
            scales: this.part(`${name}.scales`, at * perRow, perRow),
            group: n / perRow,
        };
    }

    #gptqRow(name, i, format) {
        const bytes = this.model.tensors[`${name}.codes`][1][1];
        const raw = this.part(`${name}.codes`, i * bytes, bytes);
        const n = format.bits === 8 ? bytes : (bytes * 8) / format.bits;
        const group = format.group || n;
        const groups = n / group;
        const small = this.model.group_size; // activations that share a scale
        const repeated = (scales) =>
            Float32Array.from({ length: n / small }, (_, g) => scales[Math.floor((g * small) / group)]);
        if (format.bits === 8) {
            const scales = this.part(`${name}.scales`, i * groups, groups);
            return { codes: raw, scales: repeated(scales), group: small };
        }
        const low = format.bits === 5 || format.bits === 6 ? 4 : format.bits; // else two planes, one behind the other
        const stored = unpack(raw.subarray(0, (n * low) / 8), low);
        if (low < format.bits)
            unpack(raw.subarray((n * low) / 8), format.bits - 4).forEach((code, k) => (stored[k] |= code << 4));
        if (format.int8_scales) {
            const scales = this.part(`${name}.groups`, i * groups, groups);
            const rowScale = this.part(`${name}.row_scales`, i, 1)[0];
            const table = format.bits < 6 ? this.part(`${name}.table`, 0, 1 << format.bits) : null;
            return {
                codes: Int8Array.from(stored, (code) => (table ? table[code] : code - 32)),
                scales: repeated(Array.from(scales, (s) => fround(s * rowScale))),
                group: small,
            };
        }
        if (format.two_level) {
            const levels = this.part(`${name}.groups`, i * groups, groups);
            const rowScale = this.part(`${name}.row_scales`, i, 1)[0];
            const codes = Int8Array.from(stored, (code, k) => 5 * code - (levels[Math.floor(k / group)] >> 4));
            const scales = Array.from(levels, (level) => fround((level & 15) * rowScale));
            return {
                codes,
                scales: repeated(scales),
                group: small,
                stored: { codes: stored, bits: 2, zeros: Array.from(levels, (l) => l >> 4), times: 5, group },
            };
        }
        const zeroBytes = this.part(`${name}.zeros`, i * Math.ceil(groups / 2), Math.ceil(groups / 2));
        const zeros = Array.from({ length: groups }, (_, g) => (zeroBytes[g >> 1] >> (g % 2 ? 4 : 0)) & 15);
        const codes = Int8Array.from(stored, (code, k) => code - zeros[Math.floor(k / group)]);
        const scales = this.part(`${name}.scales`, i * groups, groups);
        return {
            codes,
            scales: repeated(scales),
            group: small,
            stored: { codes: stored, bits: format.bits, zeros, times: 1, group },
        };
    }
}

// Codes of 1, 2 or 4 bits in the order of formats/low_bits.py: in a block of B bytes, byte j holds j, j + B, j + 2B, ...
function unpack(raw, bits) {
    const perByte = 8 / bits;
    const codes = new Uint8Array(raw.length * perByte);
    let start = 0;
    for (const size of [64, 32, 16, 8]) {
        for (; raw.length - start >= size; start += size) {
            for (let j = 0; j < size; j++) {
                for (let i = 0; i < perByte; i++)
                    codes[start * perByte + j + size * i] = (raw[start + j] >> (i * bits)) & ((1 << bits) - 1);
            }
        }
    }
    return codes;
}
