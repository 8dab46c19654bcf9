//! Floats of at most 16 bits: from and to the bits of an `f32`, without branches.

pub const NAN_32: u32 = 0x7fc0_0000;
pub const NAN_64: u64 = 0x7ff8_0000_0000_0000;
const INFINITY_32: u32 = 0x7f80_0000;
/// Bits of the fraction of an `f32`.
const FRACTION_BITS: u32 = 23;

/// A float of at most 16 bits with a sign, subnormals, and at most one value of infinity.
#[derive(Clone, Copy)]
pub struct SmallFloat {
    /// Bits of the fraction.
    fraction_bits: u32,
    bias: u32,
    sign_mask: u32,
    /// The bits of the smallest magnitude that is no finite value.
    first_special: u32,
    /// The smallest magnitude of an `f32` that becomes `overflow` without rounding.
    overflow_from: u32,
    /// The magnitude that infinity and values out of range become.
    overflow: u32,
    nan: u32,
    /// Whether the only NaN is what would be a negative zero.
    nan_is_negative_zero: bool,
}

pub const FLOAT16: SmallFloat = SmallFloat {
    fraction_bits: 10,
    bias: 15,
    sign_mask: 0x8000,
    first_special: 0x7c00,
    overflow_from: 0x4780_0000,
    overflow: 0x7c00,
    nan: 0x7e00,
    nan_is_negative_zero: false,
};

pub const E5M2: SmallFloat = SmallFloat {
    fraction_bits: 2,
    sign_mask: 0x80,
    first_special: 0x7c,
    overflow: 0x7c,
    nan: 0x7f,
    ..FLOAT16
};

pub const E4M3: SmallFloat = SmallFloat {
    fraction_bits: 3,
    bias: 7,
    sign_mask: 0x80,
    first_special: 0x7f,
    // 464, half way between the largest value and what would be the next. torch saturates, at infinity too.
    overflow_from: 0x43e8_0000,
    overflow: 0x7e,
    nan: 0x7f,
    nan_is_negative_zero: false,
};

pub const E4M3_FNUZ: SmallFloat = SmallFloat {
    fraction_bits: 3,
    bias: 8,
    sign_mask: 0x80,
    first_special: 0x80,
    overflow_from: 0x4380_0000,
    overflow: 0x80,
    nan: 0x80,
    nan_is_negative_zero: true,
};

pub const E5M2_FNUZ: SmallFloat =
    SmallFloat { fraction_bits: 2, bias: 16, overflow_from: 0x4780_0000, ..E4M3_FNUZ };

impl SmallFloat {
    /// The `f32` of a value. Bits above its own are zero.
    #[inline(always)]
    pub fn widen(self, bits: u32) -> f32 {
        let magnitude = bits & (self.sign_mask - 1);
        let sign = (bits & self.sign_mask) * (0x8000_0000 / self.sign_mask);
        let shifted = magnitude << (FRACTION_BITS - self.fraction_bits);
        let rebias = (127 - self.bias) << FRACTION_BITS;
        let normal = shifted + rebias;
        // A subnormal is what it is above the smallest normal number of the next exponent.
        let smallest = rebias + (1 << FRACTION_BITS);
        let subnormal = f32::from_bits(shifted + smallest) - f32::from_bits(smallest);
        let is_normal = shifted >= 1 << FRACTION_BITS;
        let finite = if is_normal { normal } else { subnormal.to_bits() } | sign;
        let is_nan = match self.nan_is_negative_zero {
            true => bits == self.nan,
            false => {
                magnitude > self.first_special
                    || self.first_special == self.nan && magnitude == self.nan
            }
        };
        let is_infinite = !self.nan_is_negative_zero
            && self.first_special != self.nan
            && magnitude == self.first_special;
        let special = if is_infinite { INFINITY_32 | sign } else { finite };
        f32::from_bits(if is_nan { NAN_32 } else { special })
    }

    /// The value nearest to an `f32`, to even on a tie.
    #[inline(always)]
    pub fn narrow(self, value: f32) -> u32 {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        let dropped = FRACTION_BITS - self.fraction_bits;
        let rebias = (127 - self.bias) << FRACTION_BITS;
        let odd = (magnitude >> dropped) & 1;
        let half = (1 << (dropped - 1)) - 1;
        let normal = magnitude.wrapping_sub(rebias).wrapping_add(half + odd) >> dropped;
        // The addition rounds off the bits that a subnormal has no room for.
        let magic = rebias + ((dropped + 1) << FRACTION_BITS);
        let subnormal =
            (f32::from_bits(magnitude) + f32::from_bits(magic)).to_bits().wrapping_sub(magic);
        let is_normal = magnitude >= rebias + (1 << FRACTION_BITS);
        let finite = if is_normal { normal } else { subnormal };
        let rounded = if magnitude >= self.overflow_from { self.overflow } else { finite };
        let is_unsigned = self.nan_is_negative_zero && rounded == 0;
        let sign = if is_unsigned { 0 } else { (bits >> 31) * self.sign_mask };
        if magnitude > INFINITY_32 { self.nan } else { rounded | sign }
    }
}

#[inline(always)]
pub fn narrow_to_bfloat16(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    if value.is_nan() { NAN_32 >> 16 } else { rounded }
}

/// A power of two: an exponent alone, without sign, fraction or zero.
#[inline(always)]
pub fn widen_power(exponent: u32) -> f32 {
    let smallest = 1 << (FRACTION_BITS - 1);
    let bits = if exponent == 0 { smallest } else { exponent << FRACTION_BITS };
    f32::from_bits(if exponent == 0xff { NAN_32 } else { bits })
}

/// The power of two nearest to a magnitude. Infinity has none, and is a NaN.
#[inline(always)]
pub fn narrow_to_power(value: f32) -> u32 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    let exponent = magnitude >> FRACTION_BITS;
    let fraction = magnitude & 0x007f_ffff;
    let half = 1 << (FRACTION_BITS - 1);
    // What is below the smallest normal number rounds to even, and that is down.
    let rounds_up = fraction > half || (fraction == half && exponent > 0);
    if exponent == 0xff { 0xff } else { exponent + u32::from(rounds_up) }
}
