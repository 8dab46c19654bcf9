//! The element types of a safetensors file, and torch's names for them.

use std::fmt;

/// An element type that safetensors can hold.
#[allow(missing_docs)] // The variants are the format's own names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    F8E5M2Fnuz,
    F8E4M3Fnuz,
    F8E8M0,
    F4,
    F6E2M3,
    F6E3M2,
    U16,
    I16,
    F16,
    BF16,
    U32,
    I32,
    F32,
    C64,
    U64,
    I64,
    F64,
}

use Dtype::*;

/// Every type: its name in a header, its size in bits, and torch's names for it
/// (`torch.float32` and `FloatStorage` by their last parts).
const TABLE: [(Dtype, &str, u32, &str, &str); 22] = [
    (Bool, "BOOL", 8, "bool", "BoolStorage"),
    (U8, "U8", 8, "uint8", "ByteStorage"),
    (I8, "I8", 8, "int8", "CharStorage"),
    (F8E5M2, "F8_E5M2", 8, "float8_e5m2", ""),
    (F8E4M3, "F8_E4M3", 8, "float8_e4m3fn", ""),
    (F8E5M2Fnuz, "F8_E5M2FNUZ", 8, "float8_e5m2fnuz", ""),
    (F8E4M3Fnuz, "F8_E4M3FNUZ", 8, "float8_e4m3fnuz", ""),
    (F8E8M0, "F8_E8M0", 8, "float8_e8m0fnu", ""),
    (F4, "F4", 4, "float4_e2m1fn_x2", ""),
    (F6E2M3, "F6_E2M3", 6, "", ""),
    (F6E3M2, "F6_E3M2", 6, "", ""),
    (U16, "U16", 16, "uint16", ""),
    (I16, "I16", 16, "int16", "ShortStorage"),
    (F16, "F16", 16, "float16", "HalfStorage"),
    (BF16, "BF16", 16, "bfloat16", "BFloat16Storage"),
    (U32, "U32", 32, "uint32", ""),
    (I32, "I32", 32, "int32", "IntStorage"),
    (F32, "F32", 32, "float32", "FloatStorage"),
    (C64, "C64", 64, "complex64", "ComplexFloatStorage"),
    (U64, "U64", 64, "uint64", ""),
    (I64, "I64", 64, "int64", "LongStorage"),
    (F64, "F64", 64, "float64", "DoubleStorage"),
];

impl Dtype {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Dtype> {
        TABLE.iter().map(|row| row.0)
    }

    fn row(self) -> &'static (Dtype, &'static str, u32, &'static str, &'static str) {
        &TABLE[self as usize]
    }

    /// The name in a safetensors header.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// The type with that name in a safetensors header.
    pub fn from_name(name: &str) -> Option<Dtype> {
        TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// The type that torch calls `torch.<name>`.
    pub fn from_torch_name(name: &str) -> Option<Dtype> {
        TABLE.iter().find(|row| !row.3.is_empty() && row.3 == name).map(|row| row.0)
    }

    /// The element type of a typed torch storage, by its class name.
    pub fn from_storage_class(name: &str) -> Option<Dtype> {
        TABLE.iter().find(|row| !row.4.is_empty() && row.4 == name).map(|row| row.0)
    }

    /// Bits per element.
    pub fn bits(self) -> u32 {
        self.row().2
    }

    /// Bytes that must be reversed together to change the byte order; 1 where there is none.
    pub fn swap_unit_bytes(self) -> u64 {
        match self {
            C64 => 4,
            _ => u64::from(self.bits() / 8).max(1),
        }
    }

    /// Bytes that a tensor of this type and shape takes, if it is a whole number that fits.
    pub fn byte_len(self, shape: &[u64]) -> Option<u64> {
        // A zero makes it empty, but readers multiply in the order of the shape: what overflows
        // before they meet the zero is no shape to them.
        let product =
            |dim: fn(u64) -> u64| shape.iter().try_fold(1u64, |n, &d| n.checked_mul(dim(d)));
        product(|dim| dim.max(1))?.checked_mul(u64::from(self.bits()))?;
        let bits = product(|dim| dim)? * u64::from(self.bits());
        (bits % 8 == 0).then_some(bits / 8)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enum() {
        for (place, dtype) in Dtype::all().enumerate() {
            assert_eq!(dtype as usize, place);
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
    }

    #[test]
    fn sizes_that_overflow_or_split_a_byte_have_no_answer() {
        assert_eq!(F32.byte_len(&[2, 3]), Some(24));
        assert_eq!(F32.byte_len(&[]), Some(4));
        assert_eq!(F4.byte_len(&[3]), None);
        assert_eq!(F4.byte_len(&[4]), Some(2));
        assert_eq!(F64.byte_len(&[u64::MAX, 2]), None);
        assert_eq!(F64.byte_len(&[5, 2, 0]), Some(0));
        assert_eq!(F64.byte_len(&[u64::MAX, 2, 0]), None);
        assert_eq!(F64.byte_len(&[0, u64::MAX, 2]), None);
    }
}
