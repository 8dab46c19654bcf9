//! Casts of values, elementwise over slices: equal to `tensor.to(dtype)` of torch on a CPU, bit for bit.
//!
//! Floats go through an `f32`, as torch's do: a cast of an f64 to less than an f32 rounds twice. Every NaN becomes the
//! same NaN of its type: quiet, and without a payload. The loops have no branches, so that the compiler vectorizes them
//! for the instructions that this processor has.

use super::super::dtype::Dtype;
use super::small_floats::{
    E4M3, E4M3_FNUZ, E5M2, E5M2_FNUZ, FLOAT16, NAN_32, NAN_64, narrow_to_bfloat16, narrow_to_power,
    widen_power,
};

/// Casts all values of the first slice into the second, which has room for as many.
pub type CastKernel = fn(&[u8], &mut [u8]);

/// A type of numbers, little-endian in memory.
trait Number: Copy {
    /// The bytes of one value.
    type Raw: Copy;
    /// A type that holds every value exactly.
    type Hub: Copy;
    fn split(bytes: &[u8]) -> &[Self::Raw];
    fn split_mut(bytes: &mut [u8]) -> &mut [Self::Raw];
    fn load(raw: Self::Raw) -> Self;
    fn store(self) -> Self::Raw;
    fn to_hub(self) -> Self::Hub;
}

/// A number that values of a hub are converted to, exactly or by rounding.
trait FromHub<H>: Number {
    fn from_hub(value: H) -> Self;
}

/// Casts values through their hub. A loop over an index is vectorized even where iterators are not inlined.
#[inline(always)]
fn cast_values<S: Number, T: FromHub<S::Hub>>(from: &[u8], to: &mut [u8]) {
    let (from, to) = (S::split(from), T::split_mut(to));
    let count = from.len().min(to.len());
    let (from, to) = (&from[..count], &mut to[..count]);
    #[allow(clippy::needless_range_loop)]
    for n in 0..count {
        to[n] = T::from_hub(S::load(from[n]).to_hub()).store();
    }
}

/// Casts values with the instructions that this processor has.
fn cast<S: Number, T: FromHub<S::Hub>>(from: &[u8], to: &mut [u8]) {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || cast_values::<S, T>(from, to),
    );
}

/// The bits of a number in memory, under a name for each type.
macro_rules! numbers {
    ($($name:ident: $bits:ty => $hub:ty, |$value:ident| $to_hub:expr;)*) => {$(
        #[derive(Clone, Copy)]
        struct $name($bits);

        impl Number for $name {
            type Raw = [u8; size_of::<$bits>()];
            type Hub = $hub;

            #[inline(always)]
            fn split(bytes: &[u8]) -> &[Self::Raw] {
                bytes.as_chunks().0
            }

            #[inline(always)]
            fn split_mut(bytes: &mut [u8]) -> &mut [Self::Raw] {
                bytes.as_chunks_mut().0
            }

            #[inline(always)]
            fn load(raw: Self::Raw) -> Self {
                $name(<$bits>::from_le_bytes(raw))
            }

            #[inline(always)]
            fn store(self) -> Self::Raw {
                self.0.to_le_bytes()
            }

            #[inline(always)]
            fn to_hub(self) -> $hub {
                let $value = self.0;
                $to_hub
            }
        }
    )*};
}

/// Numbers made of a hub: the type, the hub, and the bits for a value of it.
macro_rules! from_hub {
    ($($name:ident: |$value:ident: $hub:ty| $bits:expr;)*) => {$(
        impl FromHub<$hub> for $name {
            #[inline(always)]
            fn from_hub($value: $hub) -> Self {
                $name($bits)
            }
        }
    )*};
}

numbers! {
    Float64: u64 => f64, |bits| f64::from_bits(bits);
    Float32: u32 => f32, |bits| f32::from_bits(bits);
    Float16: u16 => f32, |bits| FLOAT16.widen(u32::from(bits));
    BFloat16: u16 => f32, |bits| f32::from_bits(u32::from(bits) << 16);
    Float8E5M2: u8 => f32, |bits| E5M2.widen(u32::from(bits));
    Float8E4M3: u8 => f32, |bits| E4M3.widen(u32::from(bits));
    Float8E4M3Fnuz: u8 => f32, |bits| E4M3_FNUZ.widen(u32::from(bits));
    Float8E5M2Fnuz: u8 => f32, |bits| E5M2_FNUZ.widen(u32::from(bits));
    Float8E8M0: u8 => f32, |bits| widen_power(u32::from(bits));
    Boolean: u8 => i64, |bits| i64::from(bits != 0);
    Unsigned8: u8 => i64, |bits| i64::from(bits);
    Signed8: u8 => i64, |bits| i64::from(bits as i8);
    Unsigned16: u16 => i64, |bits| i64::from(bits);
    Signed16: u16 => i64, |bits| i64::from(bits as i16);
    Unsigned32: u32 => i64, |bits| i64::from(bits);
    Signed32: u32 => i64, |bits| i64::from(bits as i32);
    // Only made of others: nothing else holds every value.
    Bits64: u64 => i64, |bits| bits as i64;
}

from_hub! {
    Float64: |value: f32| if value.is_nan() { NAN_64 } else { f64::from(value).to_bits() };
    Float32: |value: f32| if value.is_nan() { NAN_32 } else { value.to_bits() };
    Float16: |value: f32| FLOAT16.narrow(value) as u16;
    BFloat16: |value: f32| narrow_to_bfloat16(value) as u16;
    Float8E5M2: |value: f32| E5M2.narrow(value) as u8;
    Float8E4M3: |value: f32| E4M3.narrow(value) as u8;
    Float8E4M3Fnuz: |value: f32| E4M3_FNUZ.narrow(value) as u8;
    Float8E5M2Fnuz: |value: f32| E5M2_FNUZ.narrow(value) as u8;
    Float8E8M0: |value: f32| narrow_to_power(value) as u8;
    // Integers, which every type that they are cast to holds.
    Float64: |value: i64| (value as f64).to_bits();
    Unsigned8: |value: i64| value as u8;
    Signed8: |value: i64| value as u8;
    Unsigned16: |value: i64| value as u16;
    Signed16: |value: i64| value as u16;
    Unsigned32: |value: i64| value as u32;
    Signed32: |value: i64| value as u32;
    Bits64: |value: i64| value as u64;
}

/// Smaller floats of doubles and integers, by the way of an `f32`.
macro_rules! by_float {
    ($($name:ident)*) => {$(
        impl FromHub<f64> for $name {
            #[inline(always)]
            fn from_hub(value: f64) -> Self {
                $name::from_hub(value as f32)
            }
        }
    )*};
}

macro_rules! of_integers {
    ($($name:ident)*) => {$(
        impl FromHub<i64> for $name {
            #[inline(always)]
            fn from_hub(value: i64) -> Self {
                $name::from_hub(value as f32)
            }
        }
    )*};
}

by_float! { Float32 Float16 BFloat16 Float8E5M2 Float8E4M3 Float8E4M3Fnuz Float8E5M2Fnuz Float8E8M0 }
of_integers! { Float32 Float16 BFloat16 Float8E5M2 Float8E4M3 Float8E4M3Fnuz Float8E5M2Fnuz }

/// The kernel of a cast; `None` if there is none.
pub fn cast_kernel(from: Dtype, to: Dtype) -> Option<CastKernel> {
    /// Picks the kernel from one type to any of some.
    macro_rules! to_any {
        ($from:ident: $($dtype:ident $to:ident),*) => {
            match to {
                $(Dtype::$dtype => cast::<$from, $to> as CastKernel,)*
                _ => return None,
            }
        };
    }
    macro_rules! to_float {
        ($from:ident) => {
            to_any!($from: F64 Float64, F32 Float32, F16 Float16, BF16 BFloat16, F8E5M2 Float8E5M2,
                F8E4M3 Float8E4M3, F8E4M3Fnuz Float8E4M3Fnuz, F8E5M2Fnuz Float8E5M2Fnuz, F8E8M0 Float8E8M0)
        };
    }
    Some(match from {
        same if same == to => return None,
        Dtype::F64 => to_any!(Float64: F32 Float32, F16 Float16, BF16 BFloat16, F8E5M2 Float8E5M2,
            F8E4M3 Float8E4M3, F8E4M3Fnuz Float8E4M3Fnuz, F8E5M2Fnuz Float8E5M2Fnuz, F8E8M0 Float8E8M0),
        Dtype::F32 => to_float!(Float32),
        Dtype::F16 => to_float!(Float16),
        Dtype::BF16 => to_float!(BFloat16),
        Dtype::F8E5M2 => to_float!(Float8E5M2),
        Dtype::F8E4M3 => to_float!(Float8E4M3),
        Dtype::F8E4M3Fnuz => to_float!(Float8E4M3Fnuz),
        Dtype::F8E5M2Fnuz => to_float!(Float8E5M2Fnuz),
        Dtype::F8E8M0 => to_float!(Float8E8M0),
        // Types of fewer bits hold no 255.
        Dtype::Bool => {
            to_any!(Boolean: U8 Unsigned8, I8 Signed8, I16 Signed16, U16 Unsigned16, I32 Signed32,
            U32 Unsigned32, I64 Bits64, U64 Bits64, F64 Float64, F32 Float32, F16 Float16, BF16 BFloat16,
            F8E5M2 Float8E5M2, F8E4M3 Float8E4M3, F8E4M3Fnuz Float8E4M3Fnuz, F8E5M2Fnuz Float8E5M2Fnuz)
        }
        Dtype::U8 => {
            to_any!(Unsigned8: I16 Signed16, U16 Unsigned16, I32 Signed32, U32 Unsigned32, I64 Bits64,
            U64 Bits64, F64 Float64, F32 Float32, F16 Float16, BF16 BFloat16)
        }
        Dtype::I8 => {
            to_any!(Signed8: I16 Signed16, I32 Signed32, I64 Bits64, F64 Float64, F32 Float32,
            F16 Float16, BF16 BFloat16)
        }
        Dtype::U16 => {
            to_any!(Unsigned16: I32 Signed32, U32 Unsigned32, I64 Bits64, U64 Bits64, F64 Float64,
            F32 Float32)
        }
        Dtype::I16 => to_any!(Signed16: I32 Signed32, I64 Bits64, F64 Float64, F32 Float32),
        Dtype::U32 => to_any!(Unsigned32: I64 Bits64, U64 Bits64, F64 Float64),
        Dtype::I32 => to_any!(Signed32: I64 Bits64, F64 Float64),
        _ => return None,
    })
}
