//! The element types: this table is the only place that lists them.
//!
//! For a new type, add a variant and a row. The tests of the table say what else is missing.

use std::fmt;

use Dtype::*;

use super::Shape;

/// Size of the largest element. No element needs a larger alignment.
pub const MAX_ELEMENT_BYTES: u64 = 8;

/// An element type that safetensors can hold. The order is that of the format's own library, by which it sorts the
/// tensors of a file.
#[allow(missing_docs)] // The variants are the format's own names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Dtype {
    Bool,
    F4,
    F6E2M3,
    F6E3M2,
    U8,
    I8,
    F8E5M2,
    F8E4M3,
    F8E8M0,
    F8E4M3Fnuz,
    F8E5M2Fnuz,
    I16,
    U16,
    F16,
    BF16,
    I32,
    U32,
    F32,
    C64,
    F64,
    I64,
    U64,
}

/// What is known of one element type.
struct DtypeRow {
    dtype: Dtype,
    /// The name in a safetensors header.
    name: &'static str,
    bits: u32,
    /// `torch.<name>`; empty if torch has no such type.
    torch_name: &'static str,
    /// The class of torch's typed storage; empty if there is none.
    storage_class: &'static str,
    /// Bytes that are reversed together to change the byte order.
    swap_unit_bytes: u64,
    /// Values that torch counts as one element.
    torch_packing: u64,
}

/// A row of a type whose elements are single numbers.
const fn row(
    dtype: Dtype,
    name: &'static str,
    bits: u32,
    torch_name: &'static str,
    storage_class: &'static str,
) -> DtypeRow {
    let swap_unit_bytes = if bits < 8 { 1 } else { bits as u64 / 8 };
    DtypeRow { dtype, name, bits, torch_name, storage_class, swap_unit_bytes, torch_packing: 1 }
}

/// Every type, in the order of the enum.
const DTYPES: [DtypeRow; 22] = [
    row(Bool, "BOOL", 8, "bool", "BoolStorage"),
    // Two values in a byte: what torch counts as one element is two in a header.
    DtypeRow { torch_packing: 2, ..row(F4, "F4", 4, "float4_e2m1fn_x2", "") },
    row(F6E2M3, "F6_E2M3", 6, "", ""),
    row(F6E3M2, "F6_E3M2", 6, "", ""),
    row(U8, "U8", 8, "uint8", "ByteStorage"),
    row(I8, "I8", 8, "int8", "CharStorage"),
    row(F8E5M2, "F8_E5M2", 8, "float8_e5m2", ""),
    row(F8E4M3, "F8_E4M3", 8, "float8_e4m3fn", ""),
    row(F8E8M0, "F8_E8M0", 8, "float8_e8m0fnu", ""),
    row(F8E4M3Fnuz, "F8_E4M3FNUZ", 8, "float8_e4m3fnuz", ""),
    row(F8E5M2Fnuz, "F8_E5M2FNUZ", 8, "float8_e5m2fnuz", ""),
    row(I16, "I16", 16, "int16", "ShortStorage"),
    row(U16, "U16", 16, "uint16", ""),
    row(F16, "F16", 16, "float16", "HalfStorage"),
    row(BF16, "BF16", 16, "bfloat16", "BFloat16Storage"),
    row(I32, "I32", 32, "int32", "IntStorage"),
    row(U32, "U32", 32, "uint32", ""),
    row(F32, "F32", 32, "float32", "FloatStorage"),
    // Two numbers, each of which has a byte order.
    DtypeRow { swap_unit_bytes: 4, ..row(C64, "C64", 64, "complex64", "ComplexFloatStorage") },
    row(F64, "F64", 64, "float64", "DoubleStorage"),
    row(I64, "I64", 64, "int64", "LongStorage"),
    row(U64, "U64", 64, "uint64", ""),
];

/// Storage classes of types that safetensors does not have: class, bytes of an element, torch's name.
const UNSUPPORTED_STORAGES: [(&str, u64, &str); 6] = [
    ("ComplexDoubleStorage", 16, "complex128"),
    ("QInt8Storage", 1, "qint8"),
    ("QUInt8Storage", 1, "quint8"),
    ("QInt32Storage", 4, "qint32"),
    ("QUInt4x2Storage", 1, "quint4x2"),
    ("QUInt2x4Storage", 1, "quint2x4"),
];

/// How the names of torch's types begin, before their bits, that safetensors does not have.
const UNSUPPORTED_PREFIXES: [&str; 7] =
    ["bits", "int", "uint", "qint", "quint", "complex", "bcomplex"];

/// The elements of a storage: their bytes, and their type or torch's name for an unsupported one.
pub struct StorageElement {
    pub bytes: u64,
    pub dtype: Result<Dtype, &'static str>,
}

impl StorageElement {
    /// The elements of a torch storage, by the name of its class.
    pub fn of_class(class: &str) -> Option<StorageElement> {
        if matches!(class, "UntypedStorage" | "_UntypedStorage") {
            return Some(StorageElement { bytes: 1, dtype: Ok(U8) });
        }
        if let Some(row) = DTYPES.iter().find(|row| !class.is_empty() && row.storage_class == class)
        {
            return Some(StorageElement { bytes: u64::from(row.bits / 8), dtype: Ok(row.dtype) });
        }
        let mut unsupported = UNSUPPORTED_STORAGES.iter();
        let &(_, bytes, name) = unsupported.find(|(other, ..)| *other == class)?;
        Some(StorageElement { bytes, dtype: Err(name) })
    }
}

impl Dtype {
    /// All types, in the order of the table.
    pub fn all() -> impl Iterator<Item = Dtype> {
        DTYPES.iter().map(|row| row.dtype)
    }

    fn row(self) -> &'static DtypeRow {
        &DTYPES[self as usize]
    }

    /// The name in a safetensors header.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The type with that name in a safetensors header.
    pub fn from_name(name: &str) -> Option<Dtype> {
        DTYPES.iter().find(|row| row.name == name).map(|row| row.dtype)
    }

    /// The type that torch calls `torch.<name>`.
    pub fn from_torch_name(name: &str) -> Option<Dtype> {
        let mut named = DTYPES.iter().filter(|row| !row.torch_name.is_empty());
        named.find(|row| row.torch_name == name).map(|row| row.dtype)
    }

    /// Whether safetensors lacks the type that torch calls `torch.<name>`, as far as is known here.
    pub fn is_unsupported_by_safetensors(name: &str) -> bool {
        UNSUPPORTED_PREFIXES.into_iter().any(|prefix| {
            let digits = name.strip_prefix(prefix).unwrap_or_default();
            digits.bytes().next().is_some_and(|b| b.is_ascii_digit())
        })
    }

    /// What torch and numpy call the type, if they have it.
    pub fn torch_name(self) -> Option<&'static str> {
        Some(self.row().torch_name).filter(|name| !name.is_empty())
    }

    /// Bits of an element.
    pub fn bits(self) -> u32 {
        self.row().bits
    }

    /// Bytes that are reversed together to change the byte order; 1 where there is none.
    pub fn swap_unit_bytes(self) -> u64 {
        self.row().swap_unit_bytes
    }

    /// Values that torch counts as one element.
    pub fn torch_packing(self) -> u64 {
        self.row().torch_packing
    }

    /// Bytes of an element as torch counts them.
    pub fn torch_item_bytes(self) -> u64 {
        u64::from(self.bits()) * self.torch_packing() / 8
    }

    /// The shape of a tensor whose elements torch counts; `None` if it overflows, or if a scalar is several values.
    pub fn safetensors_shape(self, torch_shape: &[u64]) -> Option<Shape> {
        let mut shape = Shape::from_slice(torch_shape);
        if self.torch_packing() > 1 {
            let last = shape.last_mut()?;
            *last = last.checked_mul(self.torch_packing())?;
        }
        Some(shape)
    }

    /// Bytes of a tensor of this type and shape, if it is a whole number that fits.
    pub fn byte_len(self, shape: &[u64]) -> Option<u64> {
        // A zero makes it empty. Readers multiply in the order of the shape, and refuse what overflows before
        // they meet the zero.
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
        for (index, dtype) in Dtype::all().enumerate() {
            assert_eq!(dtype as usize, index);
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
        }
    }

    #[test]
    fn sizes_that_overflow_or_split_a_byte_are_none() {
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
