// Arithmetic in fp32 as the programs do it, and numbers as text.

export const fround = Math.fround;

const wide = new Float64Array(1);
const bits = new BigInt64Array(wide.buffer);

// a * b + c rounded once to fp32, for fp32 numbers whose product is exact in fp64 (two fp32 numbers always are).
// The sum is rounded to odd in fp64 first, so that the second rounding cannot go wrong (Boldo & Melquiond 2008).
export function fma(a, b, c) {
    const product = a * b;
    const sum = product + c;
    const back = sum - product;
    const error = product - (sum - back) + (c - back); // exact: Knuth's two-sum
    if (error === 0 || !Number.isFinite(sum)) return fround(sum);
    wide[0] = sum;
    if ((bits[0] & 1n) === 0n) bits[0] += error > 0 === sum > 0 ? 1n : -1n;
    return fround(wide[0]);
}

const [LOG2_E, LN2_HIGH, LN2_LOW, ROUNDER] = [Math.LOG2E, 0.693359375, -2.1219444e-4, 1.5 * 2 ** 23].map(fround);
const TERMS = [5040, 720, 120, 24, 6, 2, 1, 1].map((n) => fround(1 / n));

// e^x of an fp32 number as the programs have it (exp_fp32 in runq.cpp).
export function exp(x) {
    const bounded = Math.min(Math.max(x, -87), 88);
    const n = fma(bounded, LOG2_E, ROUNDER) - ROUNDER;
    const r = fma(n, -LN2_LOW, fma(-n, LN2_HIGH, bounded));
    return TERMS.reduce((sum, term) => fma(sum, r, term)) * 2 ** n;
}

// Every n-th number goes into the same of n sums, and these are added up. round: what is done after each addition.
export function sumInLanes(values, n, round = (x) => x) {
    const lanes = new Float64Array(n);
    values.forEach((x, i) => (lanes[i % n] = round(lanes[i % n] + x)));
    return lanes.reduce((sum, x) => round(sum + x), 0);
}

// Halves to the even neighbour, as nearbyintf does.
export function roundHalfEven(x) {
    const floor = Math.floor(x);
    const rest = x - floor;
    if (rest < 0.5) return floor;
    if (rest > 0.5) return floor + 1;
    return floor % 2 === 0 ? floor : floor + 1;
}

export function halfToNumber(half) {
    const sign = half & 0x8000 ? -1 : 1;
    const exponent = (half >> 10) & 31;
    const fraction = half & 1023;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

const MINUS = "−";

// Four significant digits: enough to look at, and short.
export function short(x) {
    if (Number.isInteger(x) && Math.abs(x) < 1e7) return whole(x);
    if (!Number.isFinite(x)) return String(x);
    const size = Math.abs(x);
    const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? x.toExponential(3) : x.toPrecision(4);
    return text.replace(/-/g, MINUS);
}

// All digits that tell one fp32 number from its neighbours.
export function full(x) {
    for (let digits = 6; digits < 9; digits++) {
        if (fround(Number(x.toPrecision(digits))) === x)
            return Number(x.toPrecision(digits)).toString().replace(/-/g, MINUS);
    }
    return Number(x.toPrecision(9)).toString().replace(/-/g, MINUS);
}

// Nine digits of a result in fp64, so that what is computed from it comes out as shown.
export const nine = (x) => Number(x.toPrecision(9)).toString().replace(/-/g, MINUS);

export function whole(x) {
    const digits = String(Math.abs(x)).replace(/\B(?=(\d{3})+$)/g, ",");
    return x < 0 ? MINUS + digits : digits;
}
